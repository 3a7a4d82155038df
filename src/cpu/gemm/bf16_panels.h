// Panels as bf16 pairs [columns / 2, 16 rows, 2], the weight operand of AMX; unnamed namespace, see
// float_kernels.h. Exact for NVFP4 (e2m1 x e4m3 has at most 6 significant bits), e4m3 and bf16.
#pragma once

#include "cpu/gemm/avx512_weights.h"
#include "cpu/gemm/float_kernels.h"

namespace fourfold::cpu::gemm {
namespace {

// Two exact bf16 values as fp32 to a pair: the low halves are zero.
inline __m512i pair_bf16(__m512 even, __m512 odd) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

// Blocks [0, blocks) of NVFP4, `group` the start of a group.
inline void expand_nvfp4_pairs(const uint8_t* group, int64_t blocks, uint8_t* out) {
  const __m512 table = Avx512Weights::e2m1_values();
#pragma GCC unroll 4
  for (int64_t b = 0; b < blocks; ++b, out += 512) {
    const uint8_t* scales = group + b % 4 * 16;
    const uint8_t* words = group + kGroupScales + b % 4 * 128;
    Avx512::prefetch(words + kPrefetch);
    Avx512::prefetch(words + kPrefetch + 64);
    if (b % 4 == 0) Avx512::prefetch(scales + kPrefetch);
    if (b % 4 == 3) group += kGroupBytes;
    const __m512 s = _mm512_mul_ps(Avx512Weights::block_scales(scales), _mm512_set1_ps(kBlockScale));
    const __m512i w[2] = {Avx512::load_words(words), Avx512::load_words(words + 64)};
#pragma GCC unroll 2
    for (int d = 0; d < 2; ++d) {
#pragma GCC unroll 4
      for (unsigned i = 0; i < 4; ++i) {  // nibbles i and i + 4: columns 2 i and 2 i + 1
        const __m512i even = i == 0 ? w[d] : _mm512_srli_epi32(w[d], 4 * i);
        const __m512i odd = _mm512_srli_epi32(w[d], 4 * i + 16);
        _mm512_store_si512(out + (d * 4 + static_cast<int>(i)) * 64,
                           pair_bf16(_mm512_mul_ps(s, _mm512_permutexvar_ps(even, table)),
                                     _mm512_mul_ps(s, _mm512_permutexvar_ps(odd, table))));
      }
    }
  }
}

// Columns [begin, end), padded with zeros to a multiple of 32: either in the panel itself or expanded to `scratch`.
inline const uint8_t* bf16_piece(const Panel& panel, int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t n = end - begin;
  const int64_t padded = padded_columns(n);
  int64_t pairs = 0;
  switch (panel.kind) {
    case Kind::kNvfp4:
      expand_nvfp4_pairs(panel.words + begin / kGroupColumns * kGroupBytes, n / kBlockColumns, scratch);
      pairs = n / 2;
      break;
    case Kind::kFp8: {
      const uint8_t* words = panel.words + begin / 4 * 64;
      const int64_t count = (n + 3) / 4;
      for (int64_t w = 0; w < count; ++w) {
        __m512 value[4][1];
        Avx512Weights::expand_fp8(Avx512::load_words(words + w * 64), value);
        _mm512_store_si512(scratch + w * 128, pair_bf16(value[0][0], value[1][0]));
        _mm512_store_si512(scratch + w * 128 + 64, pair_bf16(value[2][0], value[3][0]));
      }
      pairs = 2 * count;
      break;
    }
    default: {  // bf16
      const uint8_t* words = panel.words + begin / 2 * 64;
      if (padded == n) return words;
      pairs = (n + 1) / 2;
      for (int64_t w = 0; w < pairs; ++w) _mm512_store_si512(scratch + w * 64, Avx512::load_words(words + w * 64));
      break;
    }
  }
  for (; pairs < padded / 2; ++pairs) _mm512_store_si512(scratch + pairs * 64, _mm512_setzero_si512());
  return scratch;
}

// Columns [k, k + 16) of a row; zeros behind its end.
inline __m512 load_columns(const float* x, int64_t k, int64_t columns) {
  const int64_t left = columns - k;
  const __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
  return _mm512_maskz_loadu_ps(mask, x + k);
}

}  // namespace
}  // namespace fourfold::cpu::gemm
