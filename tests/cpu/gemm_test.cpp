// The fast backends' matrix operations against double-precision sums and against the reference backend, on every
// instruction set this processor has.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "cpu/gemm/dispatch.h"
#include "cpu/memory/workspace.h"
#include "gemm_cases.h"
#include "nvfp4/number.h"
#include "ops/ops.h"

namespace {

using namespace fourfold;
using namespace fourfold::cpu;
using test::Weights;

std::vector<Isa> fast_isas() {
  std::vector<Isa> isas = supported_isas();
  std::erase(isas, Isa::kReference);
  return isas;
}

std::shared_ptr<ops::Backend> backend(Isa isa, int threads = 1, bool nvfp4_activations = false) {
  Workspace::poison();
  CpuOptions options;
  options.isa = isa;
  options.threads = threads;
  options.nvfp4_activations = nvfp4_activations;
  return make_backend(options);
}

// A strided activation tensor, as columns of a wider one.
struct Activations {
  std::unique_ptr<ops::Buffer> buffer;
  ops::Tensor tensor;
};
Activations activations(ops::Backend& on, int64_t rows, int64_t cols) {
  Activations result;
  const int64_t stride = cols + 5;
  result.buffer = on.allocate(std::max<int64_t>(rows, 1) * stride * 4 + 64);
  result.tensor = {result.buffer->data(), ops::DType::kF32, rows, cols, stride};
  return result;
}
Activations filled(ops::Backend& on, int64_t rows, int64_t cols, uint64_t seed) {
  Activations result = activations(on, rows, cols);
  const test::Tokens tokens = test::make_tokens(rows, cols, seed);
  for (int64_t t = 0; t < rows; ++t) {
    std::memcpy(result.tensor.f32(t), tokens.rows[static_cast<size_t>(t)], static_cast<size_t>(cols) * 4);
  }
  return result;
}

// Root mean square difference relative to the root mean square of `wanted`; rows in `skip` are left out.
double relative_error(const ops::Tensor& found, const ops::Tensor& wanted, int64_t skip = -1) {
  double error = 0;
  double norm = 0;
  for (int64_t t = 0; t < found.rows; ++t) {
    if (t == skip) continue;
    for (int64_t i = 0; i < found.cols; ++i) {
      const double d = static_cast<double>(found.f32(t)[i]) - wanted.f32(t)[i];
      error += d * d;
      norm += static_cast<double>(wanted.f32(t)[i]) * wanted.f32(t)[i];
    }
  }
  return std::sqrt(error / std::max(norm, 1e-300));
}

// Activations as 16-bit integers are off by 2^-16 of the largest of 16 at most, as two bf16 parts by 2^-17 of
// themselves; the inputs here differ in size, and an expert is three products.
constexpr double kBound = 1.5e-4;

TEST(Kernels, AllShapesAndFormats) {
  ASSERT_EQ(gemm::runnable_kernels().empty(), fast_isas().empty());
  for (const gemm::KernelTable* kernels : gemm::runnable_kernels()) {
    std::string problem;
    EXPECT_GT(test::check_kernels(*kernels, problem), 10000);
    EXPECT_EQ(problem, "");
  }
}

TEST(Linear, StacksOfEveryFormat) {
  for (const Isa isa : fast_isas()) {
    const auto reference = backend(Isa::kReference);
    const auto fast = backend(isa, 2);
    const int64_t columns = 336;
    std::vector<Weights> parts;
    parts.push_back(test::make_weights(ops::Format::kNvfp4, 50, columns, 1));
    parts.push_back(test::make_weights(ops::Format::kBf16, 3, columns, 2));
    parts.push_back(test::make_weights(ops::Format::kFp8, 131, columns, 3, 2));
    parts.push_back(test::make_weights(ops::Format::kF32, 17, columns, 4));
    parts.push_back(test::make_weights(ops::Format::kF16, 1, columns, 5));
    parts.push_back(test::make_weights(ops::Format::kNvfp4, 64, columns, 6));
    parts.push_back(test::make_weights(ops::Format::kFp8, 35, columns, 7, 3));
    std::vector<ops::MatrixSource> sources;
    for (const Weights& part : parts) sources.push_back(part.source);
    const auto slow_matrix = reference->load_matrix(sources);
    const auto fast_matrix = fast->load_matrix(sources);
    EXPECT_EQ(fast_matrix->rows(), 301);
    EXPECT_EQ(fast_matrix->columns(), columns);
    for (const int64_t tokens : {0, 1, 4, 7, 13, 100, 200}) {
      const Activations x = filled(*fast, tokens, columns, 11);
      const Activations wanted = activations(*fast, tokens, 301);
      const Activations found = activations(*fast, tokens, 301);
      reference->linear(x.tensor, *slow_matrix, wanted.tensor);
      fast->linear(x.tensor, *fast_matrix, found.tensor);
      // By part, so that a small one cannot hide behind a large one.
      int64_t row = 0;
      for (const Weights& part : parts) {
        const int64_t end = row + part.source.rows;
        EXPECT_LT(relative_error(found.tensor.slice_cols(row, end), wanted.tensor.slice_cols(row, end)), kBound)
            << isa_name(isa) << " tokens " << tokens << " rows " << row;
        row = end;
      }
      // The five floats between the rows of the output are not ours.
      for (int64_t t = 0; t + 1 < tokens; ++t) {
        for (int64_t i = 301; i < 306; ++i) EXPECT_EQ(found.tensor.f32(t)[i], 0.0f);
      }
    }
  }
}

struct Layer {
  std::vector<Weights> gate, up, down;
  Weights router, shared_gate, shared_up, shared_down, shared_weight;
  int64_t hidden, width, shared_width, count;
};

Layer make_layer(int64_t count, int64_t hidden, int64_t width, int64_t shared_width, bool mixed, uint64_t seed) {
  Layer layer;
  layer.hidden = hidden;
  layer.width = width;
  layer.shared_width = shared_width;
  layer.count = count;
  const auto nvfp4 = [&](int64_t rows, int64_t columns) {
    Weights w = test::make_weights(ops::Format::kNvfp4, rows, columns, ++seed);
    w.source.tensor_scale = static_cast<float>(2e-4 / std::sqrt(static_cast<double>(columns)));
    w.source.input_scale = 0.02f + 0.001f * static_cast<float>(seed % 7);
    return w;
  };
  for (int64_t e = 0; e < count; ++e) {
    const bool bf16 = mixed && e % 3 == 1;
    layer.gate.push_back(bf16 ? test::make_weights(ops::Format::kBf16, width, hidden, ++seed) : nvfp4(width, hidden));
    layer.up.push_back(nvfp4(width, hidden));
    layer.down.push_back(bf16 ? test::make_weights(ops::Format::kFp8, hidden, width, ++seed, 1) : nvfp4(hidden, width));
  }
  layer.router = test::make_weights(mixed ? ops::Format::kBf16 : ops::Format::kF32, count, hidden, ++seed);
  layer.shared_gate = nvfp4(shared_width, hidden);
  layer.shared_up = nvfp4(shared_width, hidden);
  layer.shared_down = nvfp4(hidden, shared_width);
  layer.shared_weight = test::make_weights(ops::Format::kBf16, 1, hidden, ++seed);
  return layer;
}

struct LoadedLayer {
  std::unique_ptr<ops::Matrix> router, shared_gate_up, shared_down, shared_gate;
  std::unique_ptr<ops::Experts> experts;
  ops::MoeParams params;
};

LoadedLayer load(ops::Backend& on, const Layer& layer, int64_t top_k, bool shared) {
  LoadedLayer result;
  int64_t done = 0;
  result.experts = on.load_experts(
      layer.count,
      [&](int64_t e) {
        const auto i = static_cast<size_t>(e);
        return ops::ExpertSource{layer.gate[i].source, layer.up[i].source, layer.down[i].source};
      },
      [&](int64_t e) { EXPECT_EQ(e, done++); });
  EXPECT_EQ(done, layer.count);
  const auto matrix = [&](std::vector<ops::MatrixSource> parts) { return on.load_matrix(parts); };
  result.router = matrix({layer.router.source});
  result.params.router = result.router.get();
  result.params.experts = result.experts.get();
  result.params.top_k = top_k;
  if (shared) {
    result.shared_gate_up = matrix({layer.shared_gate.source, layer.shared_up.source});
    result.shared_down = matrix({layer.shared_down.source});
    result.shared_gate = matrix({layer.shared_weight.source});
    result.params.shared_gate_up = result.shared_gate_up.get();
    result.params.shared_down = result.shared_down.get();
    result.params.shared_gate = result.shared_gate.get();
  }
  return result;
}

void check_layer(const Layer& layer, int64_t top_k, bool shared, bool nvfp4_activations) {
  const auto reference = backend(Isa::kReference, 1, nvfp4_activations);
  const LoadedLayer slow = load(*reference, layer, top_k, shared);
  for (const Isa isa : fast_isas()) {
    const auto one = backend(isa, 1, nvfp4_activations);
    const auto three = backend(isa, 3, nvfp4_activations);
    const LoadedLayer with_one = load(*one, layer, top_k, shared);
    const LoadedLayer with_three = load(*three, layer, top_k, shared);
    for (const int64_t tokens : {0, 1, 2, 5, 40, 300}) {
      const Activations x = filled(*one, tokens, layer.hidden, 5);
      const Activations wanted = activations(*one, tokens, layer.hidden);
      const Activations found = activations(*one, tokens, layer.hidden);
      const Activations threaded = activations(*one, tokens, layer.hidden);
      reference->moe(slow.params, x.tensor, wanted.tensor);
      one->moe(with_one.params, x.tensor, found.tensor);
      three->moe(with_three.params, x.tensor, threaded.tensor);
      const std::string what = fmt::format("{} tokens {} top {}", isa_name(isa), tokens, top_k);
      // With 4-bit activations a last-bit difference moves values to the next code: as large as their resolution.
      EXPECT_LT(relative_error(found.tensor, wanted.tensor), nvfp4_activations ? 0.05 : kBound) << what;
      for (int64_t t = 0; t < tokens; ++t) {
        EXPECT_EQ(0, std::memcmp(found.tensor.f32(t), threaded.tensor.f32(t), static_cast<size_t>(layer.hidden) * 4))
            << what;
      }
      if (tokens < 2) continue;
      // A NaN stays in its token.
      const float kept = x.tensor.f32(1)[3];
      x.tensor.f32(1)[3] = std::numeric_limits<float>::quiet_NaN();
      one->moe(with_one.params, x.tensor, threaded.tensor);
      for (int64_t t = 0; t < tokens; ++t) {
        if (t == 1) {
          EXPECT_TRUE(std::isnan(threaded.tensor.f32(t)[0])) << what;
        } else {
          EXPECT_EQ(0, std::memcmp(found.tensor.f32(t), threaded.tensor.f32(t), static_cast<size_t>(layer.hidden) * 4))
              << what << " token " << t;
        }
      }
      x.tensor.f32(1)[3] = kept;
    }
  }
}

TEST(Moe, MatchesTheReference) { check_layer(make_layer(16, 256, 64, 96, false, 1), 4, true, false); }
TEST(Moe, OddCountsAndFormats) { check_layer(make_layer(13, 144, 48, 16, true, 1000), 3, true, false); }
TEST(Moe, NoSharedExpertAllChosen) { check_layer(make_layer(5, 80, 32, 16, false, 2000), 5, false, false); }
TEST(Moe, ManyExpertsFewTokensEach) { check_layer(make_layer(160, 64, 16, 16, false, 5000), 4, true, false); }
TEST(Moe, QuantisedActivations) { check_layer(make_layer(8, 128, 64, 64, false, 3000), 2, true, true); }

// Within one way of computing, a token's result has nothing to do with the tokens beside it.
TEST(Moe, TokensAreIndependent) {
  const Layer layer = make_layer(12, 128, 48, 32, false, 77);
  for (const Isa isa : fast_isas()) {
    const auto on = backend(isa, 2);
    const LoadedLayer loaded = load(*on, layer, 3, true);
    const Activations x = filled(*on, 60, layer.hidden, 9);
    const Activations all = activations(*on, 60, layer.hidden);
    const Activations some = activations(*on, 60, layer.hidden);
    on->moe(loaded.params, x.tensor, all.tensor);
    on->moe(loaded.params, x.tensor.slice_rows(17, 47), some.tensor.slice_rows(17, 47));
    for (int64_t t = 17; t < 47; ++t) {
      EXPECT_EQ(0, std::memcmp(all.tensor.f32(t), some.tensor.f32(t), static_cast<size_t>(layer.hidden) * 4));
    }
    const Activations single = activations(*on, 4, layer.hidden);
    on->moe(loaded.params, x.tensor.slice_rows(0, 4), all.tensor.slice_rows(0, 4));
    on->moe(loaded.params, x.tensor.slice_rows(2, 3), single.tensor.slice_rows(0, 1));
    EXPECT_EQ(0, std::memcmp(all.tensor.f32(2), single.tensor.f32(0), static_cast<size_t>(layer.hidden) * 4));
  }
}

TEST(Mlp, MatchesTheReference) {
  for (const bool quantised : {false, true}) {
    Weights gate = test::make_weights(ops::Format::kNvfp4, 112, 160, 1);
    Weights up = test::make_weights(ops::Format::kNvfp4, 112, 160, 2);
    Weights down = test::make_weights(ops::Format::kNvfp4, 160, 112, 3);
    for (Weights* w : {&gate, &up, &down}) w->source.tensor_scale = 1e-4f;
    gate.source.input_scale = 0.02f;
    up.source.input_scale = 0.03f;  // parts that differ
    down.source.input_scale = 0.01f;
    const std::vector<ops::MatrixSource> both = {gate.source, up.source};
    const auto reference = backend(Isa::kReference, 1, quantised);
    const auto slow_both = reference->load_matrix(both);
    const auto slow_down = reference->load_matrix({&down.source, 1});
    for (const Isa isa : fast_isas()) {
      const auto fast = backend(isa, 2, quantised);
      const auto fast_both = fast->load_matrix(both);
      const auto fast_down = fast->load_matrix({&down.source, 1});
      for (const int64_t tokens : {1, 3, 50}) {
        const Activations x = filled(*fast, tokens, 160, 4);
        const Activations wanted = activations(*fast, tokens, 160);
        const Activations found = activations(*fast, tokens, 160);
        reference->mlp({slow_both.get(), slow_down.get()}, x.tensor, wanted.tensor);
        fast->mlp({fast_both.get(), fast_down.get()}, x.tensor, found.tensor);
        EXPECT_LT(relative_error(found.tensor, wanted.tensor), quantised ? 0.05 : kBound) << isa_name(isa);
      }
    }
  }
}

// Weights are exact whatever multiplies them, subnormals and both zeros included: every e4m3 code, in dozens of places
// of a panel, times rows of the identity, which pick columns of the matrix.
TEST(Fp8, EveryCodeIsExact) {
  const int64_t rows = 37;
  const int64_t columns = 256;
  Weights weights = test::make_weights(ops::Format::kFp8, rows, columns, 1);
  weights.grid_scales[0] = 0.25f;
  uint8_t code = 0;
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      do code = static_cast<uint8_t>(code + 1);
      while (nvfp4::e4m3_is_nan(code));
      weights.data[static_cast<size_t>(r * columns + c)] = code;
    }
  }
  for (const Isa isa : fast_isas()) {
    const auto on = backend(isa);
    const auto matrix = on->load_matrix({&weights.source, 1});
    for (const int64_t tokens : {int64_t{1}, int64_t{3}, columns}) {
      for (int64_t first = 0; first < columns; first += tokens) {
        const int64_t n = std::min(tokens, columns - first);
        const Activations x = activations(*on, n, columns);
        const Activations y = activations(*on, n, rows);
        for (int64_t t = 0; t < n; ++t) {
          std::fill(x.tensor.f32(t), x.tensor.f32(t) + columns, 0.0f);
          x.tensor.f32(t)[first + t] = 1.0f;
        }
        on->linear(x.tensor, *matrix, y.tensor);
        for (int64_t t = 0; t < n; ++t) {
          for (int64_t r = 0; r < rows; ++r) {
            const uint8_t wanted = weights.data[static_cast<size_t>(r * columns + first + t)];
            ASSERT_EQ(y.tensor.f32(t)[r], 0.25f * nvfp4::e4m3_to_float(wanted))
                << isa_name(isa) << ", " << tokens << " tokens, row " << r << ", column " << first + t;
          }
        }
      }
    }
  }
}

TEST(Load, BadWeightsAreNamed) {
  const auto message = [](const std::vector<ops::MatrixSource>& parts) -> std::string {
    try {
      backend(fast_isas().back())->load_matrix(parts);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  if (fast_isas().empty()) GTEST_SKIP() << "no fast instruction set";
  Weights nan_scale = test::make_weights(ops::Format::kNvfp4, 20, 64, 1);
  nan_scale.block_scales[18 * 4 + 2] = 0x7f;
  EXPECT_EQ(message({nan_scale.source}), "test matrix: block scale [18, 2] is NaN (e4m3 code 0x7f), wanted a number");
  Weights nan_element = test::make_weights(ops::Format::kFp8, 20, 64, 1);
  nan_element.data[5 * 64 + 63] = 0xff;
  EXPECT_EQ(message({nan_element.source}), "test matrix: element [5, 63] is NaN (e4m3 code 0xff), wanted a number");
  Weights narrow = test::make_weights(ops::Format::kFp8, 20, 64, 1, 3);
  narrow.source.scale_columns = 30;
  EXPECT_EQ(message({narrow.source}),
            "test matrix: FP8 scales for blocks of 30 columns, wanted a multiple of 4 or whole rows");
  const Weights a = test::make_weights(ops::Format::kBf16, 20, 64, 1);
  const Weights b = test::make_weights(ops::Format::kBf16, 20, 32, 1);
  EXPECT_EQ(message({a.source, b.source}), "test matrix: 32 columns, wanted 64 as in test matrix");
}

}  // namespace
