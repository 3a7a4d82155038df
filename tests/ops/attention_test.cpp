// Attention of the fast instruction sets gives a token the same result to the last bit, however the work is cut.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "base/math.h"
#include "op_harness.h"

namespace fourfold::test {
namespace {

constexpr int64_t kHeads = 8;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kDim = 64;
constexpr int64_t kPage = 16;
constexpr int64_t kTokens = 700;
constexpr int64_t kQueryCols = kHeads * kDim * 2;
constexpr int64_t kKeyCols = kKvHeads * kDim;

struct Inputs {
  std::vector<float> q, k, v;
};

Inputs random_inputs(uint64_t seed) {
  Random random(seed);
  return {random_values(random, kTokens * kQueryCols, 2.0), random_values(random, kTokens * kKeyCols),
          random_values(random, kTokens * kKeyCols)};
}

// The outputs of sequence 0 when it is computed in pieces of the given sizes; with `company`, a second sequence takes
// other pieces of the same steps.
std::vector<float> run(cpu::CpuBackend& backend, const Inputs& inputs, const std::vector<int64_t>& pieces,
                       bool company) {
  ops::AttentionParams params;
  params.heads = kHeads;
  params.kv_heads = kKvHeads;
  params.head_dim = kDim;
  params.rotary_dim = 16;
  params.rope_theta = 1e7f;
  params.scale = 0.125f;
  params.norm_eps = 1e-6f;
  params.gated = true;
  ops::KvCacheShape shape;
  shape.layers = 1;
  shape.kv_heads = kKvHeads;
  shape.head_dim = kDim;
  shape.pages = 3 * ceil_div(kTokens, kPage);
  shape.page_size = kPage;
  const auto cache = backend.make_kv_cache(shape);
  std::vector<int32_t> even, odd;
  for (int32_t page = 0; page < shape.pages; ++page) (page % 2 == 0 ? even : odd).push_back(page);
  const Inputs other = random_inputs(99);

  std::vector<float> result;
  int64_t position = 0;
  int64_t other_position = 0;
  for (const int64_t piece : pieces) {
    StepBatch step;
    std::vector<float> q, k, v;
    const auto append = [&](const Inputs& from, int64_t at, int64_t count, const std::vector<int32_t>& pages) {
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(at);
      sequence.pages = pages;
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(count), 0);
      q.insert(q.end(), from.q.begin() + at * kQueryCols, from.q.begin() + (at + count) * kQueryCols);
      k.insert(k.end(), from.k.begin() + at * kKeyCols, from.k.begin() + (at + count) * kKeyCols);
      v.insert(v.end(), from.v.begin() + at * kKeyCols, from.v.begin() + (at + count) * kKeyCols);
    };
    const int64_t other_count = std::min<int64_t>(kTokens - other_position, 1 + other_position % 37);
    const bool joined = company && other_count > 0;
    if (joined) append(other, other_position, other_count, odd);
    append(inputs, position, piece, even);
    const auto rows = static_cast<int64_t>(step.tokens.size());
    const Activations qt(backend, q, rows, kQueryCols);
    const Activations kt(backend, k, rows, kKeyCols);
    const Activations vt(backend, v, rows, kKeyCols);
    const Activations out(backend, rows, kHeads * kDim);
    backend.begin_step(step.batch());
    backend.attention(params, qt.tensor(), kt.tensor(), vt.tensor(), *cache, 0, out.tensor());
    const std::vector<float> y = out.values();
    result.insert(result.end(), y.end() - piece * kHeads * kDim, y.end());
    position += piece;
    if (joined) other_position += other_count;
  }
  return result;
}

TEST(Attention, ResultDoesNotDependOnChunksNeighboursOrThreads) {
  const Inputs inputs = random_inputs(1);
  std::vector<std::vector<int64_t>> cuts = {{kTokens}, {1, 699}, {300, 300, 100}, {64, 64, 64, 508}};
  cuts.push_back(std::vector<int64_t>(20, 35));
  cuts.push_back({690});
  for (int i = 0; i < 10; ++i) cuts.back().push_back(1);
  for (const cpu::Isa isa : isas_with_own_loops()) {
    const std::vector<float> expected = run(backend_of(isa, false, 1), inputs, {kTokens}, false);
    for (const float value : expected) ASSERT_TRUE(std::isfinite(value));
    for (const int threads : {1, 2, 3}) {
      for (size_t cut = 0; cut < cuts.size(); ++cut) {
        for (const bool company : {false, true}) {
          const std::vector<float> found = run(backend_of(isa, false, threads), inputs, cuts[cut], company);
          ASSERT_EQ(found.size(), expected.size());
          EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0)
              << cpu::isa_name(isa) << ", " << threads << " threads, cut " << cut << (company ? ", in company" : "");
        }
      }
    }
  }
}

TEST(Attention, KeysAndValuesBeyondHalfPrecisionStayFinite) {
  Inputs inputs = random_inputs(2);
  for (float& v : inputs.v) v = v < 0 ? -1e30f : 1e30f;
  for (const cpu::Isa isa : fast_isas()) {
    for (const float value : run(backend_of(isa, false, 2), inputs, {kTokens}, false)) {
      ASSERT_TRUE(std::isfinite(value) && std::abs(value) <= 65504.0f * 1.001f) << cpu::isa_name(isa) << " " << value;
    }
  }
}

TEST(KvCache, CopyMovesAllLayersAndHeads) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const ops::KvCacheShape shape{3, 2, 40, 5, 4};  // layers, heads, dimensions, pages, positions
    const auto cache = backend_of(isa).make_kv_cache(shape);
    auto& pages = dynamic_cast<cpu::HostKvCache&>(*cache);
    const auto bytes = static_cast<size_t>(2 * pages.values_offset() * (pages.type() == ops::DType::kF32 ? 4 : 2));
    const auto content = [&](int64_t layer, int64_t page, int64_t head) {
      const auto* from = static_cast<const char*>(pages.at(layer, page, head, 0, 0));
      return std::string(from, bytes);
    };
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (int64_t page = 0; page < 5; ++page) {
        for (int64_t head = 0; head < 2; ++head) {
          std::memset(pages.at(layer, page, head, 0, 0), static_cast<int>(1 + 10 * layer + 2 * page + head), bytes);
        }
      }
    }
    cache->copy_page(1, 3);
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (int64_t page = 0; page < 5; ++page) {
        for (int64_t head = 0; head < 2; ++head) {
          const int64_t from = page == 3 ? 1 : page;
          EXPECT_EQ(content(layer, page, head), std::string(bytes, static_cast<char>(1 + 10 * layer + 2 * from + head)))
              << cpu::isa_name(isa) << ", layer " << layer << ", page " << page << ", head " << head;
        }
      }
    }
  }
}

TEST(StateCache, CopyMovesAllLayers) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    ops::StateCacheShape shape;
    shape.layers = 3;
    shape.slots = 4;
    shape.key_heads = 2;
    shape.value_heads = 2;
    shape.key_dim = 5;
    shape.value_dim = 20;
    shape.conv_taps = 3;
    const auto cache = backend_of(isa).make_state_cache(shape);
    auto& states = dynamic_cast<cpu::HostStateCache&>(*cache);
    std::vector<float> values(100);
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (int64_t head = 0; head < 2; ++head) {
        std::iota(values.begin(), values.end(), static_cast<float>(1000 * layer + 100 * head + 1));
        states.write_state(layer, 1, head, values);
      }
      states.convolution(layer, 1)[7] = static_cast<float>(layer + 1);
    }
    cache->copy(1, 3);
    cache->copy(2, 2);
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (int64_t head = 0; head < 2; ++head) {
        std::vector<float> expected(100);
        std::iota(expected.begin(), expected.end(), static_cast<float>(1000 * layer + 100 * head + 1));
        states.read_state(layer, 3, head, values);
        EXPECT_EQ(values, expected);
        states.read_state(layer, 0, head, values);
        EXPECT_EQ(values, std::vector<float>(100, 0.0f));
      }
      EXPECT_EQ(states.convolution(layer, 3)[7], static_cast<float>(layer + 1));
      EXPECT_EQ(states.convolution(layer, 2)[7], 0.0f);
    }
  }
}

}  // namespace
}  // namespace fourfold::test
