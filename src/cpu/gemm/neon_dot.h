// NVFP4 by integer dot products (FEAT_DotProd); unnamed namespace, see float_kernels.h.
#pragma once

#include "cpu/gemm/neon_integers.h"

namespace fourfold::cpu::gemm {
namespace {

struct DotProducts {
  // Both planes go into one sum: eight products and a shift for 64 weights.
  static inline int32x4_t sum(const int8x16_t* w, int8x16_t hi, int8x16_t lo) {
    return plane(vshlq_n_s32(plane(vdupq_n_s32(0), w, hi), 8), w, lo);
  }
  static inline int32x4_t plane(int32x4_t sum, const int8x16_t* w, int8x16_t x) {
    sum = vdotq_laneq_s32(sum, w[0], x, 0);
    sum = vdotq_laneq_s32(sum, w[1], x, 1);
    sum = vdotq_laneq_s32(sum, w[2], x, 2);
    return vdotq_laneq_s32(sum, w[3], x, 3);
  }
};

}  // namespace
}  // namespace fourfold::cpu::gemm
