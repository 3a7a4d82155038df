// Kernels for AVX-512 F, BW, DQ and VL: as avx2.cpp, with a whole panel in a vector.
#include "cpu/gemm/layout.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/gemm/avx512_integers.h"

namespace fourfold::cpu::gemm {
namespace {

struct Madd {
  static inline __m512i low(__m512i v) {
    return _mm512_shuffle_epi8(code_table(), _mm512_and_si512(v, _mm512_set1_epi8(15)));
  }
  static inline __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }
  template <class Fetch>
  __attribute__((always_inline)) static inline __m512i sum(const __m512i* w, const ActivationBlock& block,
                                                           const Fetch& fetch) {
    __m512i hi, lo;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m512i h = _mm512_maddubs_epi16(w[q], spread(block.hi + 4 * q));
      const __m512i l = _mm512_maddubs_epi16(w[q], spread(block.lo + 4 * q));
      hi = q == 0 ? h : _mm512_add_epi16(hi, h);
      lo = q == 0 ? l : _mm512_add_epi16(lo, l);
      __asm__ volatile("" : "+v"(hi), "+v"(lo));  // keeps products and prefetches in turns
      fetch(q);
    }
    const __m512i both =
        _mm512_add_epi32(_mm512_madd_epi16(hi, _mm512_set1_epi16(256)), _mm512_madd_epi16(lo, _mm512_set1_epi16(1)));
    return _mm512_add_epi32(both, _mm512_set1_epi32(block.correction));
  }
};

}  // namespace

const KernelTable* avx512_kernels() {
  static constexpr KernelTable kernels = avx512_table<Madd>("avx512", 8);
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
