// The wrappers of src/kernels/ptx/fragments.cuh for the executor.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::ptx {

void load_matrix4_transposed(u32 (&r)[4], u32 address, Site site = Site::here());
inline u32 transpose_matrix(u32 x) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const u32 even = __shfl_sync(0xffffffffu, x, lane % 4 * 8 + lane / 8);
  const u32 odd = __shfl_sync(0xffffffffu, x, lane % 4 * 8 + 4 + lane / 8);
  const int shift = lane / 4 % 2 * 16;
  return (even >> shift & 0xffffu) | (odd >> shift & 0xffffu) << 16;
}
inline void codes_to_f16(u32 codes, u32& low, u32& high) {
  const auto one = [&](int i) {
    return static_cast<u32>(nvfp4::float_to_f16(nvfp4::e4m3_to_float(static_cast<nvfp4::u8>(codes >> 8 * i))));
  };
  low = one(0) | one(1) << 16;
  high = one(2) | one(3) << 16;
}
inline void codes_to_f16_crossed(u32 codes, u32& even, u32& odd) {
  codes_to_f16((codes & 0xff0000ffu) | (codes & 0xff00u) << 8 | (codes >> 8 & 0xff00u), even, odd);
}
inline u32 to_e4m3x2(float low, float high) {
  return nvfp4::float_to_e4m3(low) | static_cast<u32>(nvfp4::float_to_e4m3(high)) << 8;
}
inline u32 to_f16x2(float low, float high) {
  return nvfp4::float_to_f16(low) | static_cast<u32>(nvfp4::float_to_f16(high)) << 16;
}
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site = Site::here());

}  // namespace fourfold::ptx
