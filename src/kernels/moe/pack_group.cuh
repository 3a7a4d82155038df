// Down's rows in 16 bits a value: what the wgmma and the FP4 kernels write and moe_combine_packed adds up (PackedGroup,
// tables.h).
#pragma once

#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

// Four values with a common exponent (PackedGroup). `low28` is 0x0fffffff in a register: a selection of bits is then
// one LOP3, with an immediate it would be two.
__device__ __forceinline__ ptx::Vec2 pack_group(float x0, float x1, float x2, float x3, ptx::u32 low28) {
  using namespace ptx;
  const float largest = max_magnitude(max_magnitude(x0, x1), max_magnitude(x2, x3));
  // Rounding may not carry out of 13 bits, so magnitudes from 2 - 2^-12 of a binade on take the next exponent; 2^-100
  // keeps the factor finite.
  const u32 e = __float_as_uint(largest * 1.0001220703125f + 7.888609052210118e-31f) & 0x7f800000u;
  const float factor = __uint_as_float(0x85000000u - e);  // 2^(139 - exponent)
  // The low bits of a float in [2^23, 2^24) are an integer: field 0 is biased by 8192, field 1 such that the sum has
  // that bias after the exponent bits of the other, times 2^14, have dropped out.
  const u32 low0 = __float_as_uint(x0 * factor + 8396800.0f);
  const u32 low1 = __float_as_uint(x2 * factor + 8396800.0f);
  const u32 high0 = __float_as_uint(x1 * factor + 8401920.0f);
  const u32 high1 = __float_as_uint(x3 * factor + 8401920.0f);
  return {((high0 * 16384u + low0) & low28) | ((e << 5) & ~low28),
          ((high1 * 16384u + low1) & low28) | ((e << 1) & ~low28)};
}

}  // namespace fourfold::moe
