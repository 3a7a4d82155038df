#include "gemm_cases.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/math.h"
#include "base/random.h"
#include "cpu/gemm/packed.h"
#include "nvfp4/number.h"

namespace fourfold::cpu::test {

using namespace fourfold::cpu::gemm;

Weights make_weights(ops::Format format, int64_t rows, int64_t columns, uint64_t seed, int grid) {
  Random random(seed);
  Weights weights;
  ops::MatrixSource& source = weights.source;
  source.name = "test matrix";
  source.format = format;
  source.rows = rows;
  source.columns = columns;
  const auto elements = static_cast<size_t>(rows * columns);
  switch (format) {
    case ops::Format::kF32:
      weights.data.resize(elements * 4);
      for (size_t i = 0; i < elements; ++i) {
        const auto value = static_cast<float>(random.uniform(-1, 1));
        std::memcpy(weights.data.data() + i * 4, &value, 4);
      }
      break;
    case ops::Format::kBf16:
    case ops::Format::kF16:
      weights.data.resize(elements * 2);
      for (size_t i = 0; i < elements; ++i) {
        const double scale = random.below(16) == 0 ? 0x1p-16 : 1.0;  // f16 subnormals too
        const auto value = static_cast<float>(random.uniform(-1, 1) * scale);
        const uint16_t bits = format == ops::Format::kBf16 ? nvfp4::float_to_bf16(value) : nvfp4::float_to_f16(value);
        std::memcpy(weights.data.data() + i * 2, &bits, 2);
      }
      break;
    case ops::Format::kFp8:
      weights.data.resize(elements);
      for (uint8_t& byte : weights.data) {
        do byte = static_cast<uint8_t>(random.next());
        while (nvfp4::e4m3_is_nan(byte));
      }
      source.scale_rows = grid == 0 ? rows : grid == 1 ? 1 : 128;
      source.scale_columns = grid == 2 ? 128 : grid == 3 ? 20 : columns;
      weights.grid_scales.resize(
          static_cast<size_t>(ceil_div(rows, source.scale_rows) * ceil_div(columns, source.scale_columns)));
      for (float& scale : weights.grid_scales) scale = static_cast<float>(random.uniform(0.001, 0.01));
      break;
    case ops::Format::kNvfp4:
      weights.data.resize(elements / 2);
      for (size_t i = 0; i < weights.data.size(); i += 8) {
        const uint64_t word = random.next();
        std::memcpy(weights.data.data() + i, &word, std::min<size_t>(8, weights.data.size() - i));
      }
      weights.block_scales.resize(elements / 16);
      for (uint8_t& scale : weights.block_scales) {
        // Mostly ordinary scales, some subnormal, zero or negative.
        const uint64_t kind = random.below(32);
        scale = kind == 0 ? static_cast<uint8_t>(random.below(8)) : static_cast<uint8_t>(40 + random.below(80));
        if (kind == 1) scale |= 0x80;
      }
      source.tensor_scale = 0.0123f;
      break;
  }
  source.data = weights.data.data();
  source.block_scales = weights.block_scales.data();
  source.grid_scales = weights.grid_scales.data();
  return weights;
}

Tokens make_tokens(int64_t tokens, int64_t columns, uint64_t seed) {
  Random random(seed);
  Tokens result;
  result.values.resize(static_cast<size_t>(tokens * columns));
  for (float& value : result.values) {
    value = static_cast<float>(random.normal() * (random.below(100) == 0 ? 20.0 : 1.0));
  }
  for (int64_t t = 0; t < tokens; ++t) result.rows.push_back(result.values.data() + t * columns);
  return result;
}

Expected dot(const ops::MatrixSource& source, int64_t row, const float* x) {
  std::vector<float> weights(static_cast<size_t>(source.columns));
  ops::dequantize(source, row, weights.data());
  Expected expected;
  for (int64_t k = 0; k < source.columns; ++k) {
    const double product = static_cast<double>(weights[static_cast<size_t>(k)]) * x[k];
    expected.value += product;
    expected.magnitude += std::abs(product);
    expected.square += product * product;
  }
  return expected;
}

namespace {

constexpr double kEpsilonF32 = 0x1p-24;
constexpr double kEpsilonSplit = 0x1p-12;  // activations as 16-bit integers or two bf16 parts

struct Checker {
  const KernelTable& kernels;
  std::string& problem;
  int compared = 0;

  // Rounding errors are independent, so they grow with the root of the number of terms; `each` bounds the error of one
  // term relative to the largest, and eight standard deviations are allowed.
  void compare(const Expected& expected, float found, double tolerance, const std::string& what) {
    ++compared;
    if (std::abs(found - expected.value) <= tolerance) return;
    if (!problem.empty()) return;
    problem = fmt::format("WRONG: {}: found {}, wanted {} +- {}", what, found, expected.value, tolerance);
  }
};

void check_matrix(Checker& checker, const Weights& weights, const char* what) {
  const ops::MatrixSource& source = weights.source;
  ThreadPool pool(1);
  WeightMemory memory;
  const PackedMatrix matrix(std::span(&source, 1), memory, pool);
  const PackedPart& part = matrix.parts()[0];
  const int64_t columns = source.columns;
  const int64_t most = 40;
  const int64_t padded = round_up(columns, kColumnAlign);
  const Tokens tokens = make_tokens(most, columns, 7);
  std::vector<float> values(static_cast<size_t>(most * padded), 0.0f);
  std::vector<const float*> rows;
  std::vector<std::vector<Expected>> expected(static_cast<size_t>(most));
  for (int64_t t = 0; t < most; ++t) {
    float* row = values.data() + t * padded;
    std::memcpy(row, tokens.rows[static_cast<size_t>(t)], static_cast<size_t>(columns) * 4);
    rows.push_back(row);
    for (int64_t r = 0; r < source.rows; ++r) expected[static_cast<size_t>(t)].push_back(dot(source, r, row));
  }
  const auto check = [&](int64_t t, int64_t r, float found, double each, const char* kernel) {
    const Expected& e = expected[static_cast<size_t>(t)][static_cast<size_t>(r)];
    const double tolerance =
        8 * each * std::max(std::sqrt(e.square), e.magnitude / std::sqrt(static_cast<double>(columns))) + 1e-30 +
        kEpsilonF32 * (4 * e.magnitude + 2 * std::abs(e.value) * std::sqrt(static_cast<double>(columns)));
    checker.compare(
        e, found, tolerance,
        fmt::format("{} {} {} {}x{} token {} row {}", checker.kernels.name, kernel, what, source.rows, columns, t, r));
  };
  const KernelTable& kernels = checker.kernels;

  std::vector<ActivationBlock> blocks(static_cast<size_t>(most * (columns / 16 + 1)));
  std::vector<const ActivationBlock*> block_rows;
  for (int64_t t = 0; t < most; ++t) {
    ActivationBlock* row = blocks.data() + t * (columns / 16 + 1);
    if (source.format == ops::Format::kNvfp4) kernels.quantize(rows[static_cast<size_t>(t)], columns, row);
    block_rows.push_back(row);
  }
  for (int m = 1; m <= kGemvTokens; ++m) {
    constexpr int kOut = kGemvTokens * kPanelRows;
    alignas(64) float alone[kOut];
    alignas(64) float out[kGemvPanels * kOut];
    // Heap memory of the exact size would show reads beyond a panel; prefetches may go there.
    const auto gemv = [&](const Panel* panels, int count, float* to) {
      if (source.format == ops::Format::kNvfp4) {
        kernels.gemv_nvfp4(panels, count, block_rows.data(), m, to);
      } else {
        kernels.gemv_float(panels, count, rows.data(), m, to);
      }
    };
    for (int64_t i = 0; i < part.panels; i += kGemvPanels) {
      Panel pair[kGemvPanels];
      const int count = part.pair(i, part.panels, pair);
      gemv(pair, count, out);
      for (int k = 0; k < count; ++k) {
        const int64_t p = i + k;
        gemv(pair + k, 1, alone);
        for (int t = 0; t < m; ++t) {
          for (int64_t r = 0; r < part.rows_of(p); ++r) {
            const float found = out[k * kOut + t * kPanelRows + r];
            check(t, p * kPanelRows + r, found, source.format == ops::Format::kNvfp4 ? kEpsilonSplit : kEpsilonF32,
                  "gemv");
            // A panel's result does not depend on the one beside it.
            if (std::memcmp(&found, &alone[t * kPanelRows + r], sizeof(float)) != 0) {
              check(t, p * kPanelRows + r, std::numeric_limits<float>::quiet_NaN(), 0, "gemv alone");
            }
          }
        }
      }
    }
  }

  const bool split = kernels.gemm_kinds != kAllKinds;  // those that take all kinds keep activations in fp32
  const double each = split ? kEpsilonSplit : kEpsilonF32;
  if (!part.fits(kernels)) return;
  HostBuffer scratch(kernels.gemm_scratch);
  for (const int64_t m : {int64_t{1}, int64_t{5}, int64_t{13}, int64_t{17}, most}) {
    HostBuffer packed(kernels.packed_bytes(m, columns));
    HostBuffer out(m * kPairRows * 4);
    kernels.pack(rows.data(), m, columns, packed.data());
    const auto* values_out = static_cast<const float*>(out.data());
    std::vector<float> alone;
    for (int64_t p = 0; p < part.panels; p += 2) {
      const int count = p + 1 < part.panels ? 2 : 1;
      const Panel panels[2] = {part.panel(p), part.panel(count == 2 ? p + 1 : p)};
      kernels.gemm(panels, count, packed.data(), m, scratch.data(), static_cast<float*>(out.data()));
      for (int64_t t = 0; t < m; ++t) {
        for (int64_t r = 0; r < kPairRows && p * kPanelRows + r < source.rows; ++r) {
          if (r >= count * kPanelRows) break;
          check(t, p * kPanelRows + r, values_out[t * kPairRows + r], each, "gemm");
        }
      }
    }
  }
}

void check_elementwise(Checker& checker) {
  alignas(64) float gate[64], up[64], out[64], sum[64];
  for (int i = 0; i < 64; ++i) {
    gate[i] = static_cast<float>(i - 32) * (i % 3 == 0 ? 0.1f : 3.0f);
    up[i] = static_cast<float>(i) - 20.5f;
    sum[i] = 1.0f;
  }
  checker.kernels.swiglu(gate, up, out, 64);
  checker.kernels.axpy(0.5f, up, sum, 64);
  for (int i = 0; i < 64; ++i) {
    const double g = gate[i];
    const double wanted = g / (1 + std::exp(-g)) * up[i];
    checker.compare({wanted, 0, 0}, out[i], std::abs(wanted) * 1e-6 + 1e-34, fmt::format("swiglu of {}", g));
    checker.compare({1.0 + 0.5 * up[i], 0, 0}, sum[i], 1e-5, "axpy");
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  gate[0] = nan;
  up[17] = nan;
  checker.kernels.swiglu(gate, up, out, 64);
  for (int i = 0; i < 64; ++i) {
    if (std::isnan(out[i]) != (i == 0 || i == 17) && checker.problem.empty()) {
      checker.problem = fmt::format("WRONG: swiglu of NaN: element {} is {}", i, out[i]);
    }
  }
}

}  // namespace

int check_kernels(const KernelTable& kernels, std::string& problem) {
  Checker checker{kernels, problem};
  const int64_t shapes[][2] = {{16, 16}, {1, 48}, {40, 272}, {33, 512}, {19, 784}, {64, 2048}};
  uint64_t seed = 1;
  for (const auto& shape : shapes) {
    check_matrix(checker, make_weights(ops::Format::kNvfp4, shape[0], shape[1], seed++), "nvfp4");
  }
  const int64_t odd_shapes[][2] = {{16, 16}, {1, 1}, {40, 271}, {33, 513}, {7, 1026}};
  for (const auto& shape : odd_shapes) {
    check_matrix(checker, make_weights(ops::Format::kBf16, shape[0], shape[1], seed++), "bf16");
    check_matrix(checker, make_weights(ops::Format::kF16, shape[0], shape[1], seed++), "f16");
    check_matrix(checker, make_weights(ops::Format::kF32, shape[0], shape[1], seed++), "f32");
    for (int grid = 0; grid < 4; ++grid) {
      check_matrix(checker, make_weights(ops::Format::kFp8, shape[0], shape[1], seed++, grid), "fp8");
    }
  }
  check_matrix(checker, make_weights(ops::Format::kFp8, 130, 400, seed++, 2), "fp8 grid");
  check_elementwise(checker);
  return checker.compared;
}

}  // namespace fourfold::cpu::test
