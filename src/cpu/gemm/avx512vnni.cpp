// AVX-512 with VNNI and VBMI.
//
// Few tokens: vpdpbusd sums four products into 32 bits, and a byte permute looks up codes without masking them first
// (it reads six bits of each byte; the table of sixteen is repeated four times).
//
// Many tokens: vpdpwssd multiplies 16-bit integers, as fast as vdpbf16ps multiplies bf16 (Zen 4) or twice as fast
// (Intel), and both sides fit: weights are 2 w, activations integers with one step for each block of 16 columns
// (largest magnitude / kActivationSteps). The sum of a block is exact; its conversion to fp32 meets the block scale and
// the step. Integers, steps and the order of sums are those of the way for few tokens: the bits are the same.
#include "cpu/gemm/layout.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#include "cpu/gemm/avx512_integers.h"

namespace fourfold::cpu::gemm {
namespace {

struct Vnni {
  static inline __m512i low(__m512i v) { return _mm512_permutexvar_epi8(v, code_table()); }
  static inline __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }
  // sum + w x four activations. Written out, because for two panels compilers make one broadcast and two products of
  // it where the broadcast can be part of each product: every instruction less for a line of weights lets the processor
  // look further ahead in memory.
  static inline __m512i add(__m512i sum, __m512i w, const int8_t* four) {
    using Word [[gnu::may_alias]] = int32_t;
    __asm__ volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Word*>(four)));
    return sum;
  }
  template <class Fetch>
  __attribute__((always_inline)) static inline __m512i sum(const __m512i* w, const ActivationBlock& block,
                                                           const Fetch& fetch) {
    __m512i hi = _mm512_setzero_si512(), lo = _mm512_set1_epi32(block.correction);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      hi = add(hi, w[q], block.hi + 4 * q);
      lo = add(lo, w[q], block.lo + 4 * q);
      fetch(q);
    }
    return _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo);
  }
};

// ---- many tokens

constexpr int kTogether = 4;  // tokens whose sums are computed at once: eight chains with two panels

int64_t blocks_of(int64_t columns) { return (columns + kBlockColumns - 1) / kBlockColumns; }

// [blocks, tokens, 16] integers, then [blocks, tokens] steps x 2^40.
int64_t packed_bytes(int64_t tokens, int64_t columns) { return tokens * blocks_of(columns) * (32 + 4); }

void pack(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  const int64_t blocks = blocks_of(columns);
  auto* integers = static_cast<int16_t*>(packed);
  auto* steps = reinterpret_cast<float*>(integers + tokens * blocks * kBlockColumns);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t b = 0; b < blocks; ++b) {
      const __m512 value = _mm512_loadu_ps(x[t] + b * kBlockColumns);
      const float largest = _mm512_reduce_max_ps(_mm512_abs_ps(value));
      // x - x is 0 unless x is NaN or infinite.
      const bool bad = _mm512_cmp_ps_mask(_mm512_sub_ps(value, value), _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
      // Blocks below 2^-100 are zero: their step would leave the normal range.
      const bool zero = bad || largest < 0x1p-100f;
      const __m512 inverse = _mm512_set1_ps(zero ? 0.0f : kActivationSteps / largest);
      const __m512i q = _mm512_maskz_cvtps_epi32(bad ? 0 : 0xffff, _mm512_mul_ps(value, inverse));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(integers + (b * tokens + t) * kBlockColumns),
                          _mm512_cvtsepi32_epi16(q));
      steps[b * tokens + t] = bad    ? __builtin_nanf("")
                              : zero ? 0.0f
                                     : largest * (1.0f / kActivationSteps) * kActivationScale;
    }
  }
}

// The codes of a block as 2 w in 16 bits: out[i] has columns 2 i and 2 i + 1 of each row in its 32-bit lane. A permute
// of 16-bit lanes reads five bits of each; the table of sixteen is there twice.
inline void expand_block(const uint8_t* words, __m512i* out) {
  const __m512i table = _mm512_set_epi16(-12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0,  //
                                         -12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0);
#pragma GCC unroll 2
  for (int d = 0; d < 2; ++d) {
    const __m512i w = Avx512::load_words(words + d * 64);
    out[d * 4] = _mm512_permutexvar_epi16(w, table);
    out[d * 4 + 1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), table);
    out[d * 4 + 2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 8), table);
    out[d * 4 + 3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 12), table);
  }
}

// One block, T tokens, N panels: out[t][16 n ..] (+)= scales x step x the exact sum.
template <int T, int N>
inline void block_products(const int16_t* x, const float* steps, const __m512i (*w)[8], const __m512* scales,
                           bool first, float* out) {
  __m512i sums[T][N];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      int32_t pair;
      __builtin_memcpy(&pair, x + t * kBlockColumns + 2 * i, 4);
      const __m512i both = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        sums[t][n] = _mm512_dpwssd_epi32(i == 0 ? _mm512_setzero_si512() : sums[t][n], w[n][i], both);
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const __m512 step = _mm512_set1_ps(steps[t]);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* to = out + t * kPairRows + n * kPanelRows;
      const __m512 value = _mm512_cvtepi32_ps(sums[t][n]);
      const __m512 scale = _mm512_mul_ps(scales[n], step);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(value, scale, first ? _mm512_setzero_ps() : _mm512_loadu_ps(to)));
    }
  }
}

// Sums stay in `out`, which is in L1; each block of weights is expanded to registers once and meets all tokens.
template <int N>
void gemm_panels(const Panel* panels, const void* packed, int64_t tokens, float* out) {
  const int64_t blocks = panels[0].columns / kBlockColumns;
  const auto* x = static_cast<const int16_t*>(packed);
  const auto* steps = reinterpret_cast<const float*>(x + tokens * blocks * kBlockColumns);
  for (int64_t b = 0; b < blocks; ++b, x += tokens * kBlockColumns, steps += tokens) {
    __m512i w[N][8];
    __m512 scales[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const uint8_t* group = panels[n].words + b / 4 * kGroupBytes;
      const uint8_t* words = group + kGroupScales + b % 4 * 128;
      Avx512::prefetch(words + kPrefetch);
      Avx512::prefetch(words + kPrefetch + 64);
      if (b % 4 == 0) Avx512::prefetch(group + kPrefetch);
      scales[n] = Avx512Weights::block_scales(group + b % 4 * 16);
      expand_block(words, w[n]);
    }
    const bool first = b == 0;
    int64_t t = 0;
    for (; t + kTogether <= tokens; t += kTogether) {
      block_products<kTogether, N>(x + t * kBlockColumns, steps + t, w, scales, first, out + t * kPairRows);
    }
    const int16_t* rest = x + t * kBlockColumns;
    switch (tokens - t) {
      case 3:
        block_products<3, N>(rest, steps + t, w, scales, first, out + t * kPairRows);
        break;
      case 2:
        block_products<2, N>(rest, steps + t, w, scales, first, out + t * kPairRows);
        break;
      case 1:
        block_products<1, N>(rest, steps + t, w, scales, first, out + t * kPairRows);
        break;
      default:
        break;
    }
  }
  for (int n = 0; n < N; ++n) {
    const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(panels[n].row_scales), _mm512_set1_ps(kDotScale));
    for (int64_t t = 0; t < tokens; ++t) {
      float* to = out + t * kPairRows + n * kPanelRows;
      _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), scale));
    }
  }
}

void gemm_integers(const Panel* panels, int count, const void* packed, int64_t tokens, void*, float* out) {
  if (count == 2) return gemm_panels<2>(panels, packed, tokens, out);
  gemm_panels<1>(panels, packed, tokens, out);
}

constexpr KernelTable table() {
  KernelTable kernels = avx512_table<Vnni>("avx512vnni", 12);
  kernels.packed_bytes = packed_bytes;
  kernels.pack = pack;
  kernels.gemm = gemm_integers;
  kernels.gemm_scratch = 64;
  kernels.gemm_kinds = kind_bit(Kind::kNvfp4);
  return kernels;
}

}  // namespace

const KernelTable* avx512vnni_kernels() {
  static constexpr KernelTable kernels = table();
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* avx512vnni_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
