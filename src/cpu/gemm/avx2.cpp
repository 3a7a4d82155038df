// KernelTable for AVX2 with FMA and F16C.
//
// NVFP4 with few tokens runs on integers: a code becomes the byte 2 w + 12 by one table look-up, vpmaddubsw multiplies
// it with each of the two signed bytes of a 16-bit activation, the 8 products of a lane fit 16 bits
// (8 x 24 x 128 = 24576), and one conversion to fp32 a block of 16 columns meets the block scale. NVFP4 with many
// tokens, and all other kinds, run on fp32 (float_kernels.h).
#include "cpu/gemm/layout.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "cpu/gemm/avx2_integers.h"

namespace fourfold::cpu::gemm {
namespace {

// Keeps the compiler from moving work across: it would start all products at once and spill them.
#define FOURFOLD_PIN4(a, b, c, d) __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d))
#define FOURFOLD_PIN2(a, b) __asm__("" : "+x"(a), "+x"(b))

// M tokens; the codes of 8 rows x 16 columns are decoded once and meet every token. What binds one token is the number
// of instructions (84 for 256 weights), so whole groups are unrolled.
struct Madd {
  static constexpr int kPairTokens = 1;

  static inline __m256 finish(__m256i sum_hi, __m256i sum_lo, const ActivationBlock& block, const uint8_t* scales,
                              __m256 acc) {
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(sum_hi, _mm256_set1_epi16(256)),
                                         _mm256_madd_epi16(sum_lo, _mm256_set1_epi16(1)));
    return add_block(_mm256_add_epi32(sum, _mm256_set1_epi32(block.correction)), block, scales, acc);
  }

  // One block and one token, both halves of the panel at once: activations are loaded once.
  template <class Fetch>
  __attribute__((always_inline)) static inline void block_one(const ActivationBlock& block, const uint8_t* scales,
                                                              const uint8_t* words, __m256* acc, const Fetch& fetch) {
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
      fetch(g);
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

  template <int M, class Fetch>
  static inline void block_many(const ActivationBlock* const* x, int64_t b, const uint8_t* scales, const uint8_t* words,
                                __m256 (*acc)[2], const Fetch& fetch) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      fetch(2 * h);
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
        if (t == 0) fetch(2 * h + 1);
      }
    }
  }

  template <int M, class Fetch>
  __attribute__((always_inline)) static inline void run(const ActivationBlock* const* x, int64_t b,
                                                        const uint8_t* scales, const uint8_t* words, __m256 (*acc)[2],
                                                        const Fetch& fetch) {
    if constexpr (M == 1) {
      block_one(x[0][b], scales, words, acc[0], fetch);
    } else {
      block_many<M>(x, b, scales, words, acc, fetch);
    }
  }
};

}  // namespace

const KernelTable* avx2_kernels() {
  static constexpr KernelTable kernels = avx2_table<Madd>("avx2");
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
