// The vocabulary of the kernels for AVX2 with FMA and F16C. simd/avx512.h has the same names; simd/vector.h puts
// operators on top of them, and a kernel written over V is compiled once for each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/x86.h"

namespace fourfold::cpu {
namespace {

struct Avx2 : X86 {
  using F = __m256;   // fp32 lanes
  using I = __m256i;  // 32-bit words in the same lanes
  static constexpr int kLanes = 8;

  // ---- memory
  static inline F load(const float* p) { return _mm256_loadu_ps(p); }
  static inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static inline I load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static inline F load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Rounded to nearest even; beyond the range of f16 the largest finite number; NaN stays NaN.
  static inline void store_f16(uint16_t* p, F v) {
    const F limit = set(65504.0f);
    const F bounded = max(sub(zero(), limit), min(limit, v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT));
  }

  // ---- arithmetic
  static inline F zero() { return _mm256_setzero_ps(); }
  static inline F set(float v) { return _mm256_set1_ps(v); }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
  // The second operand when either is NaN.
  static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
  static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }    // a b + c
  static inline F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
  static inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // 2^n for whole n in [-126, 127], and 0 for -127.
  static inline F power_of_two(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static inline F from_int(I v) { return _mm256_cvtepi32_ps(v); }
  static inline I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
  // A value that the compiler knows nothing about.
  static inline void opaque(F& v) { __asm__ volatile("" : "+v"(v)); }

  // ---- across lanes
  // The sums of the lanes of four vectors, in a fixed order.
  static inline __m128 sums(F a, F b, F c, F d) {
    const F x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return folded(x);
  }
  static inline void store_sums(float* out, F a, F b, F c, F d) { _mm_storeu_ps(out, sums(a, b, c, d)); }
  static inline float sum(F v) { return _mm_cvtss_f32(sums(v, v, v, v)); }
  static inline int32_t first_word(I v) { return _mm_cvtsi128_si32(_mm256_castsi256_si128(v)); }
};

}  // namespace
}  // namespace fourfold::cpu
