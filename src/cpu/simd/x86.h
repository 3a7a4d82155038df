// What the vocabularies of AVX2 and AVX-512 have in common: nothing in it depends on the width of a vector.
//
// Everything lies in an unnamed namespace, and so does what is instantiated with it: a source with special compile
// flags must not share inline functions with others.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace fourfold::cpu {
namespace {

struct X86 {
  // Volatile, so that they stay where the source has them, between the products of a stream: into L1, into L2.
  static inline void prefetch(const void* p) {
    __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
  }
  static inline void prefetch_far(const void* p) {
    __asm__ volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
  }
  // The lower four lanes plus the upper ones.
  static inline __m128 folded(__m256 v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
  static inline float largest(__m256 v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  // Four rows of four, next to each other, to four columns.
  static inline void transpose4(const float* rows, float* a, float* b, float* c, float* d) {
    __m128 r0 = _mm_loadu_ps(rows), r1 = _mm_loadu_ps(rows + 4), r2 = _mm_loadu_ps(rows + 8),
           r3 = _mm_loadu_ps(rows + 12);
    _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
    _mm_storeu_ps(a, r0);
    _mm_storeu_ps(b, r1);
    _mm_storeu_ps(c, r2);
    _mm_storeu_ps(d, r3);
  }
};

}  // namespace
}  // namespace fourfold::cpu
