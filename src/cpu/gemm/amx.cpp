// Matrix products with AMX tiles: 16 tokens x 32 columns of activations times 32 columns x 16 rows of weights. The
// weights are expanded to bf16 in L1 first; with few tokens for each expert that is what takes the time, not the tiles.
// The integer dot products come from the AVX-512 files (dispatch.cpp).
#include "cpu/gemm/layout.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include "cpu/gemm/bf16_panels.h"

namespace fourfold::cpu::gemm {
namespace {

constexpr int64_t kTileBytes = 1024;

// Tiles of up to 16 tokens, all with the same number of rows (the last ones may have rows of zeros). One tile of
// tokens: [columns / 32] tiles of [16, 32] bf16.
int64_t rows_of_tile(int64_t tokens) {
  const int64_t tiles = tile_count(tokens, kTileTokens);
  return (tokens + tiles - 1) / tiles;
}

int64_t packed_bytes(int64_t tokens, int64_t columns) {
  return tile_count(tokens, kTileTokens) * padded_columns(columns) / 32 * kTileBytes;
}

void pack(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  const int64_t steps = padded_columns(columns) / 32;
  const int64_t rows = rows_of_tile(tokens);
  for (int64_t t = 0; t < tile_count(tokens, kTileTokens) * rows; ++t) {
    uint8_t* out = static_cast<uint8_t*>(packed) + t / rows * steps * kTileBytes + t % rows * 64;
    for (int64_t s = 0; s < steps; ++s) {
      __m256i low = _mm256_setzero_si256();
      __m256i high = low;
      if (t < tokens) {
        low = load_bf16(x[t], s * 32, columns);
        high = load_bf16(x[t], s * 32 + 16, columns);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + s * kTileBytes), low);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + s * kTileBytes + 32), high);
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

// Tiles 0-3: sums (2 token tiles x 2 panels), 4-5: activations, 6-7: weights.
void configure(int64_t token_rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? token_rows : 16);
  }
  _tile_loadconfig(&config);
}

// Adds scale x a tile of sums to the outputs.
inline void add_tile(const float* sums, const float* scale, int64_t rows, bool first, float* out) {
  const __m512 s = _mm512_loadu_ps(scale);
  for (int64_t t = 0; t < rows; ++t) {
    const __m512 sum = _mm512_load_ps(sums + t * 16);
    float* to = out + t * kPairRows;
    _mm512_storeu_ps(to, first ? _mm512_mul_ps(sum, s) : _mm512_fmadd_ps(sum, s, _mm512_loadu_ps(to)));
  }
}

void gemm_amx(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  const int64_t all_steps = padded_columns(panels[0].columns) / 32;
  const int64_t tiles = tile_count(tokens, kTileTokens);
  const int64_t rows = rows_of_tile(tokens);
  alignas(64) float sums[4][16 * 16];
  configure(rows);
  for_pieces(panels, count, scratch, [&](const uint8_t* const* weights, const float* const* scales, int64_t begin,
                                         int64_t columns, bool first) __attribute__((always_inline)) {
    const int64_t steps = (columns + 31) / 32;
    const uint8_t* b0 = weights[0];
    const uint8_t* b1 = weights[1];
    for (int64_t i = 0; i < tiles; i += 2) {
      const uint8_t* a0 = static_cast<const uint8_t*>(packed) + (i * all_steps + begin / 32) * kTileBytes;
      const uint8_t* a1 = a0 + all_steps * kTileBytes;
      const bool two = i + 1 < tiles;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t s = 0; s < steps; ++s) {
        _tile_loadd(4, a0 + s * kTileBytes, 64);
        _tile_loadd(6, b0 + s * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (count == 2) {
          _tile_loadd(7, b1 + s * kTileBytes, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (two) {
          _tile_loadd(5, a1 + s * kTileBytes, 64);
          _tile_dpbf16ps(2, 5, 6);
          if (count == 2) _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, sums[0], 64);
      if (count == 2) _tile_stored(1, sums[1], 64);
      if (two) {
        _tile_stored(2, sums[2], 64);
        if (count == 2) _tile_stored(3, sums[3], 64);
      }
      for (int64_t j = 0; j < (two ? 2 : 1); ++j) {
        const int64_t t = (i + j) * rows;
        const int64_t n = tokens - t < rows ? tokens - t : rows;
        for (int p = 0; p < count; ++p) {
          add_tile(sums[2 * j + p], scales[p], n, first, out + t * kPairRows + p * kPanelRows);
        }
      }
    }
  });
  _tile_release();
}

}  // namespace

const KernelTable* amx_kernels() {
  static constexpr KernelTable kernels = {
      "amx", 4, nullptr, nullptr, nullptr, packed_bytes, pack, gemm_amx, 2 * kPieceBytes, false, nullptr, nullptr,
  };
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* amx_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
