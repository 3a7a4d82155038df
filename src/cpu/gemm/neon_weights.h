// How panels of weights become fp32 vectors with NEON: what float_kernels.h wants of V beside the vocabulary.
#pragma once

#include "cpu/gemm/layout.h"
#include "cpu/simd/neon.h"

namespace fourfold::cpu::gemm {
namespace {

struct NeonWeights : Neon {
  static constexpr int kVectors = 2;  // in a panel row of 16

  static inline F as_floats(I w) { return {vreinterpretq_f32_u32(w.low), vreinterpretq_f32_u32(w.high)}; }
  static inline F to_floats(uint16x8_t halves) {
    const float16x8_t f16 = vreinterpretq_f16_u16(halves);
    return {vcvt_f32_f16(vget_low_f16(f16)), vcvt_high_f32_f16(f16)};
  }

  static inline void expand_f32(I w, F* out) { out[0] = as_floats(w); }
  static inline void expand_bf16(I w, F* out) {
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    out[0] = as_floats({vshlq_n_u32(w.low, 16), vshlq_n_u32(w.high, 16)});
    out[1] = as_floats({vandq_u32(w.low, upper), vandq_u32(w.high, upper)});
  }
  static inline void expand_f16(I w, F* out) {
    const uint16x8_t low = vreinterpretq_u16_u32(w.low), high = vreinterpretq_u16_u32(w.high);
    out[0] = to_floats(vuzp1q_u16(low, high));
    out[1] = to_floats(vuzp2q_u16(low, high));
  }
  // The upper bytes of 16-bit lanes as f16: the exponent and mantissa of an e4m3 code, one place further right, are
  // its value x 2^-8 (subnormals included); the shift doubles the sign.
  static inline uint16x8_t e4m3_to_f16(uint16x8_t bytes) {
    return vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(bytes), 1)), vdupq_n_u16(0xbf80));
  }
  static inline void expand_fp8(I w, F (*out)[2]) {
    const uint16x8_t rows[2] = {vreinterpretq_u16_u32(w.low), vreinterpretq_u16_u32(w.high)};
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      out[0][h] = to_floats(e4m3_to_f16(vshlq_n_u16(rows[h], 8)));
      out[1][h] = to_floats(e4m3_to_f16(rows[h]));
    }
  }

  // Block scales of 16 rows x 2^-105, four to a register.
  struct Scales {
    float32x4_t quad[4];
  };
  static inline Scales block_scales(const uint8_t* scales) {
    const uint8x16_t bytes = vld1q_u8(scales);
    const uint16x8_t low = vshll_n_u8(vget_low_u8(bytes), 7), high = vshll_high_n_u8(bytes, 7);
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 13)),
             vreinterpretq_f32_u32(vshll_high_n_u16(low, 13)),
             vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 13)),
             vreinterpretq_f32_u32(vshll_high_n_u16(high, 13))}};
  }

  // Blocks of NVFP4 to out[k][16] = e2m1 x block scale, exact. An e2m1 number as f16 has nothing in its lower byte, so
  // a look-up gives f16 numbers, two columns of four rows in a register.
  static inline void expand_nvfp4(const uint8_t* group, int64_t blocks, float* out) {
    static constexpr uint8_t kUpper[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                           0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};
    const uint8x16_t table = vld1q_u8(kUpper);
    for (int64_t b = 0; b < blocks; ++b, out += 256) {
      const uint8_t* scales = group + b / 4 * kGroupBytes + b % 4 * 16;
      const uint8_t* words = group + b / 4 * kGroupBytes + kGroupScales + b % 4 * 128;
      prefetch(words + kPrefetch);
      prefetch(words + kPrefetch + 64);
      if (b % 4 == 0) prefetch(scales + kPrefetch);
      Scales s = block_scales(scales);
#pragma GCC unroll 4
      for (float32x4_t& quad : s.quad) quad = vmulq_n_f32(quad, kBlockScale);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const F scale = {s.quad[2 * h], s.quad[2 * h + 1]};
        const auto emit = [&](uint8x16_t low, uint8x16_t high, int k) __attribute__((always_inline)) {
          // Columns k, k + 1 in the even bytes of lanes, k + 4, k + 5 in the odd ones.
          const uint16x8_t a = vreinterpretq_u16_u8(vqtbl1q_u8(table, low));
          const uint16x8_t c = vreinterpretq_u16_u8(vqtbl1q_u8(table, high));
          const uint16x8_t upper = vdupq_n_u16(0xff00);
          const uint16x8_t even_a = vshlq_n_u16(a, 8), even_c = vshlq_n_u16(c, 8);
          const uint16x8_t odd_a = vandq_u16(a, upper), odd_c = vandq_u16(c, upper);
          store(out + k * 16 + h * 8, mul(scale, to_floats(vuzp1q_u16(even_a, even_c))));
          store(out + (k + 1) * 16 + h * 8, mul(scale, to_floats(vuzp2q_u16(even_a, even_c))));
          store(out + (k + 4) * 16 + h * 8, mul(scale, to_floats(vuzp1q_u16(odd_a, odd_c))));
          store(out + (k + 5) * 16 + h * 8, mul(scale, to_floats(vuzp2q_u16(odd_a, odd_c))));
        };
#pragma GCC unroll 2
        for (int d = 0; d < 2; ++d) {
          const uint8x16_t low = vld1q_u8(words + d * 64 + h * 32), high = vld1q_u8(words + d * 64 + h * 32 + 16);
          const uint8x16_t nibble = vdupq_n_u8(15);
          emit(vandq_u8(low, nibble), vandq_u8(high, nibble), d * 8);
          emit(vshrq_n_u8(low, 4), vshrq_n_u8(high, 4), d * 8 + 2);
        }
      }
    }
  }
};

}  // namespace
}  // namespace fourfold::cpu::gemm
