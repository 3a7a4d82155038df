// The vocabulary of the kernels for AVX-512 (F, BW, DQ, VL): the names of simd/avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/x86.h"

namespace fourfold::cpu {
namespace {

struct Avx512 : X86 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;

  // ---- memory
  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static inline I load_words(const void* p) { return _mm512_loadu_si512(p); }
  static inline F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline void store_f16(uint16_t* p, F v) {
    const F limit = set(65504.0f);
    const F bounded = max(sub(zero(), limit), min(limit, v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT));
  }

  // ---- arithmetic
  static inline F zero() { return _mm512_setzero_ps(); }
  static inline F set(float v) { return _mm512_set1_ps(v); }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
  static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static inline F power_of_two(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  static inline F from_int(I v) { return _mm512_cvtepi32_ps(v); }
  static inline I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  static inline void opaque(F& v) { __asm__ volatile("" : "+v"(v)); }

  // ---- across lanes
  static inline __m256 half(F a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
  static inline __m128 sums(F a, F b, F c, F d) {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
    return folded(x);
  }
  static inline void store_sums(float* out, F a, F b, F c, F d) { _mm_storeu_ps(out, sums(a, b, c, d)); }
  static inline float sum(F v) { return _mm_cvtss_f32(sums(v, v, v, v)); }
  static inline float largest(F v) {
    return X86::largest(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static inline int32_t first_word(I v) { return _mm_cvtsi128_si32(_mm512_castsi512_si128(v)); }
};

}  // namespace
}  // namespace fourfold::cpu
