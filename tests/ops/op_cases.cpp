#include "op_cases.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/math.h"
#include "cpu/host/routing.h"
#include "nvfp4/number.h"

namespace fourfold::test {
namespace {

using ops::Format;

constexpr int64_t kTokenCounts[] = {1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 200};

StepBatch plain_batch(int64_t tokens) {
  StepBatch step;
  step.tokens.assign(static_cast<size_t>(tokens), 0);
  ops::Sequence sequence;
  sequence.count = static_cast<int32_t>(tokens);
  step.sequences.push_back(sequence);
  return step;
}

// ---- products

struct Part {
  Format format;
  int64_t rows;
  Grid grid = Grid::kBlocks;
};

std::vector<Result> run_linear(cpu::CpuBackend& backend, const std::vector<Part>& parts, int64_t columns) {
  Random random(17);
  std::vector<std::shared_ptr<OwnedMatrix>> owned;
  std::vector<ops::MatrixSource> sources;
  int64_t rows = 0;
  bool nvfp4 = false;
  for (const Part& part : parts) {
    nvfp4 = nvfp4 || part.format == Format::kNvfp4;
    owned.push_back(part.format == Format::kFp8 ? random_fp8(random, part.rows, columns, part.grid)
                                                : random_matrix(random, part.format, part.rows, columns));
    sources.push_back(owned.back()->source);
    rows += part.rows;
  }
  const auto matrix = backend.load_matrix(sources);
  EXPECT_EQ(matrix->rows(), rows);
  EXPECT_EQ(matrix->columns(), columns);
  owned.clear();  // a backend keeps nothing of the sources
  std::vector<Result> results;
  for (const int64_t tokens : kTokenCounts) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Activations x(backend, random_values(random, tokens * columns), tokens, columns);
    const Activations out(backend, tokens, rows);
    backend.linear(x.tensor(), *matrix, out.tensor());
    // With one output a row's error is a single sum's and not a norm's: the worst of hundreds lies further out.
    results.push_back({"T=" + std::to_string(tokens), tokens, rows, out.values(),
                       product_tolerance(backend.isa(), nvfp4, columns) * (rows == 1 ? 1.5 : 1.0),
                       0.05 * std::sqrt(static_cast<double>(columns))});
  }
  return results;
}

struct MoeShape {
  int64_t experts, top_k, hidden, width, shared;
  bool shared_gate;
  bool renormalize = true;
};

std::vector<Result> run_moe(cpu::CpuBackend& backend, Format format, Format shared_format, const MoeShape& shape,
                            double extra_tolerance) {
  Random random(23);
  const bool nvfp4 = format == Format::kNvfp4 || shared_format == Format::kNvfp4;
  const auto router = random_matrix(random, Format::kBf16, shape.experts, shape.hidden, 0.1);
  std::vector<std::shared_ptr<OwnedMatrix>> weights;
  for (int64_t e = 0; e < shape.experts; ++e) {
    weights.push_back(random_matrix(random, format, shape.width, shape.hidden));
    weights.push_back(random_matrix(random, format, shape.width, shape.hidden, 0.08));
    weights.push_back(random_matrix(random, format, shape.hidden, shape.width));
  }
  const auto at = [&](int64_t i) { return weights[static_cast<size_t>(i)]->source; };
  int64_t announced = 0;
  const auto experts = backend.load_experts(
      shape.experts,
      [&](int64_t e) {
        return ops::ExpertSource{at(3 * e), at(3 * e + 1), at(3 * e + 2)};
      },
      [&](int64_t e) { EXPECT_EQ(e, announced++); });
  EXPECT_EQ(announced, shape.experts);
  EXPECT_EQ(experts->count(), shape.experts);
  EXPECT_EQ(experts->hidden(), shape.hidden);
  EXPECT_EQ(experts->intermediate(), shape.width);
  weights.clear();

  std::unique_ptr<ops::Matrix> shared_gate_up, shared_down, shared_gate;
  const auto load = [&](std::initializer_list<std::shared_ptr<OwnedMatrix>> parts) {
    std::vector<ops::MatrixSource> sources;
    for (const auto& part : parts) sources.push_back(part->source);
    return backend.load_matrix(sources);
  };
  const auto router_matrix = load({router});
  if (shape.shared > 0) {
    shared_gate_up = load({random_matrix(random, shared_format, shape.shared, shape.hidden),
                           random_matrix(random, shared_format, shape.shared, shape.hidden)});
    shared_down = load({random_matrix(random, shared_format, shape.hidden, shape.shared)});
    if (shape.shared_gate) shared_gate = load({random_matrix(random, Format::kBf16, 1, shape.hidden)});
  }
  ops::MoeParams params;
  params.router = router_matrix.get();
  params.experts = experts.get();
  params.top_k = shape.top_k;
  params.renormalize = shape.renormalize;
  params.shared_gate_up = shared_gate_up.get();
  params.shared_down = shared_down.get();
  params.shared_gate = shared_gate.get();

  // Tokens whose choice of experts is clear: the last chosen logit stands out from the next by more than rounding.
  std::vector<float> router_rows(static_cast<size_t>(shape.experts * shape.hidden));
  for (int64_t e = 0; e < shape.experts; ++e) ops::dequantize(router->source, e, router_rows.data() + e * shape.hidden);
  const auto clear_choice = [&](const float* x) {
    std::vector<double> logits;
    for (int64_t e = 0; e < shape.experts; ++e) {
      double sum = 0;
      for (int64_t i = 0; i < shape.hidden; ++i) {
        sum += static_cast<double>(x[i]) * static_cast<double>(router_rows[static_cast<size_t>(e * shape.hidden + i)]);
      }
      logits.push_back(sum);
    }
    std::sort(logits.rbegin(), logits.rend());
    const auto k = static_cast<size_t>(shape.top_k);
    return k == logits.size() || logits[k - 1] - logits[k] > 0.03;
  };

  std::vector<Result> results;
  for (const int64_t tokens : kTokenCounts) {
    std::vector<float> x;
    while (static_cast<int64_t>(x.size()) < tokens * shape.hidden) {
      // Every fifth token repeats the first: experts that several tokens share.
      std::vector<float> row = random_values(random, shape.hidden);
      if (static_cast<int64_t>(x.size()) / shape.hidden % 5 == 4) row.assign(x.begin(), x.begin() + shape.hidden);
      if (clear_choice(row.data())) x.insert(x.end(), row.begin(), row.end());
    }
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Activations in(backend, x, tokens, shape.hidden);
    const Activations out(backend, tokens, shape.hidden);
    backend.moe(params, in.tensor(), out.tensor());
    results.push_back(
        {"T=" + std::to_string(tokens), tokens, shape.hidden, out.values(),
         3.0 * product_tolerance(backend.isa(), nvfp4, std::max(shape.hidden, shape.width)) + extra_tolerance});
  }
  return results;
}

std::vector<Result> run_mlp(cpu::CpuBackend& backend, Format gate, Format up, Format down, int64_t hidden,
                            int64_t width, double extra_tolerance) {
  Random random(29);
  const bool nvfp4 = gate == Format::kNvfp4 || up == Format::kNvfp4 || down == Format::kNvfp4;
  const auto gate_matrix = random_matrix(random, gate, width, hidden);
  const auto up_matrix = random_matrix(random, up, width, hidden);
  const auto down_matrix = random_matrix(random, down, hidden, width);
  const auto gate_up = backend.load_matrix(std::vector{gate_matrix->source, up_matrix->source});
  const auto down_loaded = backend.load_matrix(std::vector{down_matrix->source});
  const ops::MlpParams params{gate_up.get(), down_loaded.get()};
  std::vector<Result> results;
  for (const int64_t tokens : kTokenCounts) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Activations x(backend, random_values(random, tokens * hidden), tokens, hidden);
    const Activations out(backend, tokens, hidden);
    backend.mlp(params, x.tensor(), out.tensor());
    results.push_back({"T=" + std::to_string(tokens), tokens, hidden, out.values(),
                       3.0 * product_tolerance(backend.isa(), nvfp4, std::max(hidden, width)) + extra_tolerance});
  }
  return results;
}

// ---- rows

std::vector<Result> run_rows(cpu::CpuBackend& backend, int64_t cols) {
  Random random(31);
  std::vector<Result> results;
  const double tolerance = 0x1p-24 * (8.0 + std::sqrt(static_cast<double>(cols)));
  const auto keep = [&](const char* what, const Activations& x) {
    results.push_back(
        {std::string(what) + " T=" + std::to_string(x.tensor().rows), x.tensor().rows, cols, x.values(), tolerance});
  };
  const ops::Vector weight = backend.load_vector(random_values(random, cols));
  for (const int64_t tokens : kTokenCounts) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Activations x(backend, random_values(random, tokens * cols, 3.0), tokens, cols);
    const Activations delta(backend, random_values(random, tokens * cols), tokens, cols);
    const Activations out(backend, tokens, cols);
    backend.rms_norm(x.tensor(), weight, 1e-6f, out.tensor());
    keep("rms_norm", out);
    backend.add_rms_norm(x.tensor(), delta.tensor(), weight, 1e-6f, out.tensor());
    keep("add_rms_norm residual", x);
    keep("add_rms_norm", out);
    backend.add(x.tensor(), delta.tensor());
    keep("add", x);
    backend.rms_norm(x.tensor(), weight, 1e-6f, x.tensor());
    keep("rms_norm in place", x);
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < tokens; i += 3) rows.push_back(static_cast<int32_t>((i * 7) % tokens));
    const Activations gathered(backend, static_cast<int64_t>(rows.size()), cols);
    backend.gather_rows(x.tensor(), rows, gathered.tensor());
    keep("gather_rows", gathered);
  }
  return results;
}

std::vector<Result> run_embed(cpu::CpuBackend& backend, Format format, int64_t rows, int64_t cols) {
  Random random(37);
  auto owned = random_matrix(random, format, rows, cols);
  const auto table = backend.load_table(owned->source);
  owned.reset();
  std::vector<Result> results;
  for (const int64_t tokens : kTokenCounts) {
    StepBatch step = plain_batch(tokens);
    for (int32_t& token : step.tokens) token = static_cast<int32_t>(random.below(static_cast<uint64_t>(rows)));
    step.tokens[0] = static_cast<int32_t>(rows - 1);
    backend.begin_step(step.batch());
    const Activations out(backend, tokens, cols);
    backend.embed(*table, out.tensor());
    results.push_back({"T=" + std::to_string(tokens), tokens, cols, out.values(), 0.0});
  }
  return results;
}

// ---- token mixers: several sequences over several steps

// Tokens that sequences 0, 1, ... contribute to each step; 0: not in the batch.
using Script = std::vector<std::vector<int64_t>>;

const Script kMixedScript = {{37, 65, 0}, {1, 64, 0}, {1, 17, 3}, {1, 1, 1}, {5, 1, 16}, {1, 2, 1}};

struct AttentionShape {
  int64_t heads, kv_heads, head_dim, rotary_dim, page_size;
  bool gated, norms;
};

// `exact`: keys and values are f16 numbers that no norm or rotation changes, so that the cache rounds nothing.
std::vector<Result> run_attention(cpu::CpuBackend& backend, const AttentionShape& shape, const Script& script,
                                  bool exact) {
  Random random(41);
  const int64_t dim = shape.head_dim;
  ops::AttentionParams params;
  params.heads = shape.heads;
  params.kv_heads = shape.kv_heads;
  params.head_dim = dim;
  params.rotary_dim = exact ? 0 : shape.rotary_dim;
  params.rope_theta = 1e7f;
  params.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  params.norm_eps = 1e-6f;
  params.gated = shape.gated;
  const ops::Vector q_norm = backend.load_vector(random_values(random, dim));
  const ops::Vector k_norm = backend.load_vector(random_values(random, dim));
  if (shape.norms) params.q_norm = &q_norm;
  if (shape.norms && !exact) params.k_norm = &k_norm;

  const auto sequences = static_cast<int64_t>(script[0].size());
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    int64_t total = 0;
    for (const auto& counts : script) total += counts[static_cast<size_t>(s)];
    longest = std::max(longest, total);
  }
  const int64_t pages_each = ceil_div(longest, shape.page_size);
  ops::KvCacheShape cache_shape;
  cache_shape.layers = 2;
  cache_shape.kv_heads = shape.kv_heads;
  cache_shape.head_dim = dim;
  cache_shape.pages = sequences * pages_each + 3;
  cache_shape.page_size = shape.page_size;
  const auto cache = backend.make_kv_cache(cache_shape);
  // Pages hold whatever was there before: poison all but the padding.
  auto& host = dynamic_cast<cpu::HostKvCache&>(*cache);
  for (int64_t page = 0; page < cache_shape.pages; ++page) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (int64_t row = 0; row < 2 * shape.page_size; ++row) {
        for (int64_t i = 0; i < dim; ++i) {
          const int64_t at = row * host.padded_dim() + i;
          if (host.type() == ops::DType::kF32) {
            host.keys<float>(1, page, head)[at] = std::numeric_limits<float>::quiet_NaN();
          } else {
            host.keys<uint16_t>(1, page, head)[at] = 0x7fc0;
          }
        }
      }
    }
  }
  // Pages of a sequence are neither adjacent nor in order.
  std::vector<std::vector<int32_t>> pages(static_cast<size_t>(sequences));
  for (int64_t p = 0; p < pages_each; ++p) {
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t page = cache_shape.pages - 1 - (p * sequences + (s + p) % sequences);
      pages[static_cast<size_t>((s + p) % sequences)].push_back(static_cast<int32_t>(page));
    }
  }

  std::vector<int64_t> positions(static_cast<size_t>(sequences), 0);
  std::vector<Result> results;
  for (size_t i = 0; i < script.size(); ++i) {
    StepBatch step;
    for (size_t s = 0; s < script[i].size(); ++s) {
      const int64_t count = script[i][s];
      if (count == 0) continue;
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(positions[s]);
      sequence.pages = pages[s];
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(count), 0);
      positions[s] += count;
    }
    const auto tokens = static_cast<int64_t>(step.tokens.size());
    const int64_t q_cols = shape.heads * dim * (shape.gated ? 2 : 1);
    std::vector<float> keys = random_values(random, tokens * shape.kv_heads * dim);
    std::vector<float> values = random_values(random, tokens * shape.kv_heads * dim);
    if (exact) {
      for (auto* list : {&keys, &values}) {
        for (float& x : *list) x = nvfp4::f16_to_float(nvfp4::float_to_f16(x));
      }
    }
    const Activations q(backend, random_values(random, tokens * q_cols, 1.5), tokens, q_cols);
    const Activations k(backend, keys, tokens, shape.kv_heads * dim);
    const Activations v(backend, values, tokens, shape.kv_heads * dim);
    const Activations out(backend, tokens, shape.heads * dim);
    backend.begin_step(step.batch());
    backend.attention(params, q.tensor(), k.tensor(), v.tensor(), *cache, 1, out.tensor());
    // f16 keys and values are off by up to 2^-12; scores of a few units turn that into about the same relative error.
    const bool f16_cache = host.type() == ops::DType::kF16 && !exact;
    results.push_back(
        {"step " + std::to_string(i), tokens, shape.heads * dim, out.values(), f16_cache ? 0x1p-9 : 5e-6});
  }
  return results;
}

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
};

std::vector<Result> run_delta_net(cpu::CpuBackend& backend, const DeltaShape& shape, const Script& script) {
  Random random(43);
  ops::StateCacheShape cache_shape;
  cache_shape.layers = 2;
  cache_shape.key_heads = shape.key_heads;
  cache_shape.value_heads = shape.value_heads;
  cache_shape.key_dim = shape.key_dim;
  cache_shape.value_dim = shape.value_dim;
  cache_shape.conv_taps = shape.taps;
  const auto sequences = static_cast<int64_t>(script[0].size());
  cache_shape.slots = 2 * sequences + 1;
  const auto cache = backend.make_state_cache(cache_shape);
  auto& states = dynamic_cast<cpu::HostStateCache&>(*cache);
  const int64_t channels = cache_shape.conv_channels();
  const std::vector<float> poison(static_cast<size_t>(shape.key_dim * shape.value_dim),
                                  std::numeric_limits<float>::quiet_NaN());
  for (int64_t slot = 0; slot < cache_shape.slots; ++slot) {
    for (int64_t h = 0; h < shape.value_heads; ++h) states.write_state(1, slot, h, poison);
    std::fill_n(states.convolution(1, slot), (shape.taps - 1) * channels, poison[0]);
  }

  ops::DeltaNetParams params;
  params.key_heads = shape.key_heads;
  params.value_heads = shape.value_heads;
  params.key_dim = shape.key_dim;
  params.value_dim = shape.value_dim;
  params.conv_taps = shape.taps;
  params.norm_eps = 1e-6f;
  const ops::Vector conv = backend.load_vector(random_values(random, channels * shape.taps, 0.5));
  const ops::Vector a_log = backend.load_vector(random_values(random, shape.value_heads, 1.0));
  const ops::Vector dt_bias = backend.load_vector(random_values(random, shape.value_heads, 1.0));
  const ops::Vector norm = backend.load_vector(random_values(random, shape.value_dim));
  params.conv = &conv;
  params.a_log = &a_log;
  params.dt_bias = &dt_bias;
  params.norm = &norm;

  // Sequence s keeps its state in slot s, moves to slot sequences + s in every third step, and back in the next.
  std::vector<int64_t> positions(static_cast<size_t>(sequences), 0);
  std::vector<int32_t> slots;
  for (int32_t s = 0; s < sequences; ++s) slots.push_back(s);
  std::vector<Result> results;
  const int64_t width = shape.value_heads * shape.value_dim;
  for (size_t i = 0; i < script.size(); ++i) {
    StepBatch step;
    for (size_t s = 0; s < script[i].size(); ++s) {
      const int64_t count = script[i][s];
      if (count == 0) continue;
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(positions[s]);
      sequence.state_in = slots[s];
      const auto other = static_cast<int32_t>(slots[s] < sequences ? slots[s] + sequences : slots[s] - sequences);
      if (i % 3 != 0) slots[s] = other;
      sequence.state_out = std::span(&slots[s], 1);
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(count), 0);
      positions[s] += count;
    }
    const auto tokens = static_cast<int64_t>(step.tokens.size());
    const Activations qkv(backend, random_values(random, tokens * channels), tokens, channels);
    const Activations z(backend, random_values(random, tokens * width), tokens, width);
    const Activations b(backend, random_values(random, tokens * shape.value_heads), tokens, shape.value_heads);
    const Activations a(backend, random_values(random, tokens * shape.value_heads), tokens, shape.value_heads);
    const Activations out(backend, tokens, width);
    backend.begin_step(step.batch());
    backend.delta_net(params, qkv.tensor(), z.tensor(), b.tensor(), a.tensor(), *cache, 1, out.tensor());
    // The output norm divides by the size of o, which can be small against its terms.
    results.push_back({"step " + std::to_string(i), tokens, width, out.values(), 2e-5});
    for (const ops::Sequence& sequence : step.sequences) {
      std::vector<float> all;
      std::vector<float> one(poison.size());
      for (int64_t h = 0; h < shape.value_heads; ++h) {
        states.read_state(1, sequence.state_out[0], h, one);
        all.insert(all.end(), one.begin(), one.end());
      }
      results.push_back(
          {"state after step " + std::to_string(i), shape.value_heads, shape.key_dim * shape.value_dim, all, 1e-5});
      if (shape.taps > 1) {
        const float* history = states.convolution(1, sequence.state_out[0]);
        results.push_back({"convolution after step " + std::to_string(i), shape.taps - 1, channels,
                           std::vector<float>(history, history + (shape.taps - 1) * channels), 0.0});
      }
    }
  }
  return results;
}

std::vector<OpCase> make_cases() {
  std::vector<OpCase> cases;
  const auto add = [&](std::string name, auto run, bool nvfp4_activations = false) {
    cases.push_back({std::move(name), nvfp4_activations, run});
  };
  using Backend = cpu::CpuBackend;

  // Shapes of the Qwen3.5 models with every size divided by 8 or so, then odd ones.
  for (const Format format : {Format::kF32, Format::kBf16, Format::kF16, Format::kFp8, Format::kNvfp4}) {
    const std::string name = ops::format_name(format);
    add("linear_" + name + "_1024x256", [=](Backend& b) { return run_linear(b, {{format, 1024}}, 256); });
    add("linear_" + name + "_384x1024", [=](Backend& b) { return run_linear(b, {{format, 384}}, 1024); });
    add("linear_" + name + "_37x48", [=](Backend& b) { return run_linear(b, {{format, 37}}, 48); });
    add("linear_" + name + "_1x272", [=](Backend& b) { return run_linear(b, {{format, 1}}, 272); });
    add("linear_" + name + "_5x16", [=](Backend& b) { return run_linear(b, {{format, 5}}, 16); });
    if (format != Format::kNvfp4) {
      add("linear_" + name + "_67x101", [=](Backend& b) { return run_linear(b, {{format, 67}}, 101); });
      add("linear_" + name + "_2x1", [=](Backend& b) { return run_linear(b, {{format, 2}}, 1); });
    }
  }
  add("linear_fp8_tensor_128x320", [](Backend& b) { return run_linear(b, {{Format::kFp8, 128, Grid::kTensor}}, 320); });
  add("linear_fp8_rows_100x320", [](Backend& b) { return run_linear(b, {{Format::kFp8, 100, Grid::kRows}}, 320); });
  add("linear_stacked_same", [](Backend& b) {
    return run_linear(b, {{Format::kNvfp4, 64}, {Format::kNvfp4, 8}, {Format::kNvfp4, 24}}, 512);
  });
  add("linear_stacked_odd", [](Backend& b) {
    return run_linear(b, {{Format::kNvfp4, 33}, {Format::kNvfp4, 7}, {Format::kNvfp4, 1}}, 80);
  });
  add("linear_stacked_mixed", [](Backend& b) {
    return run_linear(
        b, {{Format::kFp8, 40, Grid::kTensor}, {Format::kBf16, 3}, {Format::kNvfp4, 21}, {Format::kF32, 2}}, 192);
  });
  add(
      "linear_w4a4",
      [](Backend& b) {
        return run_linear(b, {{Format::kNvfp4, 200}, {Format::kBf16, 8}}, 512);
      },
      true);

  const MoeShape small{32, 8, 256, 64, 64, true};     // 35B-A3B
  const MoeShape middle{16, 8, 384, 128, 128, true};  // 122B-A10B
  const MoeShape large{64, 10, 256, 128, 128, true};  // 397B-A17B
  for (const Format format : {Format::kNvfp4, Format::kBf16, Format::kFp8}) {
    const std::string name = ops::format_name(format);
    add("moe_" + name + "_small", [=](Backend& b) { return run_moe(b, format, Format::kBf16, small, 0); });
    add("moe_" + name + "_middle", [=](Backend& b) { return run_moe(b, format, format, middle, 0); });
  }
  add("moe_nvfp4_large", [=](Backend& b) { return run_moe(b, Format::kNvfp4, Format::kNvfp4, large, 0); });
  add("moe_no_shared", [](Backend& b) {
    return run_moe(b, Format::kNvfp4, Format::kBf16, {6, 2, 80, 48, 0, false}, 0);
  });
  add("moe_all_experts", [](Backend& b) {
    return run_moe(b, Format::kNvfp4, Format::kBf16, {5, 5, 48, 16, 32, false, false}, 0);
  });
  add("moe_plain_softmax", [](Backend& b) {
    return run_moe(b, Format::kNvfp4, Format::kFp8, {7, 1, 112, 32, 16, true, false}, 0);
  });
  // A value that rounds the other way before its second quantisation is one step of e2m1 off.
  add(
      "moe_w4a4", [=](Backend& b) { return run_moe(b, Format::kNvfp4, Format::kNvfp4, small, 2e-2); }, true);

  // Widths that are no whole words, so that padding is multiplied.
  add("moe_bf16_odd", [](Backend& b) { return run_moe(b, Format::kBf16, Format::kBf16, {6, 2, 75, 23, 9, true}, 0); });
  add("moe_fp8_odd", [](Backend& b) { return run_moe(b, Format::kFp8, Format::kFp8, {6, 2, 75, 23, 9, true}, 0); });
  add("mlp_bf16_odd", [](Backend& b) { return run_mlp(b, Format::kBf16, Format::kBf16, Format::kBf16, 51, 23, 0); });

  add("mlp_nvfp4", [](Backend& b) { return run_mlp(b, Format::kNvfp4, Format::kNvfp4, Format::kNvfp4, 256, 704, 0); });
  add("mlp_bf16", [](Backend& b) { return run_mlp(b, Format::kBf16, Format::kBf16, Format::kBf16, 320, 96, 0); });
  add("mlp_mixed", [](Backend& b) { return run_mlp(b, Format::kFp8, Format::kNvfp4, Format::kF16, 144, 48, 0); });
  add(
      "mlp_w4a4", [](Backend& b) { return run_mlp(b, Format::kNvfp4, Format::kNvfp4, Format::kNvfp4, 256, 192, 2e-2); },
      true);

  for (const int64_t cols : {1, 7, 100, 2048}) {
    add("rows_" + std::to_string(cols), [=](Backend& b) { return run_rows(b, cols); });
  }
  for (const Format format : {Format::kF32, Format::kBf16, Format::kF16, Format::kFp8, Format::kNvfp4}) {
    add(std::string("embed_") + ops::format_name(format), [=](Backend& b) { return run_embed(b, format, 99, 112); });
  }

  const auto add_attention = [&](const std::string& name, const AttentionShape& shape, const Script& script) {
    add("attention_" + name, [=](Backend& b) { return run_attention(b, shape, script, false); });
    add("attention_" + name + "_exact", [=](Backend& b) { return run_attention(b, shape, script, true); });
  };
  add_attention("35b", {16, 2, 256, 64, 16, true, true}, kMixedScript);
  add_attention("122b", {32, 2, 256, 64, 64, true, true}, {{20, 9}, {1, 1}, {1, 4}});
  add_attention("plain", {4, 4, 64, 64, 7, false, false}, kMixedScript);
  add_attention("odd", {6, 2, 40, 20, 1, false, true}, kMixedScript);
  add_attention("five_to_one", {5, 1, 96, 32, 100, true, false}, kMixedScript);
  add_attention("tiny", {2, 1, 2, 2, 3, true, true}, kMixedScript);
  add_attention("long", {4, 1, 32, 16, 16, true, true}, {{700, 0}, {600, 3}, {1, 1}, {4, 300}, {1, 1}});

  add("delta_net_35b", [](Backend& b) { return run_delta_net(b, {2, 4, 128, 128, 4}, kMixedScript); });
  add("delta_net_122b", [](Backend& b) { return run_delta_net(b, {1, 4, 128, 128, 4}, kMixedScript); });
  add("delta_net_small", [](Backend& b) { return run_delta_net(b, {3, 3, 16, 32, 4}, kMixedScript); });
  add("delta_net_odd", [](Backend& b) { return run_delta_net(b, {2, 4, 21, 19, 3}, kMixedScript); });
  add("delta_net_tiny", [](Backend& b) { return run_delta_net(b, {1, 2, 2, 2, 2}, kMixedScript); });
  add("delta_net_no_history", [](Backend& b) { return run_delta_net(b, {2, 2, 24, 40, 1}, kMixedScript); });
  add("delta_net_long", [](Backend& b) { return run_delta_net(b, {1, 2, 64, 48, 4}, {{513, 1}, {200, 79}, {1, 15}}); });
  return cases;
}

}  // namespace

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> cases = make_cases();
  return cases;
}

}  // namespace fourfold::test
