// AVX-512 with VNNI and VBMI: vpdpbusd sums four products into 32 bits, and a byte permute looks up codes without
// masking them first (it reads six bits of each byte; the table of sixteen is repeated four times).
#include "cpu/gemm/layout.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#include "cpu/gemm/avx512_vector.h"

namespace fourfold::cpu::gemm {
namespace {

#include "cpu/gemm/quantize_avx2.inc"

inline __m512i spread(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm512_set1_epi32(word);
}

template <int M>
void dot_nvfp4(const Panel& panel, const ActivationBlock* const* x, float* out) {
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const int64_t blocks = panel.columns / kBlockColumns;
  const uint8_t* group = panel.words;
  __m512 acc[M];
#pragma GCC unroll 4
  for (int t = 0; t < M; ++t) acc[t] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* scales = group + b % 4 * 16;
    const uint8_t* words = group + kGroupScales + b % 4 * 128;
    if (b % 4 == 0) Avx512::prefetch(scales + kPrefetch);
    if (b % 4 == 3) group += kGroupBytes;
    Avx512::prefetch(words + kPrefetch);
    Avx512::prefetch(words + kPrefetch + 64);
    const __m512 scale = Avx512::block_scales(scales);
    const __m512i v0 = Avx512::load_words(words), v1 = Avx512::load_words(words + 64);
    const __m512i w0 = _mm512_permutexvar_epi8(v0, table);
    const __m512i w1 = _mm512_permutexvar_epi8(_mm512_srli_epi16(v0, 4), table);
    const __m512i w2 = _mm512_permutexvar_epi8(v1, table);
    const __m512i w3 = _mm512_permutexvar_epi8(_mm512_srli_epi16(v1, 4), table);
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
      const ActivationBlock& block = x[t][b];
      // Two short chains for each plane instead of one of four.
      const __m512i zero = _mm512_setzero_si512();
      const __m512i hi = _mm512_add_epi32(
          _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, w0, spread(block.hi)), w1, spread(block.hi + 4)),
          _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, w2, spread(block.hi + 8)), w3, spread(block.hi + 12)));
      __m512i lo = _mm512_dpbusd_epi32(_mm512_slli_epi32(hi, 8), w0, spread(block.lo));
      lo = _mm512_dpbusd_epi32(lo, w1, spread(block.lo + 4));
      lo = _mm512_dpbusd_epi32(lo, w2, spread(block.lo + 8));
      lo = _mm512_dpbusd_epi32(lo, w3, spread(block.lo + 12));
      const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(lo, _mm512_set1_epi32(block.correction)));
      acc[t] = _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(block.scale)), acc[t]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < M; ++t) {
    const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(panel.row_scales), _mm512_set1_ps(kDotScale));
    _mm512_storeu_ps(out + t * kPanelRows, _mm512_mul_ps(acc[t], scale));
  }
}

void gemv_nvfp4(const Panel& panel, const ActivationBlock* const* x, int tokens, float* out) {
  switch (tokens) {
    case 1:
      return dot_nvfp4<1>(panel, x, out);
    case 2:
      return dot_nvfp4<2>(panel, x, out);
    case 3:
      return dot_nvfp4<3>(panel, x, out);
    default:
      return dot_nvfp4<4>(panel, x, out);
  }
}

}  // namespace

const KernelTable* avx512vnni_kernels() {
  static constexpr KernelTable kernels = {
      "avx512vnni",
      12,
      quantize_activations,
      gemv_nvfp4,
      gemv_float<Avx512>,
      packed_bytes_f32,
      pack_f32<12>,
      gemm_f32<Avx512, 12>,
      2 * kPieceF32 * kPanelRows * 4,
      true,
      swiglu<Avx512>,
      axpy<Avx512>,
  };
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx512vnni_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
