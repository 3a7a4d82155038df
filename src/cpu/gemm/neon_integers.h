// What the NEON sources with and without dot products share; unnamed namespace, see float_kernels.h.
#pragma once

#include "cpu/gemm/dot_nvfp4.h"
#include "cpu/gemm/neon_weights.h"

namespace fourfold::cpu::gemm {
namespace {

// As on x86 (quantize_avx2.h): the same integers, steps and corrections.
void quantize_activations(const float* x, int64_t columns, ActivationBlock* out) {
  for (int64_t b = 0; b < columns / kBlockColumns; ++b) {
    float32x4_t value[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) value[i] = vld1q_f32(x + b * 16 + i * 4);
    // fmax gives NaN when there is one.
    const float largest = vmaxvq_f32(vmaxq_f32(vmaxq_f32(vabsq_f32(value[0]), vabsq_f32(value[1])),
                                               vmaxq_f32(vabsq_f32(value[2]), vabsq_f32(value[3]))));
    ActivationBlock& block = out[b];
    if (!(largest < __builtin_inff())) {
      for (int i = 0; i < 16; ++i) block.hi[i] = block.lo[i] = 0;
      block.correction = 0;
      block.scale = __builtin_nanf("");
      continue;
    }
    // Blocks below 2^-100 are zero: their step would leave the normal range.
    const bool tiny = largest < 0x1p-100f;
    const float step = tiny ? 0.0f : largest * (1.0f / kActivationSteps);
    const float inverse = tiny ? 0.0f : kActivationSteps / largest;
    int32x4_t q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) q[i] = vcvtnq_s32_f32(vmulq_n_f32(value[i], inverse));
    int8x8_t hi[2], lo[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int16x4_t left = vmovn_s32(q[2 * i]), right = vmovn_s32(q[2 * i + 1]);
      const int16x8_t sorted = vcombine_s16(vzip1_s16(left, right), vzip2_s16(left, right));
      const int16x8_t upper = vshrq_n_s16(vaddq_s16(sorted, vdupq_n_s16(128)), 8);
      hi[i] = vmovn_s16(upper);
      lo[i] = vmovn_s16(vsubq_s16(sorted, vshlq_n_s16(upper, 8)));
    }
    vst1q_s8(block.hi, vcombine_s8(hi[0], hi[1]));
    vst1q_s8(block.lo, vcombine_s8(lo[0], lo[1]));
    block.correction = -12 * vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3])));
    block.scale = step * kActivationScale;
  }
}

// Codes to the signed bytes 2 w: products of signed bytes need no correction.
inline int8x16_t look_up(uint8x16_t codes) {
  static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return vqtbl1q_s8(vld1q_s8(kTwice), codes);
}
inline int8x16_t low(uint8x16_t v) { return look_up(vandq_u8(v, vdupq_n_u8(15))); }
inline int8x16_t high(uint8x16_t v) { return look_up(vshrq_n_u8(v, 4)); }

// Integers: sum(w, hi, lo): the exact sums of w[0 .. 3], 4 rows x 4 columns each, times the activations of a block.
template <class Integers>
struct NeonBlock {
  static constexpr int kPairTokens = 2;

  // Four rows at a time; their codes are decoded once and meet every token.
  template <int M, class Fetch>
  __attribute__((always_inline)) static inline void run(const ActivationBlock* const* x, int64_t b,
                                                        const uint8_t* scales, const uint8_t* words, Neon::F (*acc)[2],
                                                        const Fetch& fetch) {
    const NeonWeights::Scales scale = NeonWeights::block_scales(scales);
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const uint8x16_t v0 = vld1q_u8(words + quad * 16), v1 = vld1q_u8(words + 64 + quad * 16);
      const int8x16_t w[4] = {low(v0), high(v0), low(v1), high(v1)};
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) {
        const ActivationBlock& block = x[t][b];
        const float32x4_t sum = vcvtq_f32_s32(Integers::sum(w, vld1q_s8(block.hi), vld1q_s8(block.lo)));
        float32x4_t& to = quad % 2 == 0 ? acc[t][quad / 2].low : acc[t][quad / 2].high;
        to = vfmaq_f32(to, sum, vmulq_n_f32(scale.quad[quad], block.scale));
      }
      fetch(quad);
    }
  }
};

template <class Integers>
constexpr KernelTable neon_table(const char* name) {
  return float_table<NeonWeights>(name, 8, quantize_activations,
                                  gemv_nvfp4<DotNvfp4<NeonWeights, NeonBlock<Integers>>>);
}

}  // namespace
}  // namespace fourfold::cpu::gemm
