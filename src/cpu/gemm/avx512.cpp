// Kernels for AVX-512 F, BW, DQ and VL: as avx2.cpp, with a whole panel in a vector.
#include "cpu/gemm/layout.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

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
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i ones = _mm512_set1_epi16(1);
  const __m512i weight_hi = _mm512_set1_epi16(256);
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
    const __m512i w0 = _mm512_shuffle_epi8(table, _mm512_and_si512(v0, nibble));
    const __m512i w1 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v0, 4), nibble));
    const __m512i w2 = _mm512_shuffle_epi8(table, _mm512_and_si512(v1, nibble));
    const __m512i w3 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v1, 4), nibble));
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
      const ActivationBlock& block = x[t][b];
      const auto plane = [&](const int8_t* q) __attribute__((always_inline)) {
        return _mm512_add_epi16(
            _mm512_add_epi16(_mm512_maddubs_epi16(w0, spread(q)), _mm512_maddubs_epi16(w1, spread(q + 4))),
            _mm512_add_epi16(_mm512_maddubs_epi16(w2, spread(q + 8)), _mm512_maddubs_epi16(w3, spread(q + 12))));
      };
      const __m512i sum =
          _mm512_add_epi32(_mm512_madd_epi16(plane(block.hi), weight_hi), _mm512_madd_epi16(plane(block.lo), ones));
      const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(block.correction)));
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

const KernelTable* avx512_kernels() {
  static constexpr KernelTable kernels = {
      "avx512",
      8,
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
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
