// Self-tests of attention and the delta rule: several steps on one cache, against the reference backend of the
// processor.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/random.h"
#include "cuda/backend/kernel_test_data.h"
#include "cuda/backend/kernel_tests.h"
#include "kernels/gdn/updates.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

// Of the norm of a head's outputs: bf16 operands and results; e4m3 keys and values.
constexpr double kAttentionError = 0.02, kAttentionErrorFp8 = 0.05;
// Of the norm of a row: the norm of a head divides by what the state's terms leave, which can be little of them.
constexpr double kDeltaError = 0.1;

// Rows of sequences in a step.
struct Step {
  std::vector<int32_t> tokens;
  std::vector<ops::Sequence> sequences;
};

// Sequences of so many rows behind their positions, which go on; `each` adds pages or states to the s-th.
template <typename Each>
Step step_of(const std::vector<int>& rows, std::vector<int32_t>& positions, const Each& each) {
  Step step;
  for (size_t s = 0; s < rows.size(); ++s) {
    ops::Sequence sequence;
    sequence.first = static_cast<int32_t>(step.tokens.size());
    sequence.count = rows[s];
    sequence.position = positions[s];
    each(s, sequence);
    step.sequences.push_back(sequence);
    step.tokens.insert(step.tokens.end(), static_cast<size_t>(rows[s]), 0);
    positions[s] += rows[s];
  }
  return step;
}

}  // namespace

void KernelTests::attention(int64_t head_dim, int64_t rotary_dim) {
  constexpr int64_t kPagesEach = 12;
  const Stream& stream = of_.card_->stream;
  Random random(20264);
  const bool fp8 = of_.options_.fp8_cache;
  // What a cache rounds is small then: scores that are, and for an e4m3 cache values that are such numbers. With scores
  // three times as large right kernels are off by up to 2.6 % where heads are 64 wide, 1.6 % where they are 256. An
  // e4m3 cache rounds keys by up to 6 %: in a simulation the worst head of 64 is off by 2 % at 0.1, and by 8.6 % at
  // 0.25.
  const std::vector<float> q_weights = bf16_normals(random, head_dim, 1.5),
                           k_weights = bf16_normals(random, head_dim, fp8 ? 0.1 : 0.5);
  // Rows of each sequence in step after step: few rows, behind a long piece, many sequences, whole pieces. Of more
  // heads for a kv head than kNarrowRows, 11 have no equal parts and 16 have two.
  struct Script {
    int64_t heads, kv_heads;
    std::vector<std::vector<int>> steps;
  };
  // So many sequences of 8 heads that a warp adds up each head's splits.
  const int many = std::max(kManySequences, kCombineCtas * of_.card_->device.info().sms / 8 + 1);
  const std::vector<Script> scripts = {
      {8, 2, {{5}, {13}, {1}}},
      {11, 1, {{150}, {1}, {6}}},
      {16, 1, {{70}, {1}, {1}}},
      {8, 2, {std::vector<int>(static_cast<size_t>(many), 1), std::vector<int>(static_cast<size_t>(many), 1)}},
      {8, 2, {{70, 19}, {1, 3}, {1, 1}}}};
  for (const auto& [heads, kv_heads, script] : scripts) {
    CudaBackend& backend = on();
    ops::AttentionParams params;
    params.heads = heads;
    params.kv_heads = kv_heads;
    params.head_dim = head_dim;
    params.rotary_dim = rotary_dim;
    params.rope_theta = 1e7f;
    params.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    params.norm_eps = 1e-6f;
    params.gated = true;
    ops::AttentionParams host = params;
    const ops::Vector q_norm = backend.load_vector(q_weights), k_norm = backend.load_vector(k_weights);
    const ops::Vector host_q = reference_->load_vector(q_weights), host_k = reference_->load_vector(k_weights);
    params.q_norm = &q_norm, params.k_norm = &k_norm, host.q_norm = &host_q, host.k_norm = &host_k;
    const auto count = static_cast<int64_t>(script[0].size());
    const ops::KvCacheShape shape = {2, kv_heads, head_dim, count * kPagesEach + 1, kPage};
    const auto cache = backend.make_kv_cache(shape), host_cache = reference_->make_kv_cache(shape);
    std::vector<std::vector<int32_t>> pages(static_cast<size_t>(count));
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t p = kPagesEach; p > 0; --p)
        pages[static_cast<size_t>(s)].push_back(static_cast<int32_t>(p * count - s));
    }
    std::vector<int32_t> positions(static_cast<size_t>(count));
    for (const std::vector<int>& rows : script) {
      const Step step = step_of(rows, positions, [&](size_t s, ops::Sequence& sequence) { sequence.pages = pages[s]; });
      const auto tokens = static_cast<int64_t>(step.tokens.size());
      const int64_t q_cols = 2 * heads * head_dim, kv_cols = kv_heads * head_dim, cols = q_cols + 2 * kv_cols;
      std::vector<float> qkv = bf16_normals(random, tokens * cols);
      for (int64_t i = 0; fp8 && i < tokens * cols; ++i) {
        float& value = qkv[static_cast<size_t>(i)];
        if (i % cols >= cols - kv_cols) value = nvfp4::e4m3_to_float(nvfp4::float_to_e4m3(value));
      }
      const auto attend = [&](ops::Backend& b, const ops::AttentionParams& p, const ops::Tensor& in, ops::KvCache& kv,
                              const ops::Tensor& out) {
        b.begin_step({step.tokens, step.sequences, {}});
        b.attention(p, in.slice_cols(0, q_cols), in.slice_cols(q_cols, q_cols + kv_cols),
                    in.slice_cols(q_cols + kv_cols, cols), kv, 1, out);
        return read(b, out);
      };
      const TestRows in = rows_of(backend, stream, qkv, cols),
                     out = empty_rows(backend, stream, tokens, heads * head_dim);
      const TestRows host_in = host_rows(*reference_, qkv, cols),
                     host_out =
                         host_rows(*reference_, std::vector<float>(static_cast<size_t>(tokens * heads * head_dim)),
                                   heads * head_dim);
      launched_.clear();
      const std::vector<float> got = attend(backend, params, in.tensor, *cache, out.tensor);
      note(compare_pieces(got, attend(*reference_, host, host_in.tensor, *host_cache, host_out.tensor),
                          heads * head_dim, head_dim, fp8 ? kAttentionErrorFp8 : kAttentionError));
    }
  }
}

// A recurrent layer: its parameters and states on the card and with the reference.
struct KernelTests::Recurrent {
  static constexpr int64_t kKeyHeads = 2, kValueHeads = 4;
  static constexpr int kSlots = 1 + gdn::kMostUpdates;  // of a sequence
  // A step: rows of each sequence. Verified, each row has a slot, states are put off where there are kernels for it,
  // and one of the rows is gone on from; before it, states that were put off may be made.
  struct Turn {
    std::vector<int> rows;
    bool verified = false;
    bool made = false;
  };

  Recurrent(KernelTests& tests_, CudaBackend& backend_, Random& random_, int64_t key_dim, int64_t value_dim,
            size_t sequences)
      : tests(tests_), backend(backend_), random(random_), count(sequences), positions(sequences), ends(sequences) {
    shape.layers = 2;
    shape.slots = static_cast<int64_t>(sequences) * kSlots;
    shape.key_heads = kKeyHeads;
    shape.value_heads = kValueHeads;
    shape.key_dim = key_dim;
    shape.value_dim = value_dim;
    shape.conv_taps = gdn::kTaps;
    const auto both = [&](const std::vector<float>& values) {
      on_card.push_back(backend.load_vector(values));
      on_host.push_back(tests.reference_->load_vector(values));
    };
    both(bf16_normals(random, shape.conv_channels() * gdn::kTaps, 0.5));
    both(bf16_normals(random, kValueHeads));
    both(bf16_normals(random, kValueHeads));
    both(bf16_normals(random, value_dim));
    states = backend.make_state_cache(shape);
    host_states = tests.reference_->make_state_cache(shape);
    for (size_t s = 0; s < count; ++s) ends[s].slot = slot(s, 0);
  }

  static int32_t slot(size_t sequence, size_t row) { return static_cast<int32_t>(sequence * kSlots + row); }

  void run(ops::Backend& b, const std::vector<ops::Vector>& v, const Step& step, const ops::Tensor& in,
           ops::StateCache& cache, const ops::Tensor& out) const {
    const ops::DeltaNetParams params = {kKeyHeads, kValueHeads, shape.key_dim, shape.value_dim, gdn::kTaps,
                                        1e-6f,     &v[0],       &v[1],         &v[2],           &v[3]};
    const int64_t channels = shape.conv_channels(), width = kValueHeads * shape.value_dim;
    b.begin_step({step.tokens, step.sequences, {}});
    b.delta_net(params, in.slice_cols(0, channels), in.slice_cols(channels, channels + width),
                in.slice_cols(channels + width, in.cols - kValueHeads), in.slice_cols(in.cols - kValueHeads, in.cols),
                cache, 1, out);
  }

  // Whether it was right. What is put off shows in the turn behind, whose case this is then part of: `shows_later`.
  bool take(const Turn& turn, bool shows_later) {
    if (turn.made) {
      std::vector<cpu::PutOffState> made;
      for (cpu::PutOffState& end : ends) {
        if (end.updates.count > 0) made.push_back(end);
        end.updates = {};
      }
      backend.make_states(static_cast<const CardStateCache&>(*states), made);
    }
    const int put_off_rows = turn.verified ? backend.put_off_rows() : 0;
    std::vector<std::vector<int32_t>> slots(count);
    const Step step = step_of(turn.rows, positions, [&](size_t s, ops::Sequence& sequence) {
      sequence.state_in = ends[s].slot;
      sequence.updates = ends[s].updates;
      sequence.puts_off = sequence.count > 1 && sequence.count <= put_off_rows;
      const auto written = static_cast<size_t>(turn.verified ? sequence.count : 1);
      const size_t first = turn.verified ? 0 : static_cast<size_t>(ends[s].slot + 1) % kSlots;
      for (size_t i = 0; i < written; ++i) slots[s].push_back(slot(s, first + i));
      sequence.state_out = slots[s];
      const size_t last = (s + 1) % written;
      ends[s] = {slots[s][last], {}};
      if (sequence.puts_off && last > 0) ends[s].updates = {slots[s][0], slots[s][1], static_cast<int32_t>(last)};
      if (turn.verified) positions[s] += static_cast<int32_t>(last) + 1 - sequence.count;
    });
    const auto tokens = static_cast<int64_t>(step.tokens.size());
    const int64_t width = kValueHeads * shape.value_dim, cols = shape.conv_channels() + width + 2 * kValueHeads;
    const std::vector<float> values = bf16_normals(random, tokens * cols);
    const Stream& stream = tests.of_.card_->stream;
    const TestRows in = rows_of(backend, stream, values, cols), out = empty_rows(backend, stream, tokens, width);
    const TestRows host_in = host_rows(*tests.reference_, values, cols),
                   host_out =
                       host_rows(*tests.reference_, std::vector<float>(static_cast<size_t>(tokens * width)), width);
    run(backend, on_card, step, in.tensor, *states, out.tensor);
    const std::vector<float> got = read(backend, out.tensor);
    run(*tests.reference_, on_host, step, host_in.tensor, *host_states, host_out.tensor);
    const std::string wrong = compare_pieces(got, read(*tests.reference_, host_out.tensor), width, width, kDeltaError);
    if (!wrong.empty() || !shows_later) tests.note(wrong);
    return wrong.empty();
  }

  KernelTests& tests;
  CudaBackend& backend;
  Random& random;
  size_t count;
  ops::StateCacheShape shape;
  std::vector<ops::Vector> on_card, on_host;  // convolution, A_log, dt_bias, norm
  std::unique_ptr<ops::StateCache> states, host_states;
  std::vector<int32_t> positions;
  std::vector<cpu::PutOffState> ends;  // of each sequence: where its state is
};

void KernelTests::delta_rule(int64_t key_dim, int64_t value_dim, bool updates) {
  Random random(20265);
  // One row of one sequence more than there are SMs for, with so many CTAs each.
  const auto several = [&](int ctas, int rows) {
    return std::vector<int>(static_cast<size_t>(of_.card_->device.info().sms / ctas + 1), rows);
  };
  const std::vector<int> many(kManySequences, 1);
  std::vector<std::vector<Recurrent::Turn>> scripts = {
      {{{1}}, {{1}}},         {{{5}}, {{16}}, {{1}}},
      {{many}, {many}},       {{several(16, 2)}, {several(16, 2)}},  // too many for 4 CTAs a head
      {{several(8, 2)}},                                             // and for 2
      {{{150, 20}}, {{1, 2}}}};
  if (updates) {
    const int most = 1 + gdn::most_updates(static_cast<int>(key_dim));
    const std::vector<int> twos(kManySequences, 2);
    scripts = {{{{20, 3, 1}}, {{4, most, 2}, true}, {{3, most, 4}, true}, {{1, 1, 1}}, {{2, 2, 2}, true}, {{7, 2, 1}}},
               {{{3}, true}, {{2}, true}},
               {{several(16, 4), true}, {several(16, 3), true}, {several(16, 2), true, true}},
               {{several(8, 3), true}, {several(8, 2), true}},
               {{twos, true}, {many}}};
  }
  for (const std::vector<Recurrent::Turn>& script : scripts) {
    Recurrent layer(*this, on(), random, key_dim, value_dim, script[0].rows.size());
    launched_.clear();
    for (size_t i = 0; i < script.size(); ++i) {
      const bool shows_later = script[i].verified && i + 1 < script.size() && !script[i + 1].made;
      if (!layer.take(script[i], shows_later)) break;  // what follows begins with wrong states
    }
  }
}

}  // namespace fourfold::cuda
