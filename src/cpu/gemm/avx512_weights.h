// How panels of weights become fp32 vectors with AVX-512: what float_kernels.h wants of V beside the vocabulary.
#pragma once

#include "cpu/gemm/layout.h"
#include "cpu/simd/avx512.h"

namespace fourfold::cpu::gemm {
namespace {

struct Avx512Weights : Avx512 {
  static constexpr int kVectors = 1;  // in a panel row of 16

  static inline void expand_f32(I w, F* out) { out[0] = _mm512_castsi512_ps(w); }
  static inline void expand_bf16(I w, F* out) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // 16-bit halves of the lanes, sorted into all low ones and all high ones.
  static inline I split_halves(I w) {
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                                           30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_epi16(order, w);
  }
  static inline F low_half(I halves) { return _mm512_cvtph_ps(_mm512_castsi512_si256(halves)); }
  static inline F high_half(I halves) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)); }
  static inline void expand_f16(I w, F* out) {
    const __m512i halves = split_halves(w);
    out[0] = low_half(halves);
    out[1] = high_half(halves);
  }
  // The upper bytes of 16-bit lanes as f16: the exponent and mantissa of an e4m3 code, one place further right, are
  // its value x 2^-8 (subnormals included); the shift doubles the sign.
  static inline I e4m3_to_f16(I bytes) {
    return _mm512_and_si512(_mm512_srai_epi16(bytes, 1), _mm512_set1_epi16(static_cast<short>(0xbf80)));
  }
  static inline void expand_fp8(I w, F (*out)[1]) {
    const __m512i even = e4m3_to_f16(_mm512_slli_epi16(w, 8));
    const __m512i odd = e4m3_to_f16(w);
    out[0][0] = low_half(even);
    out[1][0] = low_half(odd);
    out[2][0] = high_half(even);
    out[3][0] = high_half(odd);
  }

  // Block scales of 16 rows x 2^-105.
  static inline F block_scales(const uint8_t* scales) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 20));
  }

  static inline F e2m1_values() {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
                          -4.0f, -6.0f);
  }

  // Blocks of NVFP4 to out[k][16] = e2m1 x block scale, exact. A permute looks at the low four bits of each lane only.
  static inline void expand_nvfp4(const uint8_t* group, int64_t blocks, float* out) {
    const __m512 table = e2m1_values();
    for (int64_t b = 0; b < blocks; ++b, out += 256) {
      const uint8_t* scales = group + b / 4 * kGroupBytes + b % 4 * 16;
      const uint8_t* words = group + b / 4 * kGroupBytes + kGroupScales + b % 4 * 128;
      prefetch(words + kPrefetch);
      prefetch(words + kPrefetch + 64);
      if (b % 4 == 0) prefetch(scales + kPrefetch);
      const __m512 s = _mm512_mul_ps(block_scales(scales), _mm512_set1_ps(kBlockScale));
      const __m512i w[2] = {load_words(words), load_words(words + 64)};
#pragma GCC unroll 2
      for (int d = 0; d < 2; ++d) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {  // nibble i is column 2 i, or 2 i - 7 in the high half
          const __m512i index = i == 0 ? w[d] : _mm512_srli_epi32(w[d], 4 * static_cast<unsigned>(i));
          const int k = d * 8 + (i < 4 ? 2 * i : 2 * i - 7);
          _mm512_store_ps(out + k * 16, _mm512_mul_ps(s, _mm512_permutexvar_ps(index, table)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace fourfold::cpu::gemm
