// AVX2 with AVX-VNNI, as processors without AVX-512 have it since 2021: vpdpbusd takes the place of vpmaddubsw and the
// additions after it, 60 instructions for 256 weights instead of 84.
#include "cpu/gemm/layout.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)

#include "cpu/gemm/avx2_dot.h"

namespace fourfold::cpu::gemm {
namespace {

struct Vnni {
  // The codes of 8 rows x 16 columns are decoded once and meet every token.
  template <int M>
  __attribute__((always_inline)) static inline void run(const ActivationBlock* const* x, int64_t b,
                                                        const uint8_t* scales, const uint8_t* words, __m256 (*acc)[2]) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i v0 = Avx2::load_words(words + h * 32), v1 = Avx2::load_words(words + 64 + h * 32);
      const __m256i w[4] = {low(v0), high(v0), low(v1), high(v1)};
#pragma GCC unroll 4
      for (int t = 0; t < M; ++t) {
        const ActivationBlock& block = x[t][b];
        const auto plane = [&](__m256i sum, const int8_t* q) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int g = 0; g < 4; ++g) sum = _mm256_dpbusd_avx_epi32(sum, w[g], spread(q + 4 * g));
          return sum;
        };
        const __m256i hi = plane(_mm256_setzero_si256(), block.hi);
        const __m256i lo = plane(_mm256_set1_epi32(block.correction), block.lo);
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
