// The dot product of NVFP4 panels with integer activations, written once over a vocabulary; unnamed namespace, see
// float_kernels.h.
#pragma once

#include "cpu/gemm/float_kernels.h"

namespace fourfold::cpu::gemm {
namespace {

// Block::run<M>(x, b, scales, words, acc, fetch): adds block b of 16 rows x 16 columns times M tokens to
// acc[token][vector of the panel]; calls fetch(0 .. 3) between quarters of the products. Block::kPairTokens: the most
// tokens that leave registers for a second panel.
template <class V, class Block>
struct DotNvfp4 {
  static constexpr int kPairTokens = Block::kPairTokens;

  template <int M, int P>
  static void run(const Panel* panels, const ActivationBlock* const* x, float* out) {
    constexpr int kVectors = V::kVectors;
    const int64_t blocks = panels[0].columns / kBlockColumns;
    const int64_t bytes = (blocks + 3) / 4 * kGroupBytes;
    typename V::F acc[P][M][kVectors];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
        for (int h = 0; h < kVectors; ++h) acc[p][t][h] = V::zero();
      }
    }
    int64_t at = 0;
    const auto block = [&](int p, int64_t b, int64_t i, const auto& fetch) __attribute__((always_inline)) {
      const uint8_t* group = panels[p].words + at;
      Block::template run<M>(x, b, group + i * kBlockColumns, group + kGroupScales + i * 128, acc[p], fetch);
    };
    int64_t b = 0;
    for (; b + 4 <= blocks; b += 4, at += kGroupBytes) {
      // Prefetches stand between the products: in one burst they wait for each other's line buffers.
      Fetch fetch[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        fetch[p] = fetch_addresses<P>(panels[p], panels[p].words + at, panels[p].words + bytes);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          if (i == 0) prefetch_line<V>(fetch[p], 0);
          block(
              p, b + i, i, [&](int quarter) __attribute__((always_inline)) {
                prefetch_quarter<V>(fetch[p], kGroupScales + i * 128, quarter);
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
      for (int h = 0; h < kVectors; ++h) {
        const typename V::F scale = V::mul(V::load(panels[p].row_scales + h * V::kLanes), V::set(kDotScale));
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
          V::store(out + p * kPanelOut + t * kPanelRows + h * V::kLanes, V::mul(acc[p][t][h], scale));
        }
      }
    }
  }
};

// P panels with K::run<tokens, P>().
template <class K, int P>
void gemv_nvfp4_panels(const Panel* panels, const ActivationBlock* const* x, int tokens, float* out) {
  switch (tokens) {
    case 1:
      return K::template run<1, P>(panels, x, out);
    case 2:
      return K::template run<2, P>(panels, x, out);
    case 3:
      return K::template run<3, P>(panels, x, out);
    default:
      return K::template run<4, P>(panels, x, out);
  }
}

// KernelTable::gemv_nvfp4. K::kPairTokens: the most tokens that leave registers for a second panel.
template <class K>
void gemv_nvfp4(const Panel* panels, int count, const ActivationBlock* const* x, int tokens, float* out) {
  if (count == 2 && tokens <= K::kPairTokens) {
    if constexpr (K::kPairTokens == 1) {
      return K::template run<1, 2>(panels, x, out);
    } else {
      return gemv_nvfp4_panels<K, 2>(panels, x, tokens, out);
    }
  }
  for (int p = 0; p < count; ++p) gemv_nvfp4_panels<K, 1>(panels + p, x, tokens, out + p * kPanelOut);
}

}  // namespace
}  // namespace fourfold::cpu::gemm
