// How panels of weights become fp32 vectors with AVX2: what float_kernels.h wants of V beside the vocabulary.
#pragma once

#include "cpu/gemm/layout.h"
#include "cpu/simd/avx2.h"

namespace fourfold::cpu::gemm {
namespace {

struct Avx2Weights : Avx2 {
  static constexpr int kVectors = 2;  // in a panel row of 16

  static inline void expand_f32(I w, F* out) { out[0] = _mm256_castsi256_ps(w); }
  static inline void expand_bf16(I w, F* out) {
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // 16-bit halves of the lanes, sorted into all low ones and all high ones.
  static inline I split_halves(I w) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(w, order), 0b11011000);
  }
  static inline F low_half(I halves) { return _mm256_cvtph_ps(_mm256_castsi256_si128(halves)); }
  static inline F high_half(I halves) { return _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)); }
  static inline void expand_f16(I w, F* out) {
    const __m256i halves = split_halves(w);
    out[0] = low_half(halves);
    out[1] = high_half(halves);
  }
  // The upper bytes of 16-bit lanes as f16: the exponent and mantissa of an e4m3 code, one place further right, are
  // its value x 2^-8 (subnormals included); the shift doubles the sign.
  static inline I e4m3_to_f16(I bytes) {
    return _mm256_and_si256(_mm256_srai_epi16(bytes, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  }
  static inline void expand_fp8(I w, F (*out)[2]) {
    const __m256i even = e4m3_to_f16(_mm256_slli_epi16(w, 8));
    const __m256i odd = e4m3_to_f16(w);
    out[0][0] = low_half(even);
    out[0][1] = high_half(even);
    out[1][0] = low_half(odd);
    out[1][1] = high_half(odd);
  }

  // Block scales of 8 rows x 2^-105.
  static inline F block_scales(const uint8_t* scales) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 20));
  }

  // Blocks of NVFP4 to out[k][16] = e2m1 x block scale, exact.
  static inline void expand_nvfp4(const uint8_t* group, int64_t blocks, float* out) {
    const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,  //
                                           0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i top = _mm256_set1_epi32(static_cast<int>(0xff000000u));
    // A byte in the top of a lane counts 2^24, and codes are doubled.
    const __m256 unit = _mm256_set1_ps(kBlockScale * 0x1p-25f);
    for (int64_t b = 0; b < blocks; ++b, out += 256) {
      const uint8_t* scales = group + b / 4 * kGroupBytes + b % 4 * 16;
      const uint8_t* words = group + b / 4 * kGroupBytes + kGroupScales + b % 4 * 128;
      prefetch(words + kPrefetch);
      prefetch(words + kPrefetch + 64);
      if (b % 4 == 0) prefetch(scales + kPrefetch);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256 s = _mm256_mul_ps(block_scales(scales + h * 8), unit);
        const auto put = [&](__m256i lane, int k) __attribute__((always_inline)) {
          _mm256_store_ps(out + k * 16 + h * 8, _mm256_mul_ps(s, _mm256_cvtepi32_ps(lane)));
        };
        const auto emit = [&](__m256i bytes, int k) __attribute__((always_inline)) {  // columns k, k+4, k+1, k+5
          put(_mm256_slli_epi32(bytes, 24), k);
          put(_mm256_and_si256(_mm256_slli_epi32(bytes, 16), top), k + 4);
          put(_mm256_and_si256(_mm256_slli_epi32(bytes, 8), top), k + 1);
          put(_mm256_and_si256(bytes, top), k + 5);
        };
#pragma GCC unroll 2
        for (int d = 0; d < 2; ++d) {
          const __m256i w = load_words(words + d * 64 + h * 32);
          emit(_mm256_shuffle_epi8(table, _mm256_and_si256(w, nibble)), d * 8);
          emit(_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble)), d * 8 + 2);
        }
      }
    }
  }
};

}  // namespace
}  // namespace fourfold::cpu::gemm
