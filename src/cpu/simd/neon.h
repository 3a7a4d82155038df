// The vocabulary of the kernels for Arm's Advanced SIMD (NEON): the names of simd/avx2.h. A vector is two registers, so
// that it has the eight lanes of AVX2: 32 registers are 16 vectors, and what is tuned for AVX2's registers fits these.
// Two registers are also two chains, which the four multipliers of a large core need.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace fourfold::cpu {
namespace {

struct Neon {
  struct F {
    float32x4_t low, high;
  };
  struct I {
    uint32x4_t low, high;
  };
  static constexpr int kLanes = 8;

  // ---- memory
  static inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static inline void store(float* p, F v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
  }
  static inline I load_words(const void* p) {
    const auto* words = static_cast<const uint8_t*>(p);
    return {vreinterpretq_u32_u8(vld1q_u8(words)), vreinterpretq_u32_u8(vld1q_u8(words + 16))};
  }
  static inline void prefetch(const void* p) {
    __asm__ volatile("prfm pldl1keep, %0" : : "Q"(*static_cast<const char*>(p)));
  }
  static inline void prefetch_far(const void* p) {
    __asm__ volatile("prfm pldl2keep, %0" : : "Q"(*static_cast<const char*>(p)));
  }
  static inline F load_f16(const uint16_t* p) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static inline void store_f16(uint16_t* p, F v) {
    const F limit = set(65504.0f);
    const F bounded = max(sub(zero(), limit), min(limit, v));
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(bounded.low), bounded.high)));
  }

  // ---- arithmetic
  static inline F zero() { return set(0.0f); }
  static inline F set(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
  static inline F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static inline F sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static inline F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static inline F div(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  // A comparison and a choice, not fmin and fmax: the second operand when either is NaN, as elsewhere.
  static inline F min(F a, F b) { return choose({vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}, a, b); }
  static inline F max(F a, F b) { return choose({vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)}, a, b); }
  static inline F fma(F a, F b, F c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
  static inline F fnma(F a, F b, F c) { return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
  static inline F round(F a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
  static inline F power_of_two(F n) {
    const auto half = [](float32x4_t v) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(v), vdupq_n_s32(127)), 23));
    };
    return {half(n.low), half(n.high)};
  }
  static inline I bit_xor(I a, I b) { return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)}; }
  static inline void opaque(F& v) { __asm__ volatile("" : "+w"(v.low), "+w"(v.high)); }

  // ---- across lanes
  static inline float32x4_t sums(F a, F b, F c, F d) {
    const float32x4_t ab = vpaddq_f32(vaddq_f32(a.low, a.high), vaddq_f32(b.low, b.high));
    return vpaddq_f32(ab, vpaddq_f32(vaddq_f32(c.low, c.high), vaddq_f32(d.low, d.high)));
  }
  static inline void store_sums(float* out, F a, F b, F c, F d) { vst1q_f32(out, sums(a, b, c, d)); }
  static inline float sum(F v) { return vaddvq_f32(vaddq_f32(v.low, v.high)); }
  static inline float largest(F v) { return vmaxnmvq_f32(vmaxnmq_f32(v.low, v.high)); }
  static inline int32_t first_word(I v) { return static_cast<int32_t>(vgetq_lane_u32(v.low, 0)); }
  static inline void transpose4(const float* rows, float* a, float* b, float* c, float* d) {
    const float32x4x4_t columns = vld4q_f32(rows);
    vst1q_f32(a, columns.val[0]);
    vst1q_f32(b, columns.val[1]);
    vst1q_f32(c, columns.val[2]);
    vst1q_f32(d, columns.val[3]);
  }

 private:
  static inline F choose(I mask, F a, F b) {
    return {vbslq_f32(mask.low, a.low, b.low), vbslq_f32(mask.high, a.high, b.high)};
  }
};

}  // namespace
}  // namespace fourfold::cpu
