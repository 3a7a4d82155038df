#include "ops/tensor.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "nvfp4/quantize.h"

namespace fourfold::ops {
namespace {

template <typename T>
T load(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Every e4m3 code as fp32.
struct E4m3Table {
  float values[256];
  constexpr E4m3Table() : values() {
    for (int code = 0; code < 256; ++code) values[code] = nvfp4::e4m3_to_float(static_cast<uint8_t>(code));
  }
};
constexpr E4m3Table kE4m3;

}  // namespace

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
  switch (format) {
    case Format::kF32:
      return rows * columns * 4;
    case Format::kBf16:
    case Format::kF16:
      return rows * columns * 2;
    case Format::kFp8:
      return rows * columns + ceil_div(rows, scale_rows) * ceil_div(columns, scale_columns) * 4;
    case Format::kNvfp4:
      return rows * columns / 2 + rows * columns / nvfp4::kBlock + 4;
  }
  return 0;
}

void dequantize(const MatrixSource& source, int64_t row, float* out) {
  FF_ASSERT(row >= 0 && row < source.rows);
  const int64_t columns = source.columns;
  const int64_t begin = row * source.row_pitch();
  switch (source.format) {
    case Format::kF32:
      std::memcpy(out, static_cast<const char*>(source.data) + begin * 4, static_cast<size_t>(columns) * 4);
      return;
    case Format::kBf16:
      for (int64_t i = 0; i < columns; ++i) out[i] = nvfp4::bf16_to_float(load<uint16_t>(source.data, begin + i));
      return;
    case Format::kF16:
      for (int64_t i = 0; i < columns; ++i) out[i] = nvfp4::f16_to_float(load<uint16_t>(source.data, begin + i));
      return;
    case Format::kFp8: {
      const auto* codes = static_cast<const uint8_t*>(source.data) + begin;
      const float* scales = source.grid_scales + row / source.scale_rows * ceil_div(columns, source.scale_columns);
      for (int64_t begin_cell = 0; begin_cell < columns; begin_cell += source.scale_columns, ++scales) {
        const int64_t end_cell = std::min(begin_cell + source.scale_columns, columns);
        for (int64_t i = begin_cell; i < end_cell; ++i) out[i] = kE4m3.values[codes[i]] * *scales;
      }
      return;
    }
    case Format::kNvfp4: {
      const auto width = static_cast<size_t>(columns);
      nvfp4::dequantize_row({static_cast<const uint8_t*>(source.data) + begin / 2, width / 2},
                            {source.block_scales + begin / nvfp4::kBlock, width / nvfp4::kBlock}, source.tensor_scale,
                            {out, width});
      return;
    }
  }
}

}  // namespace fourfold::ops
