#include <immintrin.h>

#include "cpu/ceilings_kernels.h"

namespace fourfold::cpu::ceilings {

float fma_avx512(int64_t rounds) {
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  __m512 x = _mm512_set1_ps(0.9999f);
  __m512 y = _mm512_set1_ps(1e-4f);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sums[i] = _mm512_fmadd_ps(sums[i], x, y);
  }
  float result = 0;
  for (const __m512& sum : sums) result += _mm512_cvtss_f32(sum);
  return result;
}

float read_avx512(const void* data, int64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  __m512i sums[8];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] = _mm512_xor_si512(sums[j], _mm512_loadu_si512(p + i + 64 * j));
  }
  __m512i all = sums[0];
  for (int j = 1; j < 8; ++j) all = _mm512_xor_si512(all, sums[j]);
  return static_cast<float>(_mm512_reduce_or_epi32(all));
}

float read_ahead_avx512(const void* data, int64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  const int64_t part = bytes / kReadStreams;
  __m512i sums[kReadStreams];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < part; i += 128) {
#pragma GCC unroll 4
    for (int s = 0; s < kReadStreams; ++s) {
      const char* at = p + s * part + i;
#pragma GCC unroll 2
      for (int j = 0; j < 128; j += 64) {
        _mm_prefetch(at + j + kReadNear, _MM_HINT_T0);
        _mm_prefetch(at + j + kReadFar, _MM_HINT_T1);
        sums[s] = _mm512_xor_si512(sums[s], _mm512_loadu_si512(at + j));
      }
    }
  }
  __m512i all = sums[0];
  for (int s = 1; s < kReadStreams; ++s) all = _mm512_xor_si512(all, sums[s]);
  return static_cast<float>(_mm512_reduce_or_epi32(all));
}

}  // namespace fourfold::cpu::ceilings
