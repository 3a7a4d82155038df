// What the AVX-512 sources with and without VNNI share: the dot product of NVFP4 panels with integer activations and
// the kernel table; unnamed namespace, see float_kernels.h.
#pragma once

#include "cpu/gemm/avx512_vector.h"

namespace fourfold::cpu::gemm {
namespace {

#include "cpu/gemm/quantize_avx2.inc"

inline __m512i spread(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm512_set1_epi32(word);
}

// Codes to 2 w + 12 for a byte shuffle within 128-bit lanes.
inline __m512i code_table() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

// Integers: low(v), high(v): the codes in the low and high nibbles of bytes as 2 w + 12; sum(w, block): the exact sum
// of w[0 .. 3] times the activations of a block, plus its correction.
template <class Integers>
struct DotNvfp4 {
  static constexpr int kPairTokens = kGemvTokens;

  template <int M, class Fetch>
  __attribute__((always_inline)) static inline void block(const ActivationBlock* const* x, int64_t b,
                                                          const uint8_t* scales, const uint8_t* words, __m512* acc,
                                                          const Fetch& fetch) {
    const __m512 scale = Avx512::block_scales(scales);
    const __m512i v0 = Avx512::load_words(words), v1 = Avx512::load_words(words + 64);
    const __m512i w[4] = {Integers::low(v0), Integers::high(v0), Integers::low(v1), Integers::high(v1)};
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
      const ActivationBlock& block = x[t][b];
      const __m512i sum = Integers::sum(
          w, block, [&](int quarter) __attribute__((always_inline)) {
            if (t == 0) fetch(quarter);
          });
      acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(block.scale)), acc[t]);
    }
  }

  template <int M, int P>
  static void run(const Panel* panels, const ActivationBlock* const* x, float* out) {
    const int64_t blocks = panels[0].columns / kBlockColumns;
    const int64_t bytes = (blocks + 3) / 4 * kGroupBytes;
    __m512 acc[P][M];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) acc[p][t] = _mm512_setzero_ps();
    }
    int64_t at = 0;
    int64_t b = 0;
    for (; b + 4 <= blocks; b += 4, at += kGroupBytes) {
      // Prefetches stand between the products: in one burst they wait for each other's line buffers.
      Fetch fetch[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p)
        fetch[p] = fetch_addresses<P>(panels[p], panels[p].words + at, panels[p].words + bytes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          const uint8_t* group = panels[p].words + at;
          if (i == 0) prefetch_line<Avx512>(fetch[p], 0);
          const int64_t words = kGroupScales + i * 128;
          block<M>(
              x, b + i, group + i * 16, group + words, acc[p], [&](int quarter) __attribute__((always_inline)) {
                prefetch_quarter<Avx512>(fetch[p], words, quarter);
              });
        }
      }
    }
    for (int64_t i = 0; b + i < blocks; ++i) {
      for (int p = 0; p < P; ++p) {
        const uint8_t* group = panels[p].words + at;
        block<M>(x, b + i, group + i * 16, group + kGroupScales + i * 128, acc[p], [](int) {});
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(panels[p].row_scales), _mm512_set1_ps(kDotScale));
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) {
        _mm512_storeu_ps(out + p * kPanelOut + t * kPanelRows, _mm512_mul_ps(acc[p][t], scale));
      }
    }
  }
};

template <class Integers>
constexpr KernelTable avx512_table(const char* name, int gemv_limit) {
  return {
      name,
      gemv_limit,
      quantize_activations,
      gemv_nvfp4<DotNvfp4<Integers>>,
      gemv_float<Avx512>,
      packed_bytes_f32,
      pack_f32<12>,
      gemm_f32<Avx512, 12>,
      2 * kPieceF32 * kPanelRows * 4,
      96,
      kAllKinds,
      swiglu<Avx512>,
      axpy<Avx512>,
  };
}

}  // namespace
}  // namespace fourfold::cpu::gemm
