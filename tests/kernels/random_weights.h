// Random checkpoint matrices of every format for tests of products.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "nvfp4/number.h"
#include "ops/tensor.h"

namespace fourfold::gemm {

enum class Kind { kF32, kBf16, kF16, kFp8Tensor, kFp8Row, kFp8Block, kNvfp4 };
inline constexpr Kind kKinds[] = {Kind::kF32,    Kind::kBf16,     Kind::kF16,  Kind::kFp8Tensor,
                                  Kind::kFp8Row, Kind::kFp8Block, Kind::kNvfp4};

inline std::string name_of(Kind kind) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "fp8-tensor", "fp8-row", "fp8-block", "nvfp4"};
  return kNames[static_cast<int>(kind)];
}

// Weights of about unit variance over sqrt(columns), scales of all sizes among them. FP8 blocks are 128 x 128.
inline ops::MatrixSource random_matrix(Kind kind, int64_t rows, int64_t columns, unsigned seed) {
  struct Storage {
    std::vector<uint8_t> data, block_scales;
    std::vector<float> grid;
  };
  auto storage = std::make_shared<Storage>();
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  ops::MatrixSource m;
  m.name = name_of(kind) + " " + std::to_string(rows) + "x" + std::to_string(columns);
  m.rows = rows;
  m.columns = columns;
  const auto count = static_cast<size_t>(rows * columns);
  const float size = 1.0f / std::sqrt(static_cast<float>(columns));
  const auto fill = [&]<typename T>(const auto& value) {
    storage->data.resize(count * sizeof(T));
    for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(storage->data.data())[i] = value();
  };
  switch (kind) {
    case Kind::kF32:  // exact in bf16, so that the rounding of the packed form does not count as an error
      m.format = ops::Format::kF32;
      fill.template operator()<float>([&] { return nvfp4::bf16_to_float(nvfp4::float_to_bf16(normal(rng) * size)); });
      break;
    case Kind::kBf16:
      m.format = ops::Format::kBf16;
      fill.template operator()<uint16_t>([&] { return nvfp4::float_to_bf16(normal(rng) * size); });
      break;
    case Kind::kF16:
      m.format = ops::Format::kF16;
      fill.template operator()<uint16_t>(
          [&] { return nvfp4::float_to_f16(nvfp4::bf16_to_float(nvfp4::float_to_bf16(normal(rng) * size))); });
      break;
    case Kind::kFp8Tensor:
    case Kind::kFp8Row:
    case Kind::kFp8Block: {
      m.format = ops::Format::kFp8;
      fill.template operator()<uint8_t>([&] {
        const auto code = static_cast<uint8_t>(rng());
        return nvfp4::e4m3_is_nan(code) ? uint8_t{1} : code;
      });
      m.scale_rows = kind == Kind::kFp8Tensor ? rows : kind == Kind::kFp8Row ? 1 : 128;
      m.scale_columns = kind == Kind::kFp8Block ? 128 : columns;
      const int64_t cells =
          ((rows + m.scale_rows - 1) / m.scale_rows) * ((columns + m.scale_columns - 1) / m.scale_columns);
      for (int64_t i = 0; i < cells; ++i) storage->grid.push_back(size / 100.0f * (0.25f + std::fabs(normal(rng))));
      break;
    }
    case Kind::kNvfp4:
      m.format = ops::Format::kNvfp4;
      m.tensor_scale = size / 10.0f;
      storage->data.resize(count / 2);
      for (uint8_t& b : storage->data) b = static_cast<uint8_t>(rng());
      for (size_t i = 0; i < count / 16; ++i) {
        // Zero, the smallest, the largest, negative ones, and what is usual.
        constexpr uint8_t kOdd[] = {0x00, 0x80, 0x01, 0x07, 0x7e, 0xb8};
        const auto usual = static_cast<uint8_t>(0x30 + rng() % 24);
        storage->block_scales.push_back(rng() % 8 == 0 ? kOdd[rng() % 6] : usual);
      }
      break;
  }
  m.data = storage->data.data();
  m.block_scales = storage->block_scales.data();
  m.grid_scales = storage->grid.data();
  m.owner = storage;
  return m;
}

// bf16 rows.
inline std::vector<uint16_t> random_rows(int64_t rows, int64_t columns, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(static_cast<size_t>(rows * columns));
  for (uint16_t& v : x) v = nvfp4::float_to_bf16(normal(rng));
  return x;
}

// Products of bf16 rows in double, and the sums of their terms' magnitudes: what rounding errors are measured by.
struct Products {
  int64_t rows = 0;  // outputs
  std::vector<double> y, size;
  double at(int64_t t, int64_t row) const { return y[static_cast<size_t>(t * rows + row)]; }
  double size_at(int64_t t, int64_t row) const { return size[static_cast<size_t>(t * rows + row)]; }
};
inline Products reference(const std::vector<ops::MatrixSource>& parts, const std::vector<uint16_t>& x, int64_t tokens) {
  Products p;
  for (const auto& m : parts) p.rows += m.rows;
  p.y.resize(static_cast<size_t>(tokens * p.rows));
  p.size.resize(p.y.size());
  int64_t row = 0;
  for (const auto& m : parts) {
    std::vector<float> w(static_cast<size_t>(m.columns));
    for (int64_t r = 0; r < m.rows; ++r, ++row) {
      ops::dequantize(m, r, w.data());
      for (int64_t t = 0; t < tokens; ++t) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < m.columns; ++k) {
          const double term = static_cast<double>(w[static_cast<size_t>(k)]) *
                              nvfp4::bf16_to_float(x[static_cast<size_t>(t * m.columns + k)]);
          sum += term;
          size += std::fabs(term);
        }
        p.y[static_cast<size_t>(t * p.rows + row)] = sum;
        p.size[static_cast<size_t>(t * p.rows + row)] = size;
      }
    }
  }
  return p;
}

}  // namespace fourfold::gemm
