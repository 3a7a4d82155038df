// NVFP4 with many tokens by smmla, two rows of eight signed bytes times two: weights are 2 w, activations the 16-bit
// integers of the way for few tokens in two planes of bytes. Integers, steps and the order of sums are those of that
// way: the bits are the same (sums of a block are exact in any order).
#include "cpu/gemm/layout.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)

#include "cpu/gemm/neon_dot.h"

namespace fourfold::cpu::gemm {
namespace {

// Activations: [blocks, pairs of tokens] operands, then [blocks, pairs, 2] steps x 2^40.
struct PairBlock {
  int8_t hi[2][16];  // columns 0 .. 7 of both tokens, then columns 8 .. 15, in the order of ActivationBlock
  int8_t lo[2][16];
};

constexpr int64_t kRowPairs = kPanelRows / 2;

inline int64_t pairs_of(int64_t tokens) { return (tokens + 1) / 2; }
inline int64_t blocks_of(int64_t columns) { return (columns + kBlockColumns - 1) / kBlockColumns; }

int64_t packed_bytes(int64_t tokens, int64_t columns) {
  return pairs_of(tokens) * blocks_of(columns) * static_cast<int64_t>(sizeof(PairBlock) + 2 * sizeof(float));
}

void pack(const float* const* x, int64_t tokens, int64_t columns, void* packed) {
  const int64_t pairs = pairs_of(tokens);
  const int64_t blocks = blocks_of(columns);
  auto* operands = static_cast<PairBlock*>(packed);
  auto* steps = reinterpret_cast<float*>(operands + pairs * blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t t = 0; t < 2 * pairs; ++t) {
      ActivationBlock block = {};
      if (t < tokens) quantize_activations(x[t] + b * kBlockColumns, kBlockColumns, &block);
      PairBlock& to = operands[b * pairs + t / 2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __builtin_memcpy(to.hi[half] + t % 2 * 8, block.hi + half * 8, 8);
        __builtin_memcpy(to.lo[half] + t % 2 * 8, block.lo + half * 8, 8);
      }
      steps[b * 2 * pairs + t] = block.scale;
    }
  }
}

// A block of a panel: [row pair][half] operands, eight columns of two rows each.
inline void expand_block(const uint8_t* words, int8x16_t (*out)[2]) {
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t v = vld1q_u8(words + half * 64 + quad * 16);
      const int32x4_t even = vreinterpretq_s32_s8(low(v)), odd = vreinterpretq_s32_s8(high(v));
      out[2 * quad][half] = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
      out[2 * quad + 1][half] = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
    }
  }
}

// sums[pair][row pair]: token 0 x rows, token 1 x rows.
using PairSums = float[kRowPairs][4];

void gemm_panel(const Panel& panel, const void* packed, int64_t tokens, PairSums* sums, float* out) {
  const int64_t blocks = panel.columns / kBlockColumns;
  const int64_t pairs = pairs_of(tokens);
  const auto* x = static_cast<const PairBlock*>(packed);
  const auto* steps = reinterpret_cast<const float*>(x + pairs * blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* group = panel.words + b / 4 * kGroupBytes;
    const uint8_t* words = group + kGroupScales + b % 4 * 128;
    Neon::prefetch(words + kPrefetch);
    Neon::prefetch(words + kPrefetch + 64);
    if (b % 4 == 0) Neon::prefetch(group + kPrefetch);
    int8x16_t w[kRowPairs][2];
    expand_block(words, w);
    const NeonWeights::Scales quads = NeonWeights::block_scales(group + b % 4 * 16);
    float32x4_t scales[kRowPairs];
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const float64x2_t two = vreinterpretq_f64_f32(quads.quad[quad]);
      scales[2 * quad] = vreinterpretq_f32_f64(vdupq_laneq_f64(two, 0));
      scales[2 * quad + 1] = vreinterpretq_f32_f64(vdupq_laneq_f64(two, 1));
    }
    for (int64_t p = 0; p < pairs; ++p, ++x, steps += 2) {
      const int8x16_t hi[2] = {vld1q_s8(x->hi[0]), vld1q_s8(x->hi[1])};
      const int8x16_t lo[2] = {vld1q_s8(x->lo[0]), vld1q_s8(x->lo[1])};
      const float32x4_t step = vcombine_f32(vld1_dup_f32(steps), vld1_dup_f32(steps + 1));
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRowPairs; ++r) {
        int32x4_t sum = vmmlaq_s32(vmmlaq_s32(vdupq_n_s32(0), hi[0], w[r][0]), hi[1], w[r][1]);
        sum = vmmlaq_s32(vmmlaq_s32(vshlq_n_s32(sum, 8), lo[0], w[r][0]), lo[1], w[r][1]);
        float* to = sums[p][r];
        const float32x4_t before = b == 0 ? vdupq_n_f32(0.0f) : vld1q_f32(to);
        vst1q_f32(to, vfmaq_f32(before, vcvtq_f32_s32(sum), vmulq_f32(scales[r], step)));
      }
    }
  }
#pragma GCC unroll 4
  for (int64_t quad = 0; quad < 4; ++quad) {
    const float32x4_t scale = vmulq_n_f32(vld1q_f32(panel.row_scales + quad * 4), kDotScale);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* from = sums[t / 2][2 * quad] + t % 2 * 2;
      const float32x4_t sum = vcombine_f32(vld1_f32(from), vld1_f32(from + 4));
      vst1q_f32(out + t * kPairRows + quad * 4, vmulq_f32(sum, scale));
    }
  }
}

void gemm_integers(const Panel* panels, int count, const void* packed, int64_t tokens, void* scratch, float* out) {
  auto* sums = static_cast<PairSums*>(scratch);
  for (int p = 0; p < count; ++p) gemm_panel(panels[p], packed, tokens, sums, out + p * kPanelRows);
}

constexpr KernelTable table() {
  KernelTable kernels = neon_table<DotProducts>("i8mm");
  kernels.packed_bytes = packed_bytes;
  kernels.pack = pack;
  kernels.gemm = gemm_integers;
  kernels.gemm_scratch = kGemmTokens / 2 * static_cast<int64_t>(sizeof(PairSums));
  kernels.gemm_kinds = kind_bit(Kind::kNvfp4);
  return kernels;
}

}  // namespace

const KernelTable* i8mm_kernels() {
  static constexpr KernelTable kernels = table();
  return &kernels;
}

}  // namespace fourfold::cpu::gemm

#else

namespace fourfold::cpu::gemm {
const KernelTable* i8mm_kernels() { return nullptr; }
}  // namespace fourfold::cpu::gemm

#endif
