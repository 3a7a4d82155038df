#include <immintrin.h>

#include "cpu/ceilings_kernels.h"

namespace fourfold::cpu::ceilings {

float fma_avx2(int64_t rounds) {
  __m256 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  __m256 x = _mm256_set1_ps(0.9999f);
  __m256 y = _mm256_set1_ps(1e-4f);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+x"(x), "+x"(y));  // keeps the loop from being folded
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_fmadd_ps(sums[i], x, y);
  }
  float result = 0;
  for (const __m256& sum : sums) result += _mm256_cvtss_f32(sum);
  return result;
}

float read_avx2(const void* data, int64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  __m256i sums[8];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      sums[j % 8] = _mm256_xor_si256(sums[j % 8], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    }
  }
  int result = 0;
  for (const __m256i& sum : sums) result ^= _mm256_extract_epi32(sum, 0) ^ _mm256_extract_epi32(sum, 7);
  return static_cast<float>(result);
}

float read_ahead_avx2(const void* data, int64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  const int64_t part = bytes / kReadStreams;
  __m256i sums[2 * kReadStreams];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < part; i += 128) {
#pragma GCC unroll 4
    for (int s = 0; s < kReadStreams; ++s) {
      const char* at = p + s * part + i;
#pragma GCC unroll 2
      for (int j = 0; j < 128; j += 64) {
        _mm_prefetch(at + j + kReadNear, _MM_HINT_T0);
        _mm_prefetch(at + j + kReadFar, _MM_HINT_T1);
        const auto* lines = reinterpret_cast<const __m256i*>(at + j);
        sums[2 * s] = _mm256_xor_si256(sums[2 * s], _mm256_loadu_si256(lines));
        sums[2 * s + 1] = _mm256_xor_si256(sums[2 * s + 1], _mm256_loadu_si256(lines + 1));
      }
    }
  }
  int result = 0;
  for (const __m256i& sum : sums) result ^= _mm256_extract_epi32(sum, 0) ^ _mm256_extract_epi32(sum, 7);
  return static_cast<float>(result);
}

}  // namespace fourfold::cpu::ceilings
