// bf16 and FP8 weights with many tokens by bfmmla, two rows of four bf16 numbers times two. Activations are two bf16
// parts, x = high + low with an error of 2^-17, as with AMX (amx.cpp); weights are exact.
#include "cpu/gemm/layout.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_DOTPROD)

#include "cpu/gemm/neon_dot.h"

namespace fourfold::cpu::gemm {
namespace {

constexpr int64_t kStep = 4;  // columns of a product
constexpr int64_t kRowPairs = kPanelRows / 2;
// Columns of a piece: 8 KiB of weights, beside which the activations that stream past stay in L1.
constexpr int64_t kPiece = 256;

// A step of two tokens.
struct PairStep {
  bfloat16_t high[2 * kStep];
  bfloat16_t low[2 * kStep];
};
// A step of a panel.
struct WeightStep {
  uint32_t pairs[kRowPairs][4];  // four columns of one row, then of the next
};

inline int64_t pairs_of(int64_t tokens) { return (tokens + 1) / 2; }

// [pairs of tokens, padded columns / 4] steps.
int64_t packed_bytes(int64_t tokens, int64_t columns) {
  return pairs_of(tokens) * padded_columns(columns) / kStep * static_cast<int64_t>(sizeof(PairStep));
}

// Four columns of a row, zeros behind its end.
inline float32x4_t load_columns(const float* x, int64_t k, int64_t columns) {
  if (k + kStep <= columns) return vld1q_f32(x + k);
  float rest[kStep] = {};
  for (int64_t i = k; i < columns; ++i) rest[i - k] = x[i];
  return vld1q_f32(rest);
}

inline float32x4_t as_float(bfloat16x4_t v) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_bf16(v), 16)); }

void pack(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  auto* out = static_cast<PairStep*>(packed);
  const int64_t padded = padded_columns(columns);
  for (int64_t p = 0; p < pairs_of(tokens); ++p) {
    for (int64_t k = 0; k < padded; k += kStep, ++out) {
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t t = 2 * p + i;
        const float32x4_t value = t < tokens ? load_columns(x[t], k, columns) : vdupq_n_f32(0.0f);
        const bfloat16x4_t high = vcvt_bf16_f32(value);
        vst1_bf16(out->high + i * kStep, high);
        vst1_bf16(out->low + i * kStep, vcvt_bf16_f32(vsubq_f32(value, as_float(high))));
      }
    }
  }
}

// Words of two columns, 16 rows each, to a step.
inline void put_step(const uint32x4_t* first, const uint32x4_t* second, WeightStep* out) {
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    vst1q_u32(out->pairs[2 * quad], vzip1q_u32(first[quad], second[quad]));
    vst1q_u32(out->pairs[2 * quad + 1], vzip2q_u32(first[quad], second[quad]));
  }
}

// 32 bytes of FP8, two columns of 16 rows, to words of bf16: an e4m3 number has nothing below the upper half of fp32.
inline void expand_fp8(const uint8_t* words, uint32x4_t* out) {
  Neon::F value[2][2];
  NeonWeights::expand_fp8(Neon::load_words(words), value);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const auto pair = [](float32x4_t even, float32x4_t odd) __attribute__((always_inline)) {
      return vsriq_n_u32(vreinterpretq_u32_f32(odd), vreinterpretq_u32_f32(even), 16);
    };
    out[2 * h] = pair(value[0][h].low, value[1][h].low);
    out[2 * h + 1] = pair(value[0][h].high, value[1][h].high);
  }
}

// Columns [begin, end), begin a multiple of 32, padded with zeros to whole steps; how many steps.
int64_t expand(const Panel& panel, int64_t begin, int64_t end, WeightStep* out) {
  const int64_t words = (panel.columns + 1) / 2;
  const int64_t steps = (end - begin + kStep - 1) / kStep;
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t word = begin / 2 + 2 * s;  // of two columns
    uint32x4_t first[4], second[4];
    if (panel.kind == Kind::kFp8) {
      const uint8_t* from = panel.words + word * 2 * kPanelRows;
      Neon::prefetch(from + kPrefetch);
      expand_fp8(from, first);
      expand_fp8(from + 2 * kPanelRows, second);
    } else {
      const uint8_t* from = panel.words + word * 4 * kPanelRows;
      Neon::prefetch(from + kPrefetch);
      Neon::prefetch(from + kPrefetch + 64);
#pragma GCC unroll 4
      for (int quad = 0; quad < 4; ++quad) {
        first[quad] = vreinterpretq_u32_u8(vld1q_u8(from + quad * 16));
        second[quad] = word + 1 < words ? vreinterpretq_u32_u8(vld1q_u8(from + 64 + quad * 16)) : vdupq_n_u32(0);
      }
    }
    put_step(first, second, out + s);
  }
  return steps;
}

// out[t][0 .. 16) (+)= scale x the products of P pairs of tokens, `stride` steps apart, the last with one token if
// `odd`.
template <int P>
inline void micro(const PairStep* x, int64_t stride, const WeightStep* w, int64_t steps, const float* scale, bool first,
                  bool odd, float* out) {
  float32x4_t sums[P][kRowPairs];
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) sums[p][r] = vdupq_n_f32(0.0f);
  }
  for (int64_t s = 0; s < steps; ++s) {
    bfloat16x8_t high[P], low[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      high[p] = vld1q_bf16(x[p * stride + s].high);
      low[p] = vld1q_bf16(x[p * stride + s].low);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
      const bfloat16x8_t weight = vreinterpretq_bf16_u32(vld1q_u32(w[s].pairs[r]));
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        sums[p][r] = vbfmmlaq_f32(vbfmmlaq_f32(sums[p][r], high[p], weight), low[p], weight);
      }
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const float64x2_t a = vreinterpretq_f64_f32(sums[p][2 * quad]), b = vreinterpretq_f64_f32(sums[p][2 * quad + 1]);
      const float32x4_t of_token[2] = {vreinterpretq_f32_f64(vzip1q_f64(a, b)),
                                       vreinterpretq_f32_f64(vzip2q_f64(a, b))};
      const float32x4_t factor = vld1q_f32(scale + quad * 4);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && odd && p == P - 1) break;
        float* to = out + (2 * p + i) * kPairRows + quad * 4;
        vst1q_f32(to, first ? vmulq_f32(of_token[i], factor) : vfmaq_f32(vld1q_f32(to), of_token[i], factor));
      }
    }
  }
}

void gemm_panel(const Panel& panel, const void* packed, int64_t tokens, WeightStep* piece, float* out) {
  const int64_t columns = panel.columns;
  const int64_t stride = padded_columns(columns) / kStep;
  const int64_t pairs = pairs_of(tokens);
  for (int64_t begin = 0, end = 0; begin < columns; begin = end) {
    // A piece ends where the row scales change.
    end = columns - begin < kPiece ? columns : begin + kPiece;
    const int64_t segment = begin / panel.segment;
    if (panel.segment < columns && (segment + 1) * panel.segment < end) end = (segment + 1) * panel.segment;
    const float* scales = panel.row_scales + segment * panel.row_scale_stride;
    const int64_t steps = expand(panel, begin, end, piece);
    for (int64_t p = 0; p < pairs; p += 2) {
      const PairStep* x = static_cast<const PairStep*>(packed) + p * stride + begin / kStep;
      float* to = out + 2 * p * kPairRows;
      const bool odd = tokens % 2 != 0 && p + 2 >= pairs;
      if (p + 1 < pairs) {
        micro<2>(x, stride, piece, steps, scales, begin == 0, odd, to);
      } else {
        micro<1>(x, stride, piece, steps, scales, begin == 0, odd, to);
      }
    }
  }
}

void gemm_bf16(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  auto* piece = static_cast<WeightStep*>(scratch);
  for (int p = 0; p < count; ++p) gemm_panel(panels[p], packed, tokens, piece, out + p * kPanelRows);
}

constexpr KernelTable table() {
  KernelTable kernels = neon_table<DotProducts>("bfmmla");
  kernels.packed_bytes = packed_bytes;
  kernels.pack = pack;
  kernels.gemm = gemm_bf16;
  kernels.gemm_scratch = kPiece / kStep * static_cast<int64_t>(sizeof(WeightStep));
  kernels.gemm_kinds = kind_bit(Kind::kBf16) | kind_bit(Kind::kFp8);
  return kernels;
}

}  // namespace

const KernelTable* bfmmla_kernels() {
  static constexpr KernelTable kernels = table();
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* bfmmla_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
