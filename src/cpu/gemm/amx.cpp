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
constexpr int64_t kMostTiles = kGemmTokens / kTileTokens;
// Steps of 32 columns whose weights are kept for several tiles of tokens: 8 KiB for each of two panels. With twice as
// many, they and the activations that stream past do not fit L1 (a quarter slower).
constexpr int64_t kPieceSteps = 8;
constexpr int64_t kAheadSteps = 2;  // steps between the expansion of weights and their product
constexpr int64_t kRingSteps = 4;   // expanded steps of a panel that are kept when one tile of tokens needs them

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

// The hardware threads of a core seem to share 16 tile registers: eight names for each, and what one thread leaves
// unused the other can rename. With eight in use by each, every load and product waits for the one before, and a step
// takes four times as long when the other thread is busy, even with other work (docs/cpu_kernels.md). So few names are
// used. Products into the same sum follow each other every 16 cycles, so that there is no need for more sums.
//   One tile of tokens:  0-1 sums of two panels, 2-3 activations (high, low), 4 weights: five.
//   Two tiles of tokens: 0-1 and 2-3 sums, 4-5 weights of two panels, 6 activations: seven, for half the weight loads.
void configure(int64_t token_rows) {
  TileConfig config;
  for (int i = 0; i < 7; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i == 4 || i == 5 ? 16 : token_rows);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic says that it reads eight bytes
}

// 16 rows of 64 bytes. GCC's own intrinsic does not say that it reads memory: stores could move behind it.
template <int kTile>
inline void load_tile(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(kTile) : "memory");
}

// f16 that are zero or normal to bf16, x 2^-112.
inline __m512i to_bf16(__m512h values) {
  return _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(values), 3),
                          _mm512_set1_epi16(static_cast<short>(0x8fff)));
}

// Half of a weight tile, 16 columns (a block) of NVFP4, x 2^-109. `step` counts 32 columns from the start of the panel.
inline void expand_nvfp4(const uint8_t* panel, int64_t step, int half, uint8_t* tile) {
  // e2m1 x 2^-4 as f16
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0, 0x2800, 0x2c00, 0x2e00, 0x3000, 0x3200, 0x3400, 0x3600, static_cast<short>(0x8000), static_cast<short>(0xa800),
      static_cast<short>(0xac00), static_cast<short>(0xae00), static_cast<short>(0xb000), static_cast<short>(0xb200),
      static_cast<short>(0xb400), static_cast<short>(0xb600)));
  const uint8_t* group = panel + step / 2 * kGroupBytes;
  const uint8_t* scales = group + step % 2 * 32 + half * 16;
  const uint8_t* words = group + kGroupScales + step % 2 * 256 + half * 128;
  if (half == 0) Avx512::prefetch(scales + kPrefetch);
  Avx512::prefetch(words + kPrefetch);
  Avx512::prefetch(words + kPrefetch + 64);
  // Scale codes in both halves of each lane, as f16: the scale x 2^7.
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  const __m512h s = _mm512_castsi512_ph(_mm512_or_si512(_mm512_slli_epi32(bytes, 7), _mm512_slli_epi32(bytes, 23)));
#pragma GCC unroll 2
  for (int d = 0; d < 2; ++d) {
    const __m512i w = Avx512::load_words(words + d * 64);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i index = i == 0 ? w : _mm512_srli_epi16(w, 4 * static_cast<unsigned>(i));
      const __m512h product = _mm512_mul_ph(s, _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, table)));
      _mm512_store_si512(tile + ((half * 2 + d) * 4 + i) * 64, to_bf16(product));
    }
  }
}

// The same for FP8, x 2^-112.
inline void expand_fp8(const uint8_t* panel, int64_t step, int half, uint8_t* tile) {
  const __m512h factor = _mm512_castsi512_ph(_mm512_set1_epi16(0x5c00));  // 2^8
  const uint8_t* words = panel + step * 512 + half * 256;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Avx512::prefetch(words + i * 64 + kPrefetch);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      // Pairs of codes, each in the upper byte of 16 bits.
      const __m512i pairs =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i * 64 + part * 32)));
      const __m512i bytes = _mm512_or_si512(_mm512_slli_epi32(pairs, 16), _mm512_slli_epi16(pairs, 8));
      const __m512h value = _mm512_castsi512_ph(Avx512Weights::e4m3_to_f16(bytes));
      _mm512_store_si512(tile + ((half * 4 + i) * 2 + part) * 64, to_bf16(_mm512_mul_ph(value, factor)));
    }
  }
}

inline void expand(const Panel& panel, int64_t step, int half, uint8_t* tile) {
  if (panel.kind == Kind::kNvfp4) return expand_nvfp4(panel.words, step, half, tile);
  expand_fp8(panel.words, step, half, tile);
}

// Products of kTiles tiles of tokens, `stride` bytes apart, with a step of two panels. `beside(i)`, i = 0..3, is vector
// work for the meantime.
template <int kTiles, typename Beside>
inline void multiply_step(const uint8_t* a, int64_t stride, const uint8_t* b0, const uint8_t* b1,
                          const Beside& beside) {
  beside(0);
  if constexpr (kTiles == 1) {
    load_tile<2>(a);
    load_tile<4>(b0);
    _tile_dpbf16ps(0, 2, 4);
    beside(1);
    load_tile<3>(a + kTileBytes);
    _tile_dpbf16ps(0, 3, 4);
    beside(2);
    load_tile<4>(b1);
    _tile_dpbf16ps(1, 2, 4);
    beside(3);
    _tile_dpbf16ps(1, 3, 4);
  } else {
    load_tile<4>(b0);
    load_tile<5>(b1);
    load_tile<6>(a);
    _tile_dpbf16ps(0, 6, 4);
    beside(1);
    _tile_dpbf16ps(1, 6, 5);
    load_tile<6>(a + kTileBytes);
    _tile_dpbf16ps(0, 6, 4);
    beside(2);
    _tile_dpbf16ps(1, 6, 5);
    load_tile<6>(a + stride);
    _tile_dpbf16ps(2, 6, 4);
    beside(3);
    _tile_dpbf16ps(3, 6, 5);
    load_tile<6>(a + stride + kTileBytes);
    _tile_dpbf16ps(2, 6, 4);
    _tile_dpbf16ps(3, 6, 5);
  }
}

// Adds factor x scale x a tile of sums to the outputs.
inline void add_tile(const float* sums, const float* scale, float factor, int64_t rows, bool first, float* out) {
  const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(scale), _mm512_set1_ps(factor));
  for (int64_t t = 0; t < rows; ++t) {
    const __m512 sum = _mm512_load_ps(sums + t * 16);
    float* to = out + t * kPairRows;
    _mm512_storeu_ps(to, first ? _mm512_mul_ps(sum, s) : _mm512_fmadd_ps(sum, s, _mm512_loadu_ps(to)));
  }
}

// A product of two panels (one alone runs as a pair of the same, and the second result is dropped) with all tiles of
// tokens, in runs of columns with the same row scales. A last group with a step that is not whole is a run of its own.
class Product {
 public:
  Product(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch)
      : panels_(panels),
        count_(count),
        packed_(static_cast<const uint8_t*>(packed)),
        tile_stride_(padded_columns(panels[0].columns) / 32 * kPairBytes),
        tiles_(tile_count(tokens, kTileTokens)),
        scratch_(static_cast<uint8_t*>(scratch)),
        steps_only_(in_steps(panels[0].kind) && in_steps(panels[count - 1].kind)) {}

  void run(int64_t tokens, float* out) {
    const int64_t columns = panels_[0].columns;
    const int64_t rows = rows_of_tile(tokens);
    for (int64_t begin = 0, end = 0; begin < columns; begin = end) {
      end = columns;
      const float* scales[2] = {nullptr, nullptr};
      for (int p = 0; p < count_; ++p) {
        const int64_t segment = begin / panels_[p].segment;
        const int64_t segment_end = (segment + 1) * panels_[p].segment;
        if (segment_end < end) end = segment_end;
        scales[p] = panels_[p].row_scales + segment * panels_[p].row_scale_stride;
      }
      if (steps_only_ && (end - begin) % 32 != 0 && end - begin > kGroupColumns) end -= (end - begin) % kGroupColumns;
      const bool fused = steps_only_ && (end - begin) % 32 == 0;
      sum(begin, end, fused);
      for (int64_t i = 0; i < tiles_; ++i) {
        const int64_t t = i * rows;
        const int64_t n = tokens - t < rows ? tokens - t : rows;
        for (int p = 0; p < count_; ++p) {
          const float factor = !fused ? kPlainFactor : panels_[p].kind == Kind::kNvfp4 ? kNvfp4Factor : kFp8Factor;
          add_tile(sums_[i][p], scales[p], factor, n, begin == 0, out + t * kPairRows + p * kPanelRows);
        }
      }
    }
  }

 private:
  static bool in_steps(Kind kind) { return kind == Kind::kNvfp4 || kind == Kind::kFp8; }
  uint8_t* expanded(int p, int64_t s) const { return scratch_ + (p * kPieceSteps + s) * kTileBytes; }

  // The sums of a run. Fused: whole steps of NVFP4 and FP8, expanded while the first tiles of tokens run. Up to two
  // tiles run at once; then an expanded step is used once, and a short ring of them will do.
  void sum(int64_t begin, int64_t end, bool fused) {
    const bool ring = fused && tiles_ <= 2;
    wrap_ = ring ? kRingSteps - 1 : kPieceSteps - 1;
    const int64_t last = (end + 31) / 32;
    for (step_ = begin / 32; step_ < last; step_ += steps_) {
      steps_ = ring || last - step_ < kPieceSteps ? last - step_ : kPieceSteps;
      const bool fresh = step_ == begin / 32;
      for (int p = 0; p < count_; ++p) {
        weights_[p] = expanded(p, 0);
        if (!fused) {
          const int64_t piece_end = (step_ + steps_) * 32;
          weights_[p] = bf16_piece(panels_[p], step_ * 32, piece_end < end ? piece_end : end, expanded(p, 0));
          continue;
        }
        for (int64_t s = 0; s < steps_ && s < kAheadSteps; ++s) {
          expand(panels_[p], step_ + s, 0, expanded(p, s));
          expand(panels_[p], step_ + s, 1, expanded(p, s));
        }
      }
      if (tiles_ == 2) {
        multiply<2>(0, fused, fresh);
      } else {
        for (int64_t i = 0; i < tiles_; ++i) multiply<1>(i, fused && i == 0, fresh);
      }
    }
  }

  // Steps [step_, step_ + steps_) of tiles first, ..., first + kTiles - 1 of tokens.
  template <int kTiles>
  void multiply(int64_t first, bool expanding, bool fresh) {
    const uint8_t* a = packed_ + first * tile_stride_ + step_ * kPairBytes;
    const uint8_t* b[2] = {weights_[0], weights_[count_ - 1]};
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      load_tile<0>(sums_[first][0]);
      load_tile<1>(sums_[first][1]);
    }
    if constexpr (kTiles == 2) {
      if (fresh) {
        _tile_zero(2);
        _tile_zero(3);
      } else {
        load_tile<2>(sums_[first + 1][0]);
        load_tile<3>(sums_[first + 1][1]);
      }
    }
    int64_t s = 0;
    if (expanding) {
      for (; s < steps_ - kAheadSteps; ++s, a += kPairBytes) {
        const int64_t next = s + kAheadSteps;
        const auto beside = [&](int quarter) __attribute__((always_inline)) {
          const int p = quarter / 2;
          if (p < count_) expand(panels_[p], step_ + next, quarter % 2, expanded(p, next & wrap_));
        };
        const int64_t at = (s & wrap_) * kTileBytes;
        multiply_step<kTiles>(a, tile_stride_, b[0] + at, b[1] + at, beside);
      }
    }
    // What lies in the panels themselves comes from memory: each tile fetches its share of the next piece's lines.
    const bool fetch = b[0] != expanded(0, 0);
    for (; s < steps_; ++s, a += kPairBytes) {
      const int64_t at = (s & wrap_) * kTileBytes;
      if (fetch) {
        for (int64_t line = first; line < kTileBytes / 64; line += tiles_ / kTiles) {
          Avx512::prefetch(b[0] + at + kPieceSteps * kTileBytes + line * 64);
          Avx512::prefetch(b[1] + at + kPieceSteps * kTileBytes + line * 64);
        }
      }
      multiply_step<kTiles>(a, tile_stride_, b[0] + at, b[1] + at, [](int) {});
    }
    _tile_stored(0, sums_[first][0], 64);
    _tile_stored(1, sums_[first][1], 64);
    if constexpr (kTiles == 2) {
      _tile_stored(2, sums_[first + 1][0], 64);
      _tile_stored(3, sums_[first + 1][1], 64);
    }
  }

  const Panel* panels_;
  int count_;
  const uint8_t* packed_;
  int64_t tile_stride_;  // bytes from one packed tile of tokens to the next
  int64_t tiles_;
  uint8_t* scratch_;  // expanded weights: [2][kPieceSteps] tiles
  bool steps_only_;
  // The piece at work: where its steps begin, how many, where their weights are; step & wrap_ is the place of a step.
  int64_t step_ = 0;
  int64_t steps_ = 0;
  int64_t wrap_ = 0;
  const uint8_t* weights_[2];
  alignas(64) float sums_[kMostTiles][2][16 * 16];
};

void gemm_amx(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  configure(rows_of_tile(tokens));
  Product(panels, count, packed, tokens, scratch).run(tokens, out);
  _tile_release();
}

}  // namespace

const KernelTable* amx_kernels() {
  // The rest comes from the AVX-512 files.
  static constexpr KernelTable kernels = {
      .name = "amx",
      .gemv_limit = 4,
      .quantize = nullptr,
      .gemv_nvfp4 = nullptr,
      .gemv_float = nullptr,
      .packed_bytes = packed_bytes,
      .pack = pack,
      .gemm = gemm_amx,
      .gemm_scratch = 2 * kPieceSteps * kTileBytes,
      .gemm_tokens = 128,
      .gemm_kinds = kBf16Kinds,
      .swiglu = nullptr,
      .axpy = nullptr,
  };
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* amx_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
