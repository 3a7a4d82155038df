#include <immintrin.h>

#include "cpu/ceilings/loops.h"

namespace fourfold::cpu::ceilings {

float dot_bf16_avx512(int64_t rounds) {
  __m512 sums[24];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512i x = _mm512_set1_epi32(0x3f803f80);  // pairs of 1.0
  __m512i y = _mm512_set1_epi32(0x3c003c00);  // pairs of 2^-7
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) {
      sums[i] = _mm512_dpbf16_ps(sums[i], reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
    }
  }
  float result = 0;
  for (const __m512& sum : sums) result += _mm512_cvtss_f32(sum);
  return result;
}

}  // namespace fourfold::cpu::ceilings
