// Tensors of the CUDA backend, whose memory is on the device.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "cuda/device/device.h"
#include "kernels/step/rows_args.h"
#include "ops/tensor.h"

namespace fourfold::cuda {

inline constexpr int kMostRows =
    16;                             // of a sequence in the mixers' kernels for few, and of a launch of products for few
inline constexpr int kFewRows = 8;  // of products: more take the kernels for many, where there are such

inline bool is_float(const ops::Tensor& x) { return x.dtype == ops::DType::kF32; }
inline const uint16_t* bf16(const ops::Tensor& x) {
  FF_ASSERT(x.dtype == ops::DType::kBf16);
  return static_cast<const uint16_t*>(x.data);
}
inline uint16_t* bf16_out(const ops::Tensor& x) { return const_cast<uint16_t*>(bf16(x)); }
inline bool aligned(const ops::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride * x.element_bytes() % 16 == 0;
}
// All of it consists of whole pieces of 16 bytes, 8 columns of bf16.
inline bool in_pieces(const ops::Tensor& x) { return aligned(x) && x.cols % 8 == 0; }
inline DeviceAddress address_of(const void* p) { return static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(p)); }
// Of kernels of step/rows.cuh that work on columns of rows.
inline Grid columns_grid(int64_t rows, int columns) {
  return {static_cast<unsigned>(rows), static_cast<unsigned>(step::rows_ctas(columns))};
}
// Columns [0, b.cols) of b follow those of a in the same rows.
inline bool follows(const ops::Tensor& a, const ops::Tensor& b) {
  return static_cast<const uint16_t*>(a.data) + a.cols == b.data && a.stride == b.stride && a.rows == b.rows;
}

}  // namespace fourfold::cuda
