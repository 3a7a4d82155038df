// AVX-512 with VNNI and VBMI: vpdpbusd sums four products into 32 bits, and a byte permute looks up codes without
// masking them first (it reads six bits of each byte; the table of sixteen is repeated four times).
#include "cpu/gemm/layout.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#include "cpu/gemm/avx512_dot.h"

namespace fourfold::cpu::gemm {
namespace {

struct Vnni {
  static inline __m512i low(__m512i v) { return _mm512_permutexvar_epi8(v, code_table()); }
  static inline __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }
  static inline __m512i sum(const __m512i* w, const ActivationBlock& block) {
    // Two short chains for the high plane instead of one of four.
    const __m512i zero = _mm512_setzero_si512();
    const __m512i hi = _mm512_add_epi32(
        _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, w[0], spread(block.hi)), w[1], spread(block.hi + 4)),
        _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, w[2], spread(block.hi + 8)), w[3], spread(block.hi + 12)));
    __m512i lo = _mm512_dpbusd_epi32(_mm512_slli_epi32(hi, 8), w[0], spread(block.lo));
    lo = _mm512_dpbusd_epi32(lo, w[1], spread(block.lo + 4));
    lo = _mm512_dpbusd_epi32(lo, w[2], spread(block.lo + 8));
    return _mm512_dpbusd_epi32(lo, w[3], spread(block.lo + 12));
  }
};

}  // namespace

const KernelTable* avx512vnni_kernels() {
  static constexpr KernelTable kernels = avx512_table<Vnni>("avx512vnni", 12);
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx512vnni_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
