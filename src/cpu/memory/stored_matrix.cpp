#include "cpu/memory/stored_matrix.h"

#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "nvfp4/layout.h"

namespace fourfold::cpu {
namespace {

int64_t element_bytes(const ops::MatrixSource& source) {
  const int64_t elements = source.rows * source.columns;
  switch (source.format) {
    case ops::Format::kF32:
      return elements * 4;
    case ops::Format::kBf16:
    case ops::Format::kF16:
      return elements * 2;
    case ops::Format::kFp8:
      return elements;
    case ops::Format::kNvfp4:
      return elements / 2;
  }
  return 0;
}

int64_t scale_bytes(const ops::MatrixSource& source) {
  if (source.format == ops::Format::kNvfp4) return source.rows * (source.columns / nvfp4::kBlock);
  if (source.format == ops::Format::kFp8) {
    return 4 * ceil_div(source.rows, source.scale_rows) * ceil_div(source.columns, source.scale_columns);
  }
  return 0;
}

}  // namespace

void check_source(const ops::MatrixSource& source) {
  if (source.rows <= 0 || source.columns <= 0) {
    fail("{}: a weight of {} x {}, wanted at least 1 x 1", source.name, source.rows, source.columns);
  }
  checked_mul(
      checked_mul(static_cast<uint64_t>(source.rows), static_cast<uint64_t>(source.columns), source.name.c_str()), 8,
      source.name.c_str());
  if (source.data == nullptr) fail("{}: no elements", source.name);
  if (source.format == ops::Format::kNvfp4) {
    if (source.columns % nvfp4::kBlock != 0) {
      fail("{}: {} columns in NVFP4, wanted a multiple of {}", source.name, source.columns, nvfp4::kBlock);
    }
    if (source.block_scales == nullptr) fail("{}: NVFP4 without block scales", source.name);
  }
  if (source.format == ops::Format::kFp8) {
    if (source.grid_scales == nullptr) fail("{}: FP8 without scales", source.name);
    if (source.scale_rows <= 0 || source.scale_columns <= 0) {
      fail("{}: FP8 scales for blocks of {} x {}, wanted at least 1 x 1", source.name, source.scale_rows,
           source.scale_columns);
    }
  }
}

StoredMatrix::StoredMatrix(const ops::MatrixSource& source) {
  check_source(source);
  view_ = source;
  view_.owner.reset();
  data_ = HostBuffer(element_bytes(source));
  std::memcpy(data_.data(), source.data, static_cast<size_t>(element_bytes(source)));
  view_.data = data_.data();
  if (const int64_t bytes = scale_bytes(source); bytes > 0) {
    scales_ = HostBuffer(bytes);
    const bool fp8 = source.format == ops::Format::kFp8;
    std::memcpy(scales_.data(), fp8 ? static_cast<const void*>(source.grid_scales) : source.block_scales,
                static_cast<size_t>(bytes));
    if (fp8) {
      view_.grid_scales = static_cast<const float*>(scales_.data());
    } else {
      view_.block_scales = static_cast<const uint8_t*>(scales_.data());
    }
  }
}

}  // namespace fourfold::cpu
