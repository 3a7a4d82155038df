// Matrix products with AMX tiles: 16 tokens x 32 columns of activations times 32 columns x 16 rows of weights.
//
// Activations are split into two bf16 numbers, x = high + low with an error of 2^-17: rounded to one, routers with a
// near tie choose other experts than the reference does. Tiles are so much faster than what feeds them that the second
// product costs little.
//
// With few tokens for each expert the tiles are fast and what costs is expanding weights to bf16, so that is done with
// f16 arithmetic (every AMX processor has AVX512-FP16), two weights in a lane: the product e2m1 x block scale x 2^3 is
// exact and normal in f16, and f16 bits moved right by three places are a bf16 that is smaller by 2^112. Activations
// are packed 2^64 larger, so that sums stay far from the ends of the fp32 range; the rest is made good at the end.
// FP8 goes the same way: e4m3 codes as f16, times 2^8, so that subnormals become normal (subnormal f16 operands cost
// nothing).
// The integer dot products come from the AVX-512 files (dispatch.cpp).
#include "cpu/gemm/layout.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512FP16__)

#include "cpu/gemm/bf16_panels.h"

namespace fourfold::cpu::gemm {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kPieceSteps = 16;  // steps of 32 columns whose weights are expanded at a time: 16 KiB for each panel

constexpr float kActivationFactor = 0x1p64f;
constexpr float kNvfp4Factor = 0x1p45f;  // 2^(112 - 3 - 64)
constexpr float kFp8Factor = 0x1p40f;    // 2^(112 - 8 - 64); row scales have another 2^8
constexpr float kPlainFactor = 0x1p-64f;

// Tiles of up to 16 tokens, all with the same number of rows (the last ones may have rows of zeros). One tile of
// tokens: [columns / 32] pairs of tiles [16, 32] bf16, the high parts and the low parts.
constexpr int64_t kPairBytes = 2 * kTileBytes;

int64_t rows_of_tile(int64_t tokens) {
  const int64_t tiles = tile_count(tokens, kTileTokens);
  return (tokens + tiles - 1) / tiles;
}

int64_t packed_bytes(int64_t tokens, int64_t columns) {
  return tile_count(tokens, kTileTokens) * padded_columns(columns) / 32 * kPairBytes;
}

// Columns [k, k + 16) of a row as high and low bf16 parts.
inline void store_parts(const float* x, int64_t k, int64_t columns, uint8_t* out) {
  const __m512 value = _mm512_mul_ps(load_columns(x, k, columns), _mm512_set1_ps(kActivationFactor));
  const __m256i high = (__m256i)_mm512_cvtneps_pbh(value);
  const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(value, rounded));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kTileBytes), low);
}

void pack(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  const int64_t steps = padded_columns(columns) / 32;
  const int64_t rows = rows_of_tile(tokens);
  for (int64_t t = 0; t < tile_count(tokens, kTileTokens) * rows; ++t) {
    uint8_t* out = static_cast<uint8_t*>(packed) + t / rows * steps * kPairBytes + t % rows * 64;
    for (int64_t s = 0; s < steps; ++s, out += kPairBytes) {
      if (t < tokens) {
        store_parts(x[t], s * 32, columns, out);
        store_parts(x[t], s * 32 + 16, columns, out + 32);
      } else {
        const __m512i zero = _mm512_setzero_si512();
        _mm512_storeu_si512(out, zero);
        _mm512_storeu_si512(out + kTileBytes, zero);
      }
    }
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-1: sums of the high parts for two panels, 2-3: of the low parts; 4, 5: activations, high and low; 6-7:
// weights. A tile product takes 16 cycles but its sum is there only after 52: with four sums in turn nothing waits.
void configure(int64_t token_rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? token_rows : 16);
  }
  _tile_loadconfig(&config);
}

// f16 that are zero or normal to bf16, x 2^-112.
inline __m512i to_bf16(__m512h values) {
  return _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(values), 3),
                          _mm512_set1_epi16(static_cast<short>(0x8fff)));
}

// 32 columns (two blocks) of NVFP4 to a weight tile, x 2^-109. `step` counts 32 columns from the start of the panel.
inline void expand_nvfp4_step(const uint8_t* panel, int64_t step, uint8_t* out) {
  // e2m1 x 2^-4 as f16
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0, 0x2800, 0x2c00, 0x2e00, 0x3000, 0x3200, 0x3400, 0x3600, static_cast<short>(0x8000), static_cast<short>(0xa800),
      static_cast<short>(0xac00), static_cast<short>(0xae00), static_cast<short>(0xb000), static_cast<short>(0xb200),
      static_cast<short>(0xb400), static_cast<short>(0xb600)));
  const uint8_t* group = panel + step / 2 * kGroupBytes;
  const uint8_t* scales = group + step % 2 * 32;
  const uint8_t* words = group + kGroupScales + step % 2 * 256;
  Avx512::prefetch(scales + kPrefetch);
#pragma GCC unroll 2
  for (int b = 0; b < 2; ++b) {
    Avx512::prefetch(words + b * 128 + kPrefetch);
    Avx512::prefetch(words + b * 128 + kPrefetch + 64);
    // Scale codes in both halves of each lane, as f16: the scale x 2^7.
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + b * 16)));
    const __m512h s = _mm512_castsi512_ph(_mm512_or_si512(_mm512_slli_epi32(bytes, 7), _mm512_slli_epi32(bytes, 23)));
#pragma GCC unroll 2
    for (int d = 0; d < 2; ++d) {
      const __m512i w = Avx512::load_words(words + b * 128 + d * 64);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i index = i == 0 ? w : _mm512_srli_epi16(w, 4 * static_cast<unsigned>(i));
        const __m512h product = _mm512_mul_ph(s, _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, table)));
        _mm512_store_si512(out + ((b * 2 + d) * 4 + i) * 64, to_bf16(product));
      }
    }
  }
}

// The same for FP8, x 2^-112.
inline void expand_fp8_step(const uint8_t* panel, int64_t step, uint8_t* out) {
  const __m512h factor = _mm512_castsi512_ph(_mm512_set1_epi16(0x5c00));  // 2^8
  const uint8_t* words = panel + step * 512;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    Avx512::prefetch(words + i * 64 + kPrefetch);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      // Pairs of codes, each in the upper byte of 16 bits.
      const __m512i pairs =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i * 64 + half * 32)));
      const __m512i bytes = _mm512_or_si512(_mm512_slli_epi32(pairs, 16), _mm512_slli_epi16(pairs, 8));
      const __m512h value = _mm512_castsi512_ph(Avx512::e4m3_to_f16(bytes));
      _mm512_store_si512(out + (i * 2 + half) * 64, to_bf16(_mm512_mul_ph(value, factor)));
    }
  }
}

inline void expand_step(const Panel& panel, int64_t step, uint8_t* out) {
  if (panel.kind == Kind::kNvfp4) return expand_nvfp4_step(panel.words, step, out);
  expand_fp8_step(panel.words, step, out);
}

// Adds factor x scale x (a + b), two tiles of sums, to the outputs.
inline void add_tiles(const float* a, const float* b, const float* scale, float factor, int64_t rows, bool first,
                      float* out) {
  const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(scale), _mm512_set1_ps(factor));
  for (int64_t t = 0; t < rows; ++t) {
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(a + t * 16), _mm512_load_ps(b + t * 16));
    float* to = out + t * kPairRows;
    _mm512_storeu_ps(to, first ? _mm512_mul_ps(sum, s) : _mm512_fmadd_ps(sum, s, _mm512_loadu_ps(to)));
  }
}

// One panel alone runs as a pair of the same, and the second result is dropped.
void gemm_amx(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  const int64_t columns = panels[0].columns;
  const int64_t all_steps = padded_columns(columns) / 32;
  const int64_t tiles = tile_count(tokens, kTileTokens);
  const int64_t rows = rows_of_tile(tokens);
  const auto in_steps = [](Kind kind) { return kind == Kind::kNvfp4 || kind == Kind::kFp8; };
  const bool steps_only = in_steps(panels[0].kind) && in_steps(panels[count - 1].kind);
  auto* memory = static_cast<uint8_t*>(scratch);
  alignas(64) float sums[4][16 * 16];
  configure(rows);
  bool first = true;
  for (int64_t begin = 0; begin < columns; first = false) {
    int64_t end = columns - begin < kPieceSteps * 32 ? columns : begin + kPieceSteps * 32;
    const float* scales[2] = {nullptr, nullptr};
    for (int p = 0; p < count; ++p) {
      const int64_t segment = begin / panels[p].segment;
      const int64_t segment_end = (segment + 1) * panels[p].segment;
      if (segment_end < end) end = segment_end;
      scales[p] = panels[p].row_scales + segment * panels[p].row_scale_stride;
    }
    const int64_t steps = (end - begin + 31) / 32;
    // Whole steps of NVFP4 and FP8 are expanded while the first tile of tokens runs, two steps ahead of it.
    const bool fused = steps_only && (end - begin) % 32 == 0;
    const uint8_t* weights[2];
    float factor[2];
    for (int p = 0; p < 2; ++p) {
      const Panel& panel = panels[p < count ? p : 0];
      uint8_t* piece = memory + p * kPieceSteps * kTileBytes;
      weights[p] = piece;
      factor[p] = !fused ? kPlainFactor : panel.kind == Kind::kNvfp4 ? kNvfp4Factor : kFp8Factor;
      if (p >= count) {
        weights[p] = weights[0];
      } else if (fused) {
        expand_step(panel, begin / 32, piece);
        if (steps > 1) expand_step(panel, begin / 32 + 1, piece + kTileBytes);
      } else {
        weights[p] = bf16_piece(panel, begin, end, piece);
      }
    }
    const uint8_t* b0 = weights[0];
    const uint8_t* b1 = weights[1];
    for (int64_t i = 0; i < tiles; ++i) {
      const uint8_t* a = static_cast<const uint8_t*>(packed) + (i * all_steps + begin / 32) * kPairBytes;
      const auto expand = [&](int64_t s) __attribute__((always_inline)) {
        if (!fused || i != 0 || s >= steps) return;
        for (int p = 0; p < count; ++p) {
          expand_step(panels[p], begin / 32 + s, memory + (p * kPieceSteps + s) * kTileBytes);
        }
      };
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t s = 0; s < steps; ++s) {
        _tile_loadd(4, a + s * kPairBytes, 64);
        _tile_loadd(6, b0 + s * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1 + s * kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + s * kPairBytes + kTileBytes, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        expand(s + 2);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      const int64_t t = i * rows;
      const int64_t n = tokens - t < rows ? tokens - t : rows;
      for (int p = 0; p < count; ++p) {
        add_tiles(sums[p], sums[2 + p], scales[p], factor[p], n, first, out + t * kPairRows + p * kPanelRows);
      }
    }
    begin = end;
  }
  _tile_release();
}

}  // namespace

const KernelTable* amx_kernels() {
  static constexpr KernelTable kernels = {
      "amx",      4,       nullptr, nullptr, nullptr, packed_bytes, pack, gemm_amx, 2 * kPieceSteps * kTileBytes,
      kBf16Kinds, nullptr, nullptr,
  };
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* amx_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
