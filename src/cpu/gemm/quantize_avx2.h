// Activations to 16-bit integers, for every instruction set from AVX2 on.
#pragma once

#include <immintrin.h>

#include "cpu/gemm/layout.h"

namespace fourfold::cpu::gemm {
namespace {

inline float largest_magnitude_of(__m256 a, __m256 b) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 m = _mm256_max_ps(_mm256_and_ps(a, magnitude), _mm256_and_ps(b, magnitude));
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  r = _mm_max_ss(r, _mm_shuffle_ps(r, r, 1));
  return _mm_cvtss_f32(r);
}

void quantize_activations(const float* x, int64_t columns, ActivationBlock* out) {
  for (int64_t b = 0; b < columns / kBlockColumns; ++b) {
    const __m256 a0 = _mm256_loadu_ps(x + b * 16), a1 = _mm256_loadu_ps(x + b * 16 + 8);
    const float largest = largest_magnitude_of(a0, a1);
    const __m256 zero = _mm256_setzero_ps();  // x - x is 0 unless x is NaN or infinite
    const __m256 bad = _mm256_or_ps(_mm256_cmp_ps(_mm256_sub_ps(a0, a0), zero, _CMP_NEQ_UQ),
                                    _mm256_cmp_ps(_mm256_sub_ps(a1, a1), zero, _CMP_NEQ_UQ));
    ActivationBlock& block = out[b];
    if (_mm256_movemask_ps(bad) != 0) {
      for (int i = 0; i < 16; ++i) block.hi[i] = block.lo[i] = 0;
      block.correction = 0;
      block.scale = __builtin_nanf("");
      continue;
    }
    // Blocks below 2^-100 are zero: their step would leave the normal range.
    const bool tiny = largest < 0x1p-100f;
    const float step = tiny ? 0.0f : largest * (1.0f / kActivationSteps);
    const __m256 inverse = _mm256_set1_ps(tiny ? 0.0f : kActivationSteps / largest);
    const __m256i q0 = _mm256_cvtps_epi32(_mm256_mul_ps(a0, inverse));
    const __m256i q1 = _mm256_cvtps_epi32(_mm256_mul_ps(a1, inverse));
    const __m256i q = _mm256_packs_epi32(q0, q1);  // columns 0-3 8-11 | 4-7 12-15
    const __m256i hi = _mm256_srai_epi16(_mm256_add_epi16(q, _mm256_set1_epi16(128)), 8);
    const __m256i lo = _mm256_sub_epi16(q, _mm256_slli_epi16(hi, 8));
    const __m256i bytes = _mm256_packs_epi16(hi, lo);  // high bytes of 8 columns, then their low bytes | the others
    const __m128i left = _mm256_castsi256_si128(bytes), right = _mm256_extracti128_si256(bytes, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(block.hi), _mm_unpacklo_epi8(left, right));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(block.lo), _mm_unpackhi_epi8(left, right));
    const __m256i sums = _mm256_add_epi32(q0, q1);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0b01001110));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0b10110001));
    block.correction = -12 * _mm_cvtsi128_si32(s);
    block.scale = step * kActivationScale;
  }
}

}  // namespace
}  // namespace fourfold::cpu::gemm
