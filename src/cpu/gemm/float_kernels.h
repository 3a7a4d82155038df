// Kernels in fp32 written once over a vector type. Included only by the files of one instruction set; everything is in
// an unnamed namespace, so each file has its own copy with its own flags.
//
// V is a vocabulary (cpu/simd/avx2.h) with what <isa>_weights.h adds: kVectors (vectors in a panel row of 16),
// expand_<kind>(I, F*), expand_fp8, expand_nvfp4(groups, blocks, out).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/layout.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"

namespace fourfold::cpu::gemm {
namespace {

// Where to prefetch while `at` of one of P panels, which ends at `end`, is worked on: every line comes into L2 first
// and from there into L1.
struct Fetch {
  const uint8_t* near;
  const uint8_t* far;
};
template <int P>
inline Fetch fetch_addresses(const Panel& panel, const uint8_t* at, const uint8_t* end) {
  const int64_t left = end - at;
  const auto address = [&](int64_t ahead) { return left > ahead ? at + ahead : panel.ahead + (ahead - left); };
  return {address(kPrefetch / P), address(kPrefetchFar / P)};
}

// The line at an offset from both.
template <class V>
inline void prefetch_line(const Fetch& fetch, int64_t offset) {
  V::prefetch(fetch.near + offset);
  V::prefetch_far(fetch.far + offset);
}

// Two lines in four turns, each between a quarter of the products of a block and the next.
template <class V>
inline void prefetch_quarter(const Fetch& fetch, int64_t offset, int quarter) {
  const int64_t line = offset + quarter / 2 * 64;
  if (quarter % 2 == 0) {
    V::prefetch(fetch.near + line);
  } else {
    V::prefetch_far(fetch.far + line);
  }
}

// Floats from the outputs of one panel of a gemv to those of the next.
inline constexpr int kPanelOut = kGemvTokens * kPanelRows;

// A step of a panel, all 16 rows of kColumns columns in kBytes bytes, to fp32 vectors [column][vector]. A step of FP8
// is one vector of codes.
template <class V, Kind kKind>
struct Expand {
  static constexpr bool kFp8 = kKind == Kind::kFp8;
  static constexpr int kColumns = kKind == Kind::kF32 ? 1 : kFp8 && V::kVectors == 1 ? 4 : 2;
  static constexpr int kBytes = kPanelRows * (kFp8 ? kColumns : 4);

  static inline void run(const uint8_t* words, typename V::F (*out)[V::kVectors]) {
    if constexpr (kFp8) {
      V::expand_fp8(V::load_words(words), out);
    } else {
#pragma GCC unroll 2
      for (int h = 0; h < V::kVectors; ++h) {
        typename V::F value[kColumns];
        const typename V::I w = V::load_words(words + h * V::kLanes * 4);
        if constexpr (kKind == Kind::kF32) V::expand_f32(w, value);
        if constexpr (kKind == Kind::kBf16) V::expand_bf16(w, value);
        if constexpr (kKind == Kind::kF16) V::expand_f16(w, value);
#pragma GCC unroll 2
        for (int k = 0; k < kColumns; ++k) out[k][h] = value[k];
      }
    }
  }
};

// Adds `count` steps from `first` on of P panels to sums[p][t][16]. Two chains for each output, since one alone leaves
// the multipliers waiting.
template <class V, class E, int M, int P>
inline void dot_words(const Panel* panels, int64_t first, int64_t count, const float* const* x, int64_t column,
                      float* sums) {
  constexpr int kVectors = V::kVectors;
  constexpr int kChains = 2;
  constexpr int kLine = 64;
  typename V::F acc[kChains][P][M][kVectors];
  for (int c = 0; c < kChains; ++c) {
    for (int p = 0; p < P; ++p) {
      for (int t = 0; t < M; ++t) {
        for (int h = 0; h < kVectors; ++h) acc[c][p][t][h] = V::zero();
      }
    }
  }
  const uint8_t* words[P];
  const uint8_t* end[P];
  for (int p = 0; p < P; ++p) {
    words[p] = panels[p].words + first * E::kBytes;
    end[p] = panels[p].words + (panels[p].columns + E::kColumns - 1) / E::kColumns * E::kBytes;
  }
  const auto step = [&](int64_t w, int chain) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      typename V::F weight[E::kColumns][kVectors];
      E::run(words[p] + w * E::kBytes, weight);
#pragma GCC unroll 4
      for (int k = 0; k < E::kColumns; ++k) {
        const int c = E::kColumns > 1 ? k % kChains : chain;
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
          const typename V::F value = V::set(x[t][column + w * E::kColumns + k]);
#pragma GCC unroll 2
          for (int h = 0; h < kVectors; ++h) acc[c][p][t][h] = V::fma(weight[k][h], value, acc[c][p][t][h]);
        }
      }
    }
  };
  constexpr int kLineSteps = kLine / E::kBytes;
  constexpr int kUnroll = 4 * kLineSteps;
  int64_t w = 0;
  for (; w + kUnroll <= count; w += kUnroll) {
    Fetch fetch[P];
    for (int p = 0; p < P; ++p) fetch[p] = fetch_addresses<P>(panels[p], words[p] + w * E::kBytes, end[p]);
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; ++i) {
      // Line by line: prefetches in a burst wait for each other's line buffers.
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        if (i % kLineSteps == 0) prefetch_line<V>(fetch[p], i / kLineSteps * kLine);
      }
      step(w + i, i % kChains);
    }
  }
  for (; w < count; ++w) step(w, static_cast<int>(w % kChains));
  for (int p = 0; p < P; ++p) {
    for (int t = 0; t < M; ++t) {
      for (int h = 0; h < kVectors; ++h) {
        V::store(sums + (p * M + t) * kPanelRows + h * V::kLanes, V::add(acc[0][p][t][h], acc[1][p][t][h]));
      }
    }
  }
}

template <class V, class E, int M, int P>
void gemv_words(const Panel* panels, const float* const* x, float* out) {
  const int64_t columns = panels[0].columns;
  const int64_t width = panels[0].segment;
  alignas(64) float sums[P * M * kPanelRows];
  int64_t segment = 0;
  for (int64_t begin = 0; begin < columns || begin == 0; begin += width, ++segment) {
    const int64_t end = columns - begin < width ? columns : begin + width;
    const int64_t count = (end - begin + E::kColumns - 1) / E::kColumns;
    dot_words<V, E, M, P>(panels, begin / E::kColumns, count, x, begin, sums);
    for (int p = 0; p < P; ++p) {
      const float* scales = panels[p].row_scales + segment * panels[p].row_scale_stride;
      for (int t = 0; t < M; ++t) {
        for (int h = 0; h < kPanelRows; h += V::kLanes) {
          float* to = out + p * kPanelOut + t * kPanelRows + h;
          const typename V::F sum = V::mul(V::load(sums + (p * M + t) * kPanelRows + h), V::load(scales + h));
          V::store(to, segment == 0 ? sum : V::add(V::load(to), sum));
        }
      }
    }
  }
}

// All tokens at once where that many sums fit the registers. Otherwise two at a time: the second pass finds the panel
// in L1 or L2.
template <class V, class E>
void gemv_tokens(const Panel* panels, int count, const float* const* x, int tokens, float* out) {
  constexpr bool kWide = V::kVectors == 1;  // AVX2 and NEON have too few registers, for two panels, too
  const auto run = [&](auto together, int t) {
    constexpr int kTokens = together();
    float* to = out + t * kPanelRows;
    if constexpr (kWide || kTokens == 1) {
      if (count == 2) return gemv_words<V, E, kTokens, 2>(panels, x + t, to);
    }
    for (int p = 0; p < count; ++p) gemv_words<V, E, kTokens, 1>(panels + p, x + t, to + p * kPanelOut);
  };
  if constexpr (kWide) {
    if (tokens == 4) return run(std::integral_constant<int, 4>{}, 0);
    if (tokens == 3) return run(std::integral_constant<int, 3>{}, 0);
  }
  int t = 0;
  for (; t + 2 <= tokens; t += 2) run(std::integral_constant<int, 2>{}, t);
  if (t < tokens) run(std::integral_constant<int, 1>{}, t);
}

template <class V>
void gemv_float(const Panel* panels, int count, const float* const* x, int tokens, float* out) {
  switch (panels[0].kind) {
    case Kind::kF32:
      return gemv_tokens<V, Expand<V, Kind::kF32>>(panels, count, x, tokens, out);
    case Kind::kBf16:
      return gemv_tokens<V, Expand<V, Kind::kBf16>>(panels, count, x, tokens, out);
    case Kind::kF16:
      return gemv_tokens<V, Expand<V, Kind::kF16>>(panels, count, x, tokens, out);
    case Kind::kFp8:
      return gemv_tokens<V, Expand<V, Kind::kFp8>>(panels, count, x, tokens, out);
    case Kind::kNvfp4:
      return;
  }
}

// ---- prefill: dequantise a piece of a panel to fp32 [columns, 16], then a register-blocked product

// Columns [begin, begin + n), rounded up to whole steps; how many.
template <class V, class E>
inline int64_t expand_words(const Panel& panel, int64_t begin, int64_t n, float* out) {
  const int64_t count = (n + E::kColumns - 1) / E::kColumns;
  const uint8_t* words = panel.words + begin / E::kColumns * E::kBytes;
  for (int64_t w = 0; w < count; ++w) {
    typename V::F weight[E::kColumns][V::kVectors];
    E::run(words + w * E::kBytes, weight);
    for (int k = 0; k < E::kColumns; ++k) {
      for (int h = 0; h < V::kVectors; ++h) {
        V::store(out + (w * E::kColumns + k) * kPanelRows + h * V::kLanes, weight[k][h]);
      }
    }
  }
  return count * E::kColumns;
}

// Columns [begin, end) to out[k][16]; begin is a multiple of 64 for NVFP4 and of whole words otherwise. Returns the
// number of columns written, end - begin rounded up to whole steps (the extra ones are zero).
template <class V>
inline int64_t expand_panel(const Panel& panel, int64_t begin, int64_t end, float* out) {
  const int64_t n = end - begin;
  switch (panel.kind) {
    case Kind::kF32:
      return expand_words<V, Expand<V, Kind::kF32>>(panel, begin, n, out);
    case Kind::kBf16:
      return expand_words<V, Expand<V, Kind::kBf16>>(panel, begin, n, out);
    case Kind::kF16:
      return expand_words<V, Expand<V, Kind::kF16>>(panel, begin, n, out);
    case Kind::kFp8:
      return expand_words<V, Expand<V, Kind::kFp8>>(panel, begin, n, out);
    case Kind::kNvfp4:
      V::expand_nvfp4(panel.words + begin / kGroupColumns * kGroupBytes, n / kBlockColumns, out);
      return n;
  }
  return n;
}

// out[t][0 .. kVectors) (+)= scale x sum over k of a[k][t] b[k]; the vectors of b come from one panel (AVX2: two
// halves) or two (AVX-512).
template <class V, int M, int N>
inline void micro(const float* a, const float* const* b, const float* const* scale, int64_t columns, bool first,
                  float* const* out) {
  typename V::F acc[M][N];
#pragma GCC unroll 16
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) acc[t][v] = V::zero();
  }
  const float* b0 = b[0];
  const float* b1 = b[N - 1];
#pragma GCC unroll 4
  for (int64_t k = 0; k < columns; ++k) {
    typename V::F weight[N];
    weight[0] = V::load(b0 + k * kPanelRows);
    if (N == 2) weight[N - 1] = V::load(b1 + k * kPanelRows);
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) {
      const typename V::F x = V::set(a[k * M + t]);
#pragma GCC unroll 2
      for (int v = 0; v < N; ++v) acc[t][v] = V::fma(weight[v], x, acc[t][v]);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < N; ++v) {
    const typename V::F s = V::load(scale[v]);
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) {
      float* to = out[v] + t * kPairRows;
      V::store(to, first ? V::mul(acc[t][v], s) : V::fma(acc[t][v], s, V::load(to)));
    }
  }
}

template <class V, int N, int M>
inline void micro_tokens(int tokens, const float* a, const float* const* b, const float* const* scale, int64_t columns,
                         bool first, float* const* out) {
  if (tokens == M) return micro<V, M, N>(a, b, scale, columns, first, out);
  if constexpr (M > 1) micro_tokens<V, N, M - 1>(tokens, a, b, scale, columns, first, out);
}

// Tokens are cut into the fewest tiles of at most `most`, as even as possible: size of tile i of n.
inline int64_t tile_count(int64_t tokens, int64_t most) { return (tokens + most - 1) / most; }
inline int64_t tile_begin(int64_t tokens, int64_t tiles, int64_t i) { return tokens * i / tiles; }

inline int64_t padded_columns(int64_t columns) { return (columns + kColumnAlign - 1) / kColumnAlign * kColumnAlign; }

// fp32 tiles, [columns, tokens of the tile] each, one after the other.
inline int64_t packed_bytes_f32(int64_t tokens, int64_t columns) { return tokens * padded_columns(columns) * 4; }

template <int kMost>
void pack_f32(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  const int64_t padded = padded_columns(columns);
  const int64_t tiles = tile_count(tokens, kMost);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = tile_begin(tokens, tiles, i);
    const int64_t m = tile_begin(tokens, tiles, i + 1) - begin;
    float* out = static_cast<float*>(packed) + begin * padded;
    for (int64_t k = 0; k < padded; k += 16) {
      const int64_t n = columns - k < 16 ? columns - k : 16;
      for (int64_t t = 0; t < m; ++t) {
        const float* in = x[begin + t];
        for (int64_t j = 0; j < n; ++j) out[(k + j) * m + t] = in[k + j];
        for (int64_t j = n < 0 ? 0 : n; j < 16; ++j) out[(k + j) * m + t] = 0.0f;
      }
    }
  }
}

// Columns of one piece: the fp32 piece of one panel is 16 KiB, so that it and a tile of activations stay in L1.
inline constexpr int64_t kPieceF32 = 256;

// kMost: tokens of a tile. V::kVectors == 2: a panel is two vectors and panels go one by one; 1: two panels at a time.
template <class V, int kMost>
void gemm_f32(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  constexpr bool kPair = V::kVectors == 1;
  const int64_t columns = panels[0].columns;
  const int64_t padded = padded_columns(columns);
  const int64_t tiles = tile_count(tokens, kMost);
  float* piece = static_cast<float*>(scratch);
  for (int p = 0; p < count; p += kPair ? 2 : 1) {
    const int group = kPair ? count - p : 1;
    int64_t step = kPieceF32;
    for (int g = 0; g < group; ++g) {
      if (panels[p + g].segment < step) step = panels[p + g].segment;
    }
    bool first = true;
    for (int64_t begin = 0; begin < columns || first; first = false) {
      // A piece ends where any of its panels changes its row scales.
      int64_t end = columns - begin < step ? columns : begin + step;
      const float* scales[2] = {nullptr, nullptr};
      for (int g = 0; g < group; ++g) {
        const Panel& panel = panels[p + g];
        const int64_t segment = begin / panel.segment;
        const int64_t segment_end = panel.segment >= columns ? columns : (segment + 1) * panel.segment;
        if (segment_end < end) end = segment_end;
        scales[g] = panel.row_scales + segment * panel.row_scale_stride;
      }
      int64_t n = 0;
      for (int g = 0; g < group; ++g)
        n = expand_panel<V>(panels[p + g], begin, end, piece + g * kPieceF32 * kPanelRows);
      if (n > end - begin && end < columns) n = end - begin;
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t t = tile_begin(tokens, tiles, i);
        const int m = static_cast<int>(tile_begin(tokens, tiles, i + 1) - t);
        const float* a = static_cast<const float*>(packed) + t * padded + begin * m;
        float* c = out + t * kPairRows + p * kPanelRows;
        if constexpr (kPair) {
          const float* b[2] = {piece, piece + kPieceF32 * kPanelRows};
          float* to[2] = {c, c + kPanelRows};
          if (group == 2) {
            micro_tokens<V, 2, kMost>(m, a, b, scales, n, first, to);
          } else {
            micro_tokens<V, 1, kMost>(m, a, b, scales, n, first, to);
          }
        } else {
          const float* b[2] = {piece, piece + V::kLanes};
          const float* s[2] = {scales[0], scales[0] + V::kLanes};
          float* to[2] = {c, c + V::kLanes};
          micro_tokens<V, 2, kMost>(m, a, b, s, n, first, to);
        }
      }
      begin = end;
      if (begin >= columns) break;
    }
  }
}

// ---- element-wise

template <class V>
void swiglu(const float* gate, const float* up, float* out, int64_t n) {
  using Vec = Vector<V>;
  for (int64_t i = 0; i < n; i += V::kLanes) (silu(Vec::load(gate + i)) * Vec::load(up + i)).store(out + i);
}

template <class V>
void axpy(float weight, const float* x, float* out, int64_t n) {
  const typename V::F w = V::set(weight);
  for (int64_t i = 0; i < n; i += V::kLanes) V::store(out + i, V::fma(w, V::load(x + i), V::load(out + i)));
}

// The table of an instruction set: NVFP4 with few tokens by `gemv`, everything else over V.
template <class V>
constexpr KernelTable float_table(const char* name, int gemv_limit, decltype(KernelTable::quantize) quantize,
                                  decltype(KernelTable::gemv_nvfp4) gemv) {
  constexpr int kMost = V::kVectors == 1 ? 12 : 6;  // tokens of a tile: sums fill the registers
  constexpr int kPanelsAtOnce = V::kVectors == 1 ? 2 : 1;
  return {
      .name = name,
      .gemv_limit = gemv_limit,
      .quantize = quantize,
      .gemv_nvfp4 = gemv,
      .gemv_float = gemv_float<V>,
      .packed_bytes = packed_bytes_f32,
      .pack = pack_f32<kMost>,
      .gemm = gemm_f32<V, kMost>,
      .gemm_scratch = kPanelsAtOnce * kPieceF32 * kPanelRows * 4,
      .gemm_tokens = 96,
      .gemm_kinds = kAllKinds,
      .swiglu = swiglu<V>,
      .axpy = axpy<V>,
  };
}

}  // namespace
}  // namespace fourfold::cpu::gemm
