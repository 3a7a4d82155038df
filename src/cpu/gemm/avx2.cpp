// KernelTable for AVX2 with FMA and F16C.
//
// NVFP4 with few tokens runs on integers: a code becomes the byte 2 w + 12 by one table look-up, vpmaddubsw multiplies
// it with each of the two signed bytes of a 16-bit activation, the 8 products of a lane fit 16 bits
// (8 x 24 x 128 = 24576), and one conversion to fp32 a block of 16 columns meets the block scale. NVFP4 with many
// tokens, and all other kinds, run on fp32 (float_kernels.h).
#include "cpu/gemm/layout.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "cpu/gemm/float_kernels.h"

namespace fourfold::cpu::gemm {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 2;

  static inline I load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static inline F load(const float* p) { return _mm256_loadu_ps(p); }
  static inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static inline F zero() { return _mm256_setzero_ps(); }
  static inline F set(float v) { return _mm256_set1_ps(v); }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
  static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
  static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // p x 2^n for n from -126 to 127
  static inline F scale(F p, F n) {
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(e));
  }

  static inline void expand_f32(I w, F* out) { out[0] = _mm256_castsi256_ps(w); }
  static inline void expand_bf16(I w, F* out) {
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // 16-bit halves of the lanes, sorted into all low ones and all high ones.
  static inline I split_halves(I w) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(w, order), 0b11011000);
  }
  static inline void expand_f16(I w, F* out) {
    const __m256i halves = split_halves(w);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
  // An e4m3 code moved to the exponent and mantissa of an f16 is its value x 2^-8, subnormals included.
  static inline I e4m3_to_f16(I bytes) {
    return _mm256_or_si256(
        _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(0x3f80)),
        _mm256_and_si256(_mm256_slli_epi16(bytes, 8), _mm256_set1_epi16(static_cast<short>(0x8000))));
  }
  static inline void expand_fp8(I w, F* out) {
    const __m256i even = split_halves(e4m3_to_f16(w));
    const __m256i odd = split_halves(e4m3_to_f16(_mm256_srli_epi16(w, 8)));
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
    out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
    out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
    out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
  }

  // Block scales of 8 rows x 2^-105.
  static inline F block_scales(const uint8_t* scales) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 20));
  }

  // Blocks of NVFP4 to out[k][16] = e2m1 x block scale, exact.
  static inline void expand_nvfp4(const uint8_t* group, int64_t blocks, float* out) {
    const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,  //
                                           0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i top = _mm256_set1_epi32(static_cast<int>(0xff000000u));
    // A byte in the top of a lane counts 2^24, and codes are doubled.
    const __m256 unit = _mm256_set1_ps(kBlockScale * 0x1p-25f);
    for (int64_t b = 0; b < blocks; ++b, out += 256) {
      const uint8_t* scales = group + b / 4 * kGroupBytes + b % 4 * 16;
      const uint8_t* words = group + b / 4 * kGroupBytes + kGroupScales + b % 4 * 128;
      prefetch(words + kPrefetch);
      prefetch(words + kPrefetch + 64);
      if (b % 4 == 0) prefetch(scales + kPrefetch);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256 s = _mm256_mul_ps(block_scales(scales + h * 8), unit);
        const auto put = [&](__m256i lane, int k) __attribute__((always_inline)) {
          _mm256_store_ps(out + k * 16 + h * 8, _mm256_mul_ps(s, _mm256_cvtepi32_ps(lane)));
        };
        const auto emit = [&](__m256i bytes, int k) __attribute__((always_inline)) {  // columns k, k+4, k+1, k+5
          put(_mm256_slli_epi32(bytes, 24), k);
          put(_mm256_and_si256(_mm256_slli_epi32(bytes, 16), top), k + 4);
          put(_mm256_and_si256(_mm256_slli_epi32(bytes, 8), top), k + 1);
          put(_mm256_and_si256(bytes, top), k + 5);
        };
#pragma GCC unroll 2
        for (int d = 0; d < 2; ++d) {
          const __m256i w = load_words(words + d * 64 + h * 32);
          emit(_mm256_shuffle_epi8(table, _mm256_and_si256(w, nibble)), d * 8);
          emit(_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble)), d * 8 + 2);
        }
      }
    }
  }
};

inline __m256i spread(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm256_set1_epi32(word);
}

// Keeps the compiler from moving work across: it would start all products at once and spill them.
#define FOURFOLD_PIN4(a, b, c, d) __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d))
#define FOURFOLD_PIN2(a, b) __asm__("" : "+x"(a), "+x"(b))

// M tokens; the codes of 8 rows x 16 columns are decoded once and meet every token. What binds one token is the number
// of instructions (84 for 256 weights), so whole groups are unrolled.
struct DotNvfp4 {
  static constexpr int kPairTokens = 1;

  static inline __m256i low(__m256i v) { return look_up(_mm256_and_si256(v, _mm256_set1_epi8(15))); }
  static inline __m256i high(__m256i v) {
    return look_up(_mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)));
  }
  static inline __m256i look_up(__m256i codes) {
    const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                           12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(table, codes);
  }

  // Adds a finished block of 8 rows to `acc`.
  static inline __m256 finish(__m256i sum_hi, __m256i sum_lo, const ActivationBlock& block, const uint8_t* scales,
                              __m256 acc) {
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(sum_hi, _mm256_set1_epi16(256)),
                                         _mm256_madd_epi16(sum_lo, _mm256_set1_epi16(1)));
    const __m256 value = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, _mm256_set1_epi32(block.correction)));
    return _mm256_fmadd_ps(value, _mm256_mul_ps(Avx2::block_scales(scales), _mm256_set1_ps(block.scale)), acc);
  }

  // One block and one token, both halves of the panel at once: activations are loaded once.
  __attribute__((always_inline)) static inline void block_one(const ActivationBlock& block, const uint8_t* scales,
                                                              const uint8_t* words, __m256* acc) {
    __m256i hi[2], lo[2];
    const auto step = [&](int g, __m256i w0, __m256i w1) __attribute__((always_inline)) {
      const __m256i x_hi = spread(block.hi + 4 * g), x_lo = spread(block.lo + 4 * g);
      const __m256i h0 = _mm256_maddubs_epi16(w0, x_hi), l0 = _mm256_maddubs_epi16(w0, x_lo);
      const __m256i h1 = _mm256_maddubs_epi16(w1, x_hi), l1 = _mm256_maddubs_epi16(w1, x_lo);
      hi[0] = g == 0 ? h0 : _mm256_add_epi16(hi[0], h0);
      hi[1] = g == 0 ? h1 : _mm256_add_epi16(hi[1], h1);
      lo[0] = g == 0 ? l0 : _mm256_add_epi16(lo[0], l0);
      lo[1] = g == 0 ? l1 : _mm256_add_epi16(lo[1], l1);
      FOURFOLD_PIN4(hi[0], hi[1], lo[0], lo[1]);
    };
#pragma GCC unroll 2
    for (int d = 0; d < 2; ++d) {
      __m256i v0 = Avx2::load_words(words + d * 64), v1 = Avx2::load_words(words + d * 64 + 32);
      FOURFOLD_PIN2(v0, v1);  // else they are loaded twice
      step(2 * d, low(v0), low(v1));
      step(2 * d + 1, high(v0), high(v1));
    }
    acc[0] = finish(hi[0], lo[0], block, scales, acc[0]);
    acc[1] = finish(hi[1], lo[1], block, scales + 8, acc[1]);
    FOURFOLD_PIN2(acc[0], acc[1]);
  }

  template <int M>
  static inline void block_many(const ActivationBlock* const* x, int64_t b, const uint8_t* scales, const uint8_t* words,
                                __m256 (*acc)[2]) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i v0 = Avx2::load_words(words + h * 32), v1 = Avx2::load_words(words + 64 + h * 32);
      __m256i w0 = low(v0), w1 = high(v0), w2 = low(v1), w3 = high(v1);
      FOURFOLD_PIN4(w0, w1, w2, w3);
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) {
        const ActivationBlock& block = x[t][b];
        const auto plane = [&](const int8_t* q) __attribute__((always_inline)) {
          return _mm256_add_epi16(
              _mm256_add_epi16(_mm256_maddubs_epi16(w0, spread(q)), _mm256_maddubs_epi16(w1, spread(q + 4))),
              _mm256_add_epi16(_mm256_maddubs_epi16(w2, spread(q + 8)), _mm256_maddubs_epi16(w3, spread(q + 12))));
        };
        const __m256i sum_hi = plane(block.hi), sum_lo = plane(block.lo);
        acc[t][h] = finish(sum_hi, sum_lo, block, scales + h * 8, acc[t][h]);
      }
    }
  }

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
    const auto block = [&](int p, int64_t b, int64_t i) __attribute__((always_inline)) {
      const uint8_t* group = panels[p].words + at;
      const uint8_t* words = group + kGroupScales + i * 128;
      if constexpr (M == 1) {
        block_one(x[0][b], group + i * 16, words, acc[p][0]);
      } else {
        block_many<M>(x, b, group + i * 16, words, acc[p]);
      }
    };
    int64_t b = 0;
    for (; b + 4 <= blocks; b += 4, at += kGroupBytes) {
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        const uint8_t* fetch = fetch_address(panels[p], panels[p].words + at, panels[p].words + bytes);
#pragma GCC unroll 9
        for (int i = 0; i < kGroupBytes; i += 64) Avx2::prefetch(fetch + i);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) block(p, b + i, i);
      }
    }
    for (int64_t i = 0; b + i < blocks; ++i) {
      for (int p = 0; p < P; ++p) block(p, b + i, i);
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

#include "cpu/gemm/quantize_avx2.inc"

}  // namespace

const KernelTable* avx2_kernels() {
  static constexpr KernelTable kernels = {
      "avx2",           8,           quantize_activations, gemv_nvfp4<DotNvfp4>,       gemv_float<Avx2>,
      packed_bytes_f32, pack_f32<6>, gemm_f32<Avx2, 6>,    kPieceF32 * kPanelRows * 4, kAllKinds,
      swiglu<Avx2>,     axpy<Avx2>,
  };
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
