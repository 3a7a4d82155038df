// The wrappers of src/kernels/ptx/fragments.cuh for the executor.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::ptx {

void load_matrix4_transposed(u32 (&r)[4], u32 address, Site site = Site::here());
inline u32 to_f16x2(float low, float high) {
  return nvfp4::float_to_f16(low) | static_cast<u32>(nvfp4::float_to_f16(high)) << 16;
}
void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site = Site::here());

}  // namespace fourfold::ptx
