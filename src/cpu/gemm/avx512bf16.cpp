// Matrix products with vdpbf16ps. The integer dot products come from the other AVX-512 files (dispatch.cpp).
#include "cpu/gemm/layout.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)

#include "cpu/gemm/bf16_panels.h"

namespace fourfold::cpu::gemm {
namespace {

constexpr int kMost = 12;  // tokens of a tile: 24 accumulators with two panels

// Tiles of [columns / 2, tokens of the tile] pairs, one after the other.
int64_t packed_bytes(int64_t tokens, int64_t columns) { return tokens * padded_columns(columns) * 2; }

void pack(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  const int64_t pairs = padded_columns(columns) / 2;
  const int64_t tiles = tile_count(tokens, kMost);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = tile_begin(tokens, tiles, i);
    const int64_t m = tile_begin(tokens, tiles, i + 1) - begin;
    uint32_t* out = static_cast<uint32_t*>(packed) + begin * pairs;
    for (int64_t pair = 0; pair < pairs; pair += 8) {
      for (int64_t t = 0; t < m; ++t) {
        uint32_t values[8];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(values),
                            (__m256i)_mm512_cvtneps_pbh(load_columns(x[begin + t], 2 * pair, columns)));
        for (int64_t j = 0; j < 8; ++j) out[(pair + j) * m + t] = values[j];
      }
    }
  }
}

template <int M, int N>
inline void micro_bf16(const uint32_t* a, const uint8_t* const* b, const float* const* scale, int64_t pairs, bool first,
                       float* out) {
  __m512 acc[M][N];
#pragma GCC unroll 16
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) acc[t][v] = _mm512_setzero_ps();
  }
  const uint8_t* b0 = b[0];
  const uint8_t* b1 = b[N - 1];
#pragma GCC unroll 2
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh weight[N];
    weight[0] = (__m512bh)Avx512::load_words(b0 + k * 64);
    if (N == 2) weight[N - 1] = (__m512bh)Avx512::load_words(b1 + k * 64);
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[k * M + t]));
#pragma GCC unroll 2
      for (int v = 0; v < N; ++v) acc[t][v] = _mm512_dpbf16_ps(acc[t][v], weight[v], x);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < N; ++v) {
    const __m512 s = _mm512_loadu_ps(scale[v]);
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) {
      float* to = out + t * kPairRows + v * kPanelRows;
      _mm512_storeu_ps(to, first ? _mm512_mul_ps(acc[t][v], s) : _mm512_fmadd_ps(acc[t][v], s, _mm512_loadu_ps(to)));
    }
  }
}

template <int N, int M>
inline void micro_tokens_bf16(int tokens, const uint32_t* a, const uint8_t* const* b, const float* const* scale,
                              int64_t pairs, bool first, float* out) {
  if (tokens == M) return micro_bf16<M, N>(a, b, scale, pairs, first, out);
  if constexpr (M > 1) micro_tokens_bf16<N, M - 1>(tokens, a, b, scale, pairs, first, out);
}

void gemm_bf16(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  const int64_t padded_pairs = padded_columns(panels[0].columns) / 2;
  const int64_t tiles = tile_count(tokens, kMost);
  for_pieces(
      panels, count, scratch,
      [&](const uint8_t* const* weights, const float* const* scales, int64_t begin, int64_t columns, bool first) {
        for (int64_t i = 0; i < tiles; ++i) {
          const int64_t t = tile_begin(tokens, tiles, i);
          const int m = static_cast<int>(tile_begin(tokens, tiles, i + 1) - t);
          const uint32_t* a = static_cast<const uint32_t*>(packed) + t * padded_pairs + begin / 2 * m;
          const int64_t pairs = (columns + 1) / 2;
          if (count == 2) {
            micro_tokens_bf16<2, kMost>(m, a, weights, scales, pairs, first, out + t * kPairRows);
          } else {
            micro_tokens_bf16<1, kMost>(m, a, weights, scales, pairs, first, out + t * kPairRows);
          }
        }
      });
}

}  // namespace

const KernelTable* avx512bf16_kernels() {
  static constexpr KernelTable kernels = {
      "avx512bf16", 6,         nullptr,         nullptr,    nullptr, packed_bytes,
      pack,         gemm_bf16, 2 * kPieceBytes, kBf16Kinds, nullptr, nullptr,
  };
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx512bf16_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
