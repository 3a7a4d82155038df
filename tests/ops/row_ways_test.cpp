// The result of a row of a sequence with few rows does not depend on the rows beside it: alone, among others, beside
// the chunk of a prompt, whatever kernels those take.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cpu/host/step_rows.h"
#include "op_harness.h"

namespace fourfold::test {
namespace {

using ops::Format;

// Runs an operation on rows of activations and gives the outputs.
using RunRows = std::function<std::vector<float>(const std::vector<float>& x, int64_t rows)>;

// Rows that each sequence of a batch contributes.
using Company = std::vector<int64_t>;

// The rows of a pool of tokens, one after the other for each sequence; sequence i starts with row i of the pool.
struct Pool {
  int64_t cols;
  std::vector<float> values;
  const float* row(int64_t i) const { return values.data() + i % (static_cast<int64_t>(values.size()) / cols) * cols; }
};

void expect_same_rows(cpu::CpuBackend& backend, const Pool& pool, int64_t out_cols, int64_t most_rows,
                      const RunRows& run) {
  const auto run_batch = [&](const Company& counts, const std::vector<int64_t>& starts, int64_t padding) {
    StepBatch step;
    std::vector<float> x;
    for (size_t s = 0; s < counts.size(); ++s) {
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(counts[s]);
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(counts[s]), 0);
      for (int64_t i = 0; i < counts[s]; ++i) {
        x.insert(x.end(), pool.row(starts[s] + i), pool.row(starts[s] + i) + pool.cols);
      }
    }
    step.tokens.insert(step.tokens.end(), static_cast<size_t>(padding), 0);
    x.insert(x.end(), static_cast<size_t>(padding * pool.cols), 1.0f);
    backend.begin_step(step.batch());
    return run(x, static_cast<int64_t>(step.tokens.size()));
  };

  // Every row of the pool on its own.
  std::vector<std::vector<float>> alone;
  for (int64_t i = 0; i < 24; ++i) alone.push_back(run_batch({1}, {i}, 0));
  const std::vector<Company> companies = {{1, 1, 1, 1, 1},
                                          {3, 16, 2},
                                          {100, 1, 5},
                                          {4, 300, 16, 1, 40},
                                          {17, 1},
                                          {1, 1},
                                          {6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6}};
  for (const Company& counts : companies) {
    const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    if (rows > most_rows) continue;
    for (const int64_t padding : {0, 3}) {
      std::vector<int64_t> starts;
      for (size_t s = 0; s < counts.size(); ++s) starts.push_back(static_cast<int64_t>(s) % 7);
      const std::vector<float> all = run_batch(counts, starts, padding);
      int64_t row = 0;
      for (size_t s = 0; s < counts.size(); ++s) {
        for (int64_t i = 0; i < counts[s]; ++i, ++row) {
          const float* found = all.data() + row * out_cols;
          for (int64_t c = 0; c < out_cols; ++c) ASSERT_TRUE(std::isfinite(found[c]));
          if (counts[s] > cpu::kFewRows) continue;
          const std::vector<float>& wanted = alone[static_cast<size_t>(starts[s] + i)];
          ASSERT_EQ(std::memcmp(found, wanted.data(), static_cast<size_t>(out_cols) * 4), 0)
              << cpu::isa_name(backend.isa()) << ": row " << i << " of " << counts[s] << " in sequence " << s << " of "
              << counts.size() << ", " << rows << " rows, first " << found[0] << " and alone " << wanted[0];
        }
      }
      for (; row < rows + padding; ++row) {
        for (int64_t c = 0; c < out_cols; ++c) ASSERT_TRUE(std::isfinite(all[static_cast<size_t>(row * out_cols + c)]));
      }
    }
  }
}

Pool random_pool(Random& random, int64_t cols) { return {cols, random_values(random, 29 * cols)}; }

std::unique_ptr<ops::Matrix> load(cpu::CpuBackend& backend, Random& random, int64_t columns,
                                  std::initializer_list<std::pair<Format, int64_t>> parts) {
  std::vector<std::shared_ptr<OwnedMatrix>> owned;
  std::vector<ops::MatrixSource> sources;
  for (const auto& [format, rows] : parts) {
    owned.push_back(random_matrix(random, format, rows, columns));
    sources.push_back(owned.back()->source);
  }
  return backend.load_matrix(sources);
}

class RowWays : public ::testing::TestWithParam<std::tuple<cpu::Isa, bool>> {
 protected:
  cpu::CpuBackend& backend() { return backend_of(std::get<0>(GetParam()), std::get<1>(GetParam()), 2); }
};

TEST_P(RowWays, Linear) {
  for (const Format format : {Format::kF32, Format::kBf16, Format::kF16, Format::kFp8, Format::kNvfp4}) {
    SCOPED_TRACE(ops::format_name(format));
    Random random(3);
    const auto matrix = load(backend(), random, 336, {{format, 200}});
    const Pool pool = random_pool(random, 336);
    expect_same_rows(backend(), pool, 200, 1000, [&](const std::vector<float>& x, int64_t rows) {
      const Activations in(backend(), x, rows, 336);
      const Activations out(backend(), rows, 200);
      backend().linear(in.tensor(), *matrix, out.tensor());
      return out.values();
    });
  }
}

TEST_P(RowWays, LinearOfStackedFormats) {
  Random random(4);
  const auto matrix = load(backend(), random, 192,
                           {{Format::kNvfp4, 40}, {Format::kBf16, 3}, {Format::kFp8, 33}, {Format::kNvfp4, 17}});
  const Pool pool = random_pool(random, 192);
  expect_same_rows(backend(), pool, 93, 1000, [&](const std::vector<float>& x, int64_t rows) {
    const Activations in(backend(), x, rows, 192);
    const Activations out(backend(), rows, 93);
    backend().linear(in.tensor(), *matrix, out.tensor());
    return out.values();
  });
}

// Rows of logits go the way of their sequence's logit rows.
TEST_P(RowWays, LinearOfLogitRows) {
  Random random(6);
  const auto matrix = load(backend(), random, 96, {{Format::kBf16, 70}});
  const Pool pool = random_pool(random, 96);
  const auto run = [&](const Company& counts, const std::vector<int32_t>& logit_rows) {
    StepBatch step;
    for (const int64_t count : counts) {
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(count);
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(count), 0);
    }
    ops::Batch batch = step.batch();
    batch.logit_rows = logit_rows;
    backend().begin_step(batch);
    std::vector<float> x;
    for (size_t i = 0; i < logit_rows.size(); ++i) {
      x.insert(x.end(), pool.row(static_cast<int64_t>(i)), pool.row(static_cast<int64_t>(i)) + 96);
    }
    const auto rows = static_cast<int64_t>(logit_rows.size());
    const Activations in(backend(), x, rows, 96);
    const Activations out(backend(), rows, 70);
    backend().linear(in.tensor(), *matrix, out.tensor());
    return out.values();
  };
  // The last row of a chunk beside three rows of decode; the same four rows on their own.
  const std::vector<float> mixed = run({200, 1, 1, 1}, {199, 200, 201, 202});
  const std::vector<float> decode = run({1, 1, 1, 1}, {0, 1, 2, 3});
  EXPECT_EQ(mixed, decode);
  // And beside so many that theirs go the other way.
  std::vector<int32_t> many(40);
  std::iota(many.begin(), many.end(), 1);
  many.insert(many.begin(), 0);
  EXPECT_TRUE(std::equal(decode.begin(), decode.begin() + 70, run({1, 60}, many).begin()));
}

TEST_P(RowWays, Mlp) {
  Random random(7);
  const auto gate_up = load(backend(), random, 144, {{Format::kNvfp4, 80}, {Format::kNvfp4, 80}});
  const auto down = load(backend(), random, 80, {{Format::kFp8, 144}});
  const ops::MlpParams params{gate_up.get(), down.get()};
  const Pool pool = random_pool(random, 144);
  expect_same_rows(backend(), pool, 144, 1000, [&](const std::vector<float>& x, int64_t rows) {
    const Activations in(backend(), x, rows, 144);
    const Activations out(backend(), rows, 144);
    backend().mlp(params, in.tensor(), out.tensor());
    return out.values();
  });
}

TEST_P(RowWays, Moe) {
  cpu::Workspace::poison();
  struct Shape {
    int64_t experts, top_k, hidden, width;
    bool mixed, shared;
    bool bf16 = false;  // all of it, which may have any width
  };
  for (const Shape& shape :
       {Shape{12, 3, 160, 48, false, true}, Shape{7, 7, 80, 32, true, true}, Shape{9, 2, 80, 48, true, true},
        Shape{9, 2, 80, 37, false, true, true}, Shape{200, 2, 64, 16, false, false}}) {
    SCOPED_TRACE(std::to_string(shape.experts) + " experts");
    Random random(8);
    std::vector<std::shared_ptr<OwnedMatrix>> weights;
    for (int64_t e = 0; e < shape.experts; ++e) {
      const Format format = shape.bf16 || (shape.mixed && e % 2 == 1) ? Format::kBf16 : Format::kNvfp4;
      weights.push_back(random_matrix(random, format, shape.width, shape.hidden));
      weights.push_back(random_matrix(random, shape.bf16 ? format : Format::kNvfp4, shape.width, shape.hidden));
      weights.push_back(random_matrix(random, format, shape.hidden, shape.width));
    }
    const auto at = [&](int64_t i) { return weights[static_cast<size_t>(i)]->source; };
    const auto experts = backend().load_experts(shape.experts,
                                                [&](int64_t e) {
                                                  return ops::ExpertSource{at(3 * e), at(3 * e + 1), at(3 * e + 2)};
                                                },
                                                {});
    const auto router = load(backend(), random, shape.hidden, {{Format::kBf16, shape.experts}});
    const auto gate_up = load(backend(), random, shape.hidden, {{Format::kNvfp4, 48}, {Format::kNvfp4, 48}});
    const auto down = load(backend(), random, 48, {{Format::kBf16, shape.hidden}});
    const auto gate = load(backend(), random, shape.hidden, {{Format::kBf16, 1}});
    ops::MoeParams params;
    params.router = router.get();
    params.experts = experts.get();
    params.top_k = shape.top_k;
    if (shape.shared) {
      params.shared_gate_up = gate_up.get();
      params.shared_down = down.get();
      params.shared_gate = gate.get();
    }
    const Pool pool = random_pool(random, shape.hidden);
    expect_same_rows(backend(), pool, shape.hidden, 1000, [&](const std::vector<float>& x, int64_t rows) {
      const Activations in(backend(), x, rows, shape.hidden);
      const Activations out(backend(), rows, shape.hidden);
      backend().moe(params, in.tensor(), out.tensor());
      for (const float value : out.values()) EXPECT_TRUE(std::isfinite(value));  // nothing of what memory held before
      return out.values();
    });
  }
}

std::vector<std::tuple<cpu::Isa, bool>> settings() {
  std::vector<std::tuple<cpu::Isa, bool>> all;
  for (const cpu::Isa isa : fast_isas()) {
    for (const bool nvfp4_activations : {false, true}) all.emplace_back(isa, nvfp4_activations);
  }
  return all;
}

std::string setting_name(const ::testing::TestParamInfo<std::tuple<cpu::Isa, bool>>& info) {
  return std::string(cpu::isa_name(std::get<0>(info.param))) + (std::get<1>(info.param) ? "_w4a4" : "");
}

INSTANTIATE_TEST_SUITE_P(Cpu, RowWays, ::testing::ValuesIn(settings()), setting_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RowWays);

// Up to kFewRows rows of a sequence in one step are those rows in steps of their own, for the recurrent state, too.
TEST(RowWaysDelta, RowsAreThoseOfOneByOne) {
  for (const cpu::Isa isa : fast_isas()) {
    cpu::CpuBackend& backend = backend_of(isa);
    Random random(9);
    ops::StateCacheShape shape;
    shape.layers = 1;
    shape.slots = 3;
    shape.key_heads = 2;
    shape.value_heads = 2;
    shape.key_dim = 32;
    shape.value_dim = 48;
    shape.conv_taps = 4;
    const ops::Vector conv = backend.load_vector(random_values(random, shape.conv_channels() * 4, 0.5));
    const ops::Vector a_log = backend.load_vector(random_values(random, 2));
    const ops::Vector dt_bias = backend.load_vector(random_values(random, 2));
    const ops::Vector norm = backend.load_vector(random_values(random, 48));
    const ops::DeltaNetParams params{2, 2, 32, 48, 4, 1e-6f, &conv, &a_log, &dt_bias, &norm};
    const std::vector<float> qkv = random_values(random, 16 * shape.conv_channels());
    const std::vector<float> z = random_values(random, 16 * 96);
    const std::vector<float> gates = random_values(random, 16 * 2);
    // Sequence 0 in steps of `each` rows; with company, a chunk of 50 rows before it.
    const auto run = [&](int64_t each, bool company) {
      const auto cache = backend.make_state_cache(shape);
      std::vector<float> result;
      for (int64_t at = 0; at < 16; at += each) {
        StepBatch step;
        const int64_t before = company ? 50 : 0;
        const int64_t rows = before + each;
        if (company) {
          ops::Sequence other;
          other.count = 50;
          other.state_in = 1;
          step.sequences.push_back(other);
        }
        ops::Sequence sequence;
        sequence.first = static_cast<int32_t>(before);
        sequence.count = static_cast<int32_t>(each);
        sequence.position = static_cast<int32_t>(at);
        step.sequences.push_back(sequence);
        step.tokens.assign(static_cast<size_t>(rows), 0);
        const auto part = [&](const std::vector<float>& all, int64_t cols) {
          std::vector<float> values(static_cast<size_t>(before * cols), 0.25f);
          values.insert(values.end(), all.begin() + at * cols, all.begin() + (at + each) * cols);
          return Activations(backend, values, rows, cols);
        };
        const Activations u = part(qkv, shape.conv_channels()), zt = part(z, 96), b = part(gates, 2),
                          a = part(gates, 2);
        const Activations out(backend, rows, 96);
        backend.begin_step(step.batch());
        backend.delta_net(params, u.tensor(), zt.tensor(), b.tensor(), a.tensor(), *cache, 0, out.tensor());
        const std::vector<float> y = out.values();
        result.insert(result.end(), y.begin() + before * 96, y.end());
      }
      return result;
    };
    const std::vector<float> one_by_one = run(1, false);
    EXPECT_EQ(one_by_one, run(4, false)) << cpu::isa_name(isa);
    EXPECT_EQ(one_by_one, run(16, false)) << cpu::isa_name(isa);
    EXPECT_EQ(one_by_one, run(16, true)) << cpu::isa_name(isa);
  }
}

}  // namespace
}  // namespace fourfold::test
