// What the AVX2 sources with and without AVX-VNNI share; unnamed namespace, see float_kernels.h.
#pragma once

#include "cpu/gemm/avx2_weights.h"
#include "cpu/gemm/dot_nvfp4.h"
#include "cpu/gemm/quantize_avx2.h"

namespace fourfold::cpu::gemm {
namespace {

inline __m256i spread(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm256_set1_epi32(word);
}

// Codes to the bytes 2 w + 12.
inline __m256i look_up(__m256i codes) {
  const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                         12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(table, codes);
}
inline __m256i low(__m256i v) { return look_up(_mm256_and_si256(v, _mm256_set1_epi8(15))); }
inline __m256i high(__m256i v) { return look_up(_mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))); }

// Adds the exact sums of a block of 8 rows to `acc`.
inline __m256 add_block(__m256i sum, const ActivationBlock& block, const uint8_t* scales, __m256 acc) {
  const __m256 scale = _mm256_mul_ps(Avx2Weights::block_scales(scales), _mm256_set1_ps(block.scale));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc);
}

template <class Block>
constexpr KernelTable avx2_table(const char* name) {
  return float_table<Avx2Weights>(name, 8, quantize_activations, gemv_nvfp4<DotNvfp4<Avx2Weights, Block>>);
}

}  // namespace
}  // namespace fourfold::cpu::gemm
