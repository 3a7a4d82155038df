#include "ops/cost.h"

#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"
#include "ops/tensor.h"

namespace fourfold::ops {

const char* format_name(Format format) {
  switch (format) {
    case Format::kF32:
      return "f32";
    case Format::kBf16:
      return "bf16";
    case Format::kF16:
      return "f16";
    case Format::kFp8:
      return "fp8";
    case Format::kNvfp4:
      return "nvfp4";
  }
  return "unknown";
}

int64_t MatrixSource::bytes() const {
  const int64_t elements = rows * columns;
  switch (format) {
    case Format::kF32:
      return 4 * elements;
    case Format::kBf16:
    case Format::kF16:
      return 2 * elements;
    case Format::kFp8:
      return elements + 4 * ceil_div(rows, scale_rows) * ceil_div(columns, scale_columns);
    case Format::kNvfp4:
      return elements / 2 + elements / nvfp4::kBlock + 4;
  }
  return 0;
}

void dequantize(const MatrixSource& source, int64_t row, float* out) {
  const int64_t n = source.columns;
  switch (source.format) {
    case Format::kF32: {
      const float* in = static_cast<const float*>(source.data) + row * n;
      for (int64_t i = 0; i < n; ++i) out[i] = in[i];
      return;
    }
    case Format::kBf16: {
      const uint16_t* in = static_cast<const uint16_t*>(source.data) + row * n;
      for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::bf16_to_float(in[i]);
      return;
    }
    case Format::kF16: {
      const uint16_t* in = static_cast<const uint16_t*>(source.data) + row * n;
      for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::f16_to_float(in[i]);
      return;
    }
    case Format::kFp8: {
      const uint8_t* in = static_cast<const uint8_t*>(source.data) + row * n;
      const float* scales = source.grid_scales + row / source.scale_rows * ceil_div(n, source.scale_columns);
      for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::e4m3_to_float(in[i]) * scales[i / source.scale_columns];
      return;
    }
    case Format::kNvfp4: {
      const auto size = static_cast<size_t>(n);
      nvfp4::dequantize_row({static_cast<const uint8_t*>(source.data) + row * (n / 2), size / 2},
                            {source.block_scales + row * (n / nvfp4::kBlock), size / nvfp4::kBlock},
                            source.tensor_scale, {out, size});
      return;
    }
  }
}

Cost linear_cost(int64_t tokens, int64_t rows, int64_t columns, int64_t weight_bytes) {
  return {static_cast<double>(weight_bytes),
          2.0 * static_cast<double>(tokens) * static_cast<double>(rows) * static_cast<double>(columns)};
}

Cost experts_cost(int64_t tokens, int64_t top_k, double touched, int64_t hidden, int64_t intermediate,
                  int64_t bytes_per_expert) {
  return {touched * static_cast<double>(bytes_per_expert),
          6.0 * static_cast<double>(tokens * top_k) * static_cast<double>(hidden) * static_cast<double>(intermediate)};
}

double expected_touched_experts(int64_t tokens, int64_t top_k, int64_t experts) {
  const auto e = static_cast<double>(experts);
  return e * (1.0 - std::pow(1.0 - static_cast<double>(top_k) / e, static_cast<double>(tokens)));
}

Cost attention_cost(int64_t tokens, int64_t cached, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t element_bytes) {
  const double pairs = static_cast<double>(tokens) * static_cast<double>(cached) +
                       0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
  const double positions = static_cast<double>(cached + 2 * tokens);  // old ones read, new ones written and read
  return {2.0 * positions * static_cast<double>(kv_heads * head_dim * element_bytes),
          4.0 * pairs * static_cast<double>(heads * head_dim)};
}

Cost delta_net_cost(int64_t tokens, int64_t value_heads, int64_t key_dim, int64_t value_dim) {
  const auto state = static_cast<double>(value_heads * key_dim * value_dim);
  // Per token: decay (1), S^T k (2), rank-one update (2), S^T q (2).
  return {2.0 * 4.0 * state, 7.0 * static_cast<double>(tokens) * state};
}

}  // namespace fourfold::ops
