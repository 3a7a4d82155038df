// Expert GEMMs with NVFP4 weights and NVFP4 activations (W4A4) on block-scaled mma.m16n8k64: sm_120a and sm_121a, or
// any card from sm_80 on with FOURFOLD_EMULATE_FP4_MMA. The weights are read from the same stored units as everywhere
// else and are the A operand; fp4_layout.h says how.
//   moe_quantize  the layer's input, once per token
//   gate-up       h = silu(gate) * up, or relu(up)^2, quantised to NVFP4 from the fp32 sums with down's input scale
//   down          groups of 16-bit values per slot (PackedGroup), which moe_combine_packed adds up
// Tiles, items and the pipeline: async_gemm.cuh.
//
// Quantisation (nvfp4/quantize.h): with G = 1 / input scale a block of 16 gets the scale e4m3(min(G x largest / 6,
// 448)) and codes e2m1(G x value / scale), saturating; where the scale is 0, and for a NaN, codes are 0. Input scales
// are static, one for the layer's input and one per expert for h; nvfp4/input_scales.h makes them usable.
#pragma once

#include "kernels/moe/async_gemm.cuh"
#include "kernels/moe/fp4_layout.h"
#include "kernels/moe/pack_group.cuh"
#include "kernels/ptx/sm120.cuh"
#include "nvfp4/number.h"

namespace fourfold::moe {

namespace async_detail {

template <typename Tile>
struct Fp4Math {
  using S = Shape<Tile>;
  static constexpr int kMt = S::kMt;
  // Gated, two row tiles of 8 outputs make one block of 16 of h; in down, two row tiles make groups.
  static_assert((S::kGateUp && !S::kGated) || kMt % 2 == 0);

  template <int NT>
  struct Sum {
    float v[kMt][NT][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int m = 0; m < kMt; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[m][n][i] = 0.0f;
    }
  };

  const Fp4Args& args;
  int g, l;
  u32 codes_at, scales_at, row_at, row_scales_at;
  u32 scale_selector;
  float first, second;
  float quantise;  // G of h

  __device__ __forceinline__ explicit Fp4Math(const Fp4Args& a) : args(a) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    g = lane / 4;
    l = lane % 4;
    codes_at = static_cast<u32>(g) * 64u + static_cast<u32>(l & 1) * 32u + static_cast<u32>(l >> 1) * 8u;
    scales_at = kUnitCodeBytes + static_cast<u32>(g) * 8u;
    scale_selector = (l & 1) == 0 ? 0x7340u : 0x5162u;  // fp4_stored_scales
    // ldmatrix: lanes 0-7 address the rows of a token tile at K 0..31, 8-15 at 32..63, 16-31 the same of the next tile.
    row_at = static_cast<u32>(lane % 8) * S::kRowStride + static_cast<u32>(lane / 8 % 2) * 16u;
    row_scales_at = static_cast<u32>(g * S::kUnits) * 4u;
    first = second = quantise = 0.0f;
  }

  __device__ __forceinline__ void begin(const Block& block) {
    const GemmArgs& gemm = args.gemm;
    if constexpr (S::kGateUp) {
      const float input = args.input_scales[0];
      first = gemm.scales[S::kGated ? block.expert * 2 : block.expert] * input;
      if (S::kGated) second = gemm.scales[block.expert * 2 + 1] * input;
      quantise = 1.0f / args.output_scales[block.expert];
    } else {
      first = gemm.scales[block.expert] * args.input_scales[block.expert];
    }
  }

  template <int NT>
  __device__ __forceinline__ void unit(Sum<NT>& sum, u32 weights, u32 rows, u32 scales, int unit) const {
    u32 a[kMt][4];
    u32 scale[kMt];
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
      const u32 at = weights + static_cast<u32>(m) * S::kStrip + static_cast<u32>(unit) * kUnitBytes;
      const Vec2 one = load_shared2(at + codes_at);
      const Vec2 two = load_shared2(at + codes_at + 16u);
      fp4_registers(one.x, two.x, &a[m][0], &a[m][1]);
      fp4_registers(one.y, two.y, &a[m][2], &a[m][3]);
      const Vec2 words = load_shared2(at + scales_at);
      scale[m] = permute_bytes(rotate_left(words.x, 28), rotate_left(words.y, 28), scale_selector);
      scale[m] = fp4_scales(scale[m]);
    }
    const u32 next_tile = static_cast<u32>(threadIdx.x) / 16u % 2u;
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      u32 x[4];
      const u32 tile = static_cast<u32>(n) + (n + 1 < NT ? next_tile : 0u);
      load_matrix4(x, rows + row_at + tile * (S::kWn * 8) * S::kRowStride + static_cast<u32>(unit * kFp4UnitBytes));
#pragma unroll
      for (int i = 0; i < 2 && n + i < NT; ++i) {
        const u32 s =
            load_shared1(scales + row_scales_at + static_cast<u32>((n + i) * S::kWn * 8 * S::kUnits + unit) * 4u);
#pragma unroll
        for (int m = 0; m < kMt; ++m) {
          mma_m16n8k64_nvfp4(sum.v[m][n + i], a[m], x[2 * i], x[2 * i + 1], scale[m], s);
        }
      }
    }
  }

  // One column's block of 16 outputs, of which this lane has numbers g and g + 8, to the block's place in rows of codes
  // and scales.
  __device__ __forceinline__ void quantise_block(float low, float high, int group, bool valid, u8* codes,
                                                 u8* scales) const {
    low = low == low ? low : 0.0f;
    high = high == high ? high : 0.0f;
    float largest = fmaxf(fabsf(low), fabsf(high));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    const u32 code = nvfp4::float_to_e4m3(fminf(quantise * largest * (1.0f / 6.0f), nvfp4::kE4m3Max));
    const float factor = code == 0 ? 0.0f : quantise / nvfp4::e4m3_to_float(static_cast<u8>(code));
    const u32 pair = to_e2m1x2(low * factor, high * factor);
    u32 word = (pair & 15u) << (4 * k_nibble(g)) | (pair >> 4) << (4 * k_nibble(8 + g));
    word |= __shfl_xor_sync(0xffffffffu, word, 4);
    word |= __shfl_xor_sync(0xffffffffu, word, 8);
    const int place = group / 4 * 4 + group_place(group % 4);
    if (valid && g % 4 == 0) *reinterpret_cast<u32*>(codes + place * 8 + g) = word;
    if (valid && g == 0) scales[place] = static_cast<u8>(code);
  }

  // A lane holds rows g and g + 8, columns 2l and 2l + 1 of each fragment: in down, of two row tiles the four values of
  // a group.
  template <int NT>
  __device__ __forceinline__ void store_groups(const Sum<NT>& sum, const Block& block, int tile0, int wn) const {
    const GemmArgs& gemm = args.gemm;
    const int left = block.count - (wn * 8 + 2 * l);
    const int tiles = gemm.row_tiles - tile0;
    const u32 low28 = static_cast<u32>(gemm.zero - 1) >> 4;
    PackedGroup* out = static_cast<PackedGroup*>(gemm.out) +
                       static_cast<long long>(block.first + wn * 8 + 2 * l) * gemm.out_stride + tile0 * 4 + g;
    for_columns<S, NT>(out, gemm.out_stride, left, [&](int n, int e, PackedGroup* to) {
#pragma unroll
      for (int m = 0; m < kMt; m += 2) {
        if (m >= tiles) break;
        // Beyond the matrix there is anything, and it may not decide the exponent.
        const bool both = m + 1 < tiles;
        const Vec2 group =
            pack_group(sum.v[m][n][e] * first, sum.v[m][n][2 + e] * first, both ? sum.v[m + 1][n][e] * first : 0.0f,
                       both ? sum.v[m + 1][n][2 + e] * first : 0.0f, low28);
        *reinterpret_cast<uint2*>(to + m * 4) = make_uint2(group.x, group.y);
      }
    });
  }

  template <int NT>
  __device__ __forceinline__ void finish(Sum<NT>& sum, const Block& block, int tile0, int wn) const {
    if constexpr (S::kGateUp) {
      store_quantised(sum, block, tile0, wn);
    } else {
      store_groups(sum, block, tile0, wn);
    }
  }

  template <int NT>
  __device__ __forceinline__ void store_quantised(Sum<NT>& sum, const Block& block, int tile0, int wn) const {
    const GemmArgs& gemm = args.gemm;
    // Pointers step from column to column: multiples of the stride would be computed once and kept for all items.
    const int left = block.count - (wn * 8 + 2 * l);
    const int tiles = gemm.row_tiles - tile0;
    const long long row = block.first + wn * 8 + 2 * l;
    u8* out = static_cast<u8*>(gemm.out) + row * gemm.out_stride;
    u8* scales = args.out_scales + row * args.out_scale_stride;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool there = n * S::kWn * 8 + e < left;
        if constexpr (S::kGated) {
#pragma unroll
          for (int m = 0; m < kMt; m += 2) {
            if (m >= tiles) break;
            float h[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              h[i] = swiglu(sum.v[m + i][n][e] * first, sum.v[m + i][n][2 + e] * second, gemm.limit);
            }
            quantise_block(h[0], h[1], (tile0 + m) / 2, there, out, scales);
          }
        } else {
#pragma unroll
          for (int m = 0; m < kMt; ++m) {
            if (m >= tiles) break;
            quantise_block(squared_relu(sum.v[m][n][e] * first), squared_relu(sum.v[m][n][2 + e] * first), tile0 + m,
                           there, out, scales);
          }
        }
        const int step = e == 0 ? 1 : S::kWn * 8 - 1;
        out += step * gemm.out_stride;
        scales += step * args.out_scale_stride;
      }
  }
};

}  // namespace async_detail

// `Tile`: see stream_shape.h. Grid: at most items, a persistent CTA takes every gridDim.x-th. Gated, I
// is a multiple of 16 (row_tiles is even).
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.warps * 32, Tile::ctas) moe_fp4(const __grid_constant__ Fp4Args args) {
  using namespace async_detail;
  static_assert(Tile::value.family == plan::moe::Family::kFp4);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const RowSource source{reinterpret_cast<const u8*>(args.gemm.source), static_cast<u64>(args.gemm.source_stride),
                         args.source_scales, static_cast<u64>(args.source_scale_stride)};
  Fp4Math<Tile> math(args);
  run<Tile>(args.gemm, source, math, shared_address(smem), smem);
}

// bf16 rows [tokens][columns] to NVFP4 in the order of fp4_layout.h; columns and stride multiples of 16 and 8, rows on
// a multiple of 16 bytes, `units` = ceil(columns / 64): blocks beyond the columns are written as zeros. One thread per
// block of 16. Grid: (ceil(4 units / 128), tokens), 128 threads. Rounds exactly as nvfp4::quantize_activations with the
// global scale 1 / *input_scale.
__global__ void __launch_bounds__(128)
    moe_quantize(const ptx::u16* __restrict__ rows, long long stride, int columns, int units,
                 const float* __restrict__ input_scale, unsigned char* __restrict__ codes, long long code_stride,
                 unsigned char* __restrict__ scales, long long scale_stride) {
  using namespace ptx;
  grid_dependency_wait();
  grid_launch_dependents();
  const int group = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  const long long token = blockIdx.y;
  if (group >= units * 4) return;
  u32 words[2] = {0, 0};
  u32 code = 0;
  if (group * 16 < columns) {
    const uint4* row = reinterpret_cast<const uint4*>(rows + token * stride + group * 16);
    const uint4 low = row[0], high = row[1];
    const u32 pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float global = 1.0f / *input_scale;
    float x[16];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = nvfp4::bf16_to_float(static_cast<u16>(pairs[i / 2] >> (16 * (i % 2))));
      x[i] = x[i] == x[i] ? x[i] : 0.0f;
      largest = fmaxf(largest, fabsf(x[i]));
    }
    code = nvfp4::float_to_e4m3(fminf(global * largest / nvfp4::kE2m1Max, nvfp4::kE4m3Max));
    if (code != 0) {
      const float scale = nvfp4::e4m3_to_float(static_cast<u8>(code));
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const u32 pair = to_e2m1x2(x[i] * global / scale, x[i + 1] * global / scale);
        words[i >> 2 & 1] |= (pair & 15u) << (4 * k_nibble(i)) | (pair >> 4) << (4 * k_nibble(i + 1));
      }
    }
  }
  const int place = group / 4 * 4 + group_place(group % 4);
  u32* out = reinterpret_cast<u32*>(codes + token * code_stride + place * 8);
  out[0] = words[0];
  out[1] = words[1];
  scales[token * scale_stride + place] = static_cast<u8>(code);
}

}  // namespace fourfold::moe
