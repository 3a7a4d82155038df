// AVX2 with AVX-VNNI, as processors without AVX-512 have it since 2021: vpdpbusd takes the place of vpmaddubsw and the
// additions after it, 60 instructions for 256 weights instead of 84.
#include "cpu/gemm/layout.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)

#include "cpu/gemm/avx2_integers.h"

namespace fourfold::cpu::gemm {
namespace {

struct Vnni {
  static constexpr int kPairTokens = 1;

  // The codes of 8 rows x 16 columns are decoded once and meet every token.
  template <int M, class Fetch>
  __attribute__((always_inline)) static inline void run(const ActivationBlock* const* x, int64_t b,
                                                        const uint8_t* scales, const uint8_t* words, __m256 (*acc)[2],
                                                        const Fetch& fetch) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i v0 = Avx2::load_words(words + h * 32), v1 = Avx2::load_words(words + 64 + h * 32);
      const __m256i w[4] = {low(v0), high(v0), low(v1), high(v1)};
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) {
        const ActivationBlock& block = x[t][b];
        __m256i hi = _mm256_setzero_si256(), lo = _mm256_set1_epi32(block.correction);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
          hi = _mm256_dpbusd_avx_epi32(hi, w[g], spread(block.hi + 4 * g));
          lo = _mm256_dpbusd_avx_epi32(lo, w[g], spread(block.lo + 4 * g));
          if (t == 0 && g % 2 == 1) {
            __asm__ volatile("" : "+x"(hi), "+x"(lo));  // keeps products and prefetches in turns
            fetch(2 * h + g / 2);
          }
        }
        acc[t][h] = add_block(_mm256_add_epi32(_mm256_slli_epi32(hi, 8), lo), block, scales + h * 8, acc[t][h]);
      }
    }
  }
};

}  // namespace

const KernelTable* avxvnni_kernels() {
  static constexpr KernelTable kernels = avx2_table<Vnni>("avxvnni");
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avxvnni_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
