// The wrappers of src/kernels/ptx/sm120.cuh for the executor.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::ptx {

inline u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

void mma_m16n8k64_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scales_a, u32 scales_b,
                        Site site = Site::here());

inline u32 to_e2m1x2(float low, float high) {
  // NaN becomes 6, as PTX has it.
  const auto code = [](float v) { return static_cast<u32>(nvfp4::float_to_e2m1(v == v ? v : nvfp4::kE2m1Max)); };
  return code(low) | code(high) << 4;
}

}  // namespace fourfold::ptx
