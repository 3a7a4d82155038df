// What the AVX-512 sources with and without VNNI share; unnamed namespace, see float_kernels.h.
#pragma once

#include "cpu/gemm/avx512_weights.h"
#include "cpu/gemm/dot_nvfp4.h"
#include "cpu/gemm/quantize_avx2.h"

namespace fourfold::cpu::gemm {
namespace {

inline __m512i spread(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm512_set1_epi32(word);
}

// Codes to 2 w + 12 for a byte shuffle within 128-bit lanes.
inline __m512i code_table() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

// Integers: low(v), high(v): the codes in the low and high nibbles of bytes as 2 w + 12; sum(w, block, fetch): the
// exact sum of w[0 .. 3] times the activations of a block, plus its correction.
template <class Integers>
struct Avx512Block {
  static constexpr int kPairTokens = kGemvTokens;

  template <int M, class Fetch>
  __attribute__((always_inline)) static inline void run(const ActivationBlock* const* x, int64_t b,
                                                        const uint8_t* scales, const uint8_t* words, __m512 (*acc)[1],
                                                        const Fetch& fetch) {
    const __m512 scale = Avx512Weights::block_scales(scales);
    const __m512i v0 = Avx512::load_words(words), v1 = Avx512::load_words(words + 64);
    const __m512i w[4] = {Integers::low(v0), Integers::high(v0), Integers::low(v1), Integers::high(v1)};
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
      const ActivationBlock& block = x[t][b];
      const __m512i sum = Integers::sum(
          w, block, [&](int quarter) __attribute__((always_inline)) {
            if (t == 0) fetch(quarter);
          });
      acc[t][0] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(block.scale)), acc[t][0]);
    }
  }
};

template <class Integers>
constexpr KernelTable avx512_table(const char* name, int gemv_limit) {
  return float_table<Avx512Weights>(name, gemv_limit, quantize_activations,
                                    gemv_nvfp4<DotNvfp4<Avx512Weights, Avx512Block<Integers>>>);
}

}  // namespace
}  // namespace fourfold::cpu::gemm
