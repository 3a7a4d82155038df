#include <arm_neon.h>

#include "cpu/ceilings/loops.h"

namespace fourfold::cpu::ceilings {

float dot_bf16_mmla(int64_t rounds) {
  float32x4_t sums[24];
  for (float32x4_t& sum : sums) sum = vdupq_n_f32(0.0f);
  uint16x8_t x = vdupq_n_u16(0x3f80);  // 1.0
  uint16x8_t y = vdupq_n_u16(0x3c00);  // 2^-7
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+w"(x), "+w"(y));
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) {
      sums[i] = vbfmmlaq_f32(sums[i], vreinterpretq_bf16_u16(x), vreinterpretq_bf16_u16(y));
    }
  }
  float result = 0;
  for (const float32x4_t& sum : sums) result += vaddvq_f32(sum);
  return result;
}

}  // namespace fourfold::cpu::ceilings
