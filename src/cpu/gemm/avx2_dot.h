// The gemv kernels over 256-bit vectors, and the table of everything else; unnamed namespace, see float_kernels.h.
#pragma once

#include "cpu/gemm/avx2_vector.h"

namespace fourfold::cpu::gemm {
namespace {

#include "cpu/gemm/quantize_avx2.inc"

inline __m256i spread(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm256_set1_epi32(word);
}

// Codes to the bytes 2 w + 12.
inline __m256i look_up(__m256i codes) {
  const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                         12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(table, codes);
}
inline __m256i low(__m256i v) { return look_up(_mm256_and_si256(v, _mm256_set1_epi8(15))); }
inline __m256i high(__m256i v) { return look_up(_mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))); }

// Adds the exact sums of a block of 8 rows to `acc`.
inline __m256 add_block(__m256i sum, const ActivationBlock& block, const uint8_t* scales, __m256 acc) {
  const __m256 scale = _mm256_mul_ps(Avx2::block_scales(scales), _mm256_set1_ps(block.scale));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc);
}

// Block::run<M>(x, b, scales, words, acc, fetch): adds block b of 16 rows x 16 columns times M tokens to
// acc[token][half]; calls fetch(0 .. 3) between quarters of the products.
template <class Block>
struct DotNvfp4 {
  static constexpr int kPairTokens = 1;

  template <int M, int P>
  static void run(const Panel* panels, const ActivationBlock* const* x, float* out) {
    const int64_t blocks = panels[0].columns / kBlockColumns;
    const int64_t bytes = (blocks + 3) / 4 * kGroupBytes;
    __m256 acc[P][M][2];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) acc[p][t][0] = acc[p][t][1] = _mm256_setzero_ps();
    }
    int64_t at = 0;
    const auto block = [&](int p, int64_t b, int64_t i, const auto& fetch) __attribute__((always_inline)) {
      const uint8_t* group = panels[p].words + at;
      const uint8_t* words = group + kGroupScales + i * 128;
      Block::template run<M>(x, b, group + i * 16, words, acc[p], fetch);
    };
    int64_t b = 0;
    for (; b + 4 <= blocks; b += 4, at += kGroupBytes) {
      Fetch fetch[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        fetch[p] = fetch_addresses<P>(panels[p], panels[p].words + at, panels[p].words + bytes);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          if (i == 0) prefetch_line<Avx2>(fetch[p], 0);
          block(
              p, b + i, i, [&](int quarter) __attribute__((always_inline)) {
                prefetch_quarter<Avx2>(fetch[p], kGroupScales + i * 128, quarter);
              });
        }
      }
    }
    for (int64_t i = 0; b + i < blocks; ++i) {
      for (int p = 0; p < P; ++p) block(p, b + i, i, [](int) {});
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(panels[p].row_scales + h * 8), _mm256_set1_ps(kDotScale));
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
          _mm256_storeu_ps(out + p * kPanelOut + t * kPanelRows + h * 8, _mm256_mul_ps(acc[p][t][h], scale));
        }
      }
    }
  }
};

template <class Block>
constexpr KernelTable avx2_table(const char* name) {
  return {
      name,
      8,
      quantize_activations,
      gemv_nvfp4<DotNvfp4<Block>>,
      gemv_float<Avx2>,
      packed_bytes_f32,
      pack_f32<6>,
      gemm_f32<Avx2, 6>,
      kPieceF32 * kPanelRows * 4,
      96,
      kAllKinds,
      swiglu<Avx2>,
      axpy<Avx2>,
  };
}

}  // namespace
}  // namespace fourfold::cpu::gemm
