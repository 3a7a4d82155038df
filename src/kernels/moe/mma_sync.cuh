// Expert GEMMs on every card with mma.sync and cp.async (sm_80 and later): NVFP4 weights, dequantised exactly in
// registers, times bf16 activations. The weights are the A operand (m16n8k16), 8 to 192 tokens the B operand.
//   gate-up  bf16 rows per slot: silu(gate) * up, or relu(up)^2 where the tile has one operand
//   down     fp32 rows per slot, which moe_combine adds up in the order of a token's choices
// Tiles, items and the pipeline: async_gemm.cuh.
#pragma once

#include "kernels/moe/async_gemm.cuh"
#include "kernels/moe/dequant.cuh"

namespace fourfold::moe {

namespace async_detail {

template <typename Tile>
struct Bf16Math {
  using S = Shape<Tile>;
  static constexpr int kMt = S::kMt;

  template <int NT>
  struct Sum {
    static constexpr int kSets = kMt * NT == 1 ? 2 : 1;  // two where one would chain the multiplications
    float v[kSets][kMt][NT][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int s = 0; s < kSets; ++s)
#pragma unroll
        for (int m = 0; m < kMt; ++m)
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[s][m][n][i] = 0.0f;
    }
  };

  const GemmArgs& args;
  u32 scale_base;
  int g, l;
  u32 codes_at, scales_at, row_at;  // this lane's places in a unit and in the rows
  float first, second;

  __device__ __forceinline__ explicit Bf16Math(const GemmArgs& a) : args(a) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    g = lane / 4;
    l = lane % 4;
    scale_base = opaque_scale_base(args.zero);
    codes_at = static_cast<u32>(lane) * 16u;
    scales_at = kUnitCodeBytes + static_cast<u32>(g) * 8u;
    // ldmatrix: lanes 0-7 address the rows at K 0..7, 8-15 at 8..15, 16-31 the same of the next K block.
    row_at = static_cast<u32>(lane % 8) * S::kRowStride + static_cast<u32>(lane / 8) * 16u;
    first = second = 0.0f;
  }

  __device__ __forceinline__ void begin(const Block& block) {
    if constexpr (S::kGateUp && S::kGated) {
      first = args.scales[block.expert * 2] * kEpilogueScale;
      second = args.scales[block.expert * 2 + 1] * kEpilogueScale;
    } else {
      first = args.scales[block.expert] * kEpilogueScale;
    }
  }

  template <int NT>
  __device__ __forceinline__ void unit(Sum<NT>& sum, u32 weights, u32 rows, u32, int unit) const {
    Vec4 codes[kMt];
    Vec2 scale[kMt];
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
      const u32 at = weights + static_cast<u32>(m) * S::kStrip + static_cast<u32>(unit) * kUnitBytes;
      codes[m] = load_shared4(at + codes_at);
      scale[m] = load_shared2(at + scales_at);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a[kMt][2][4];
#pragma unroll
      for (int m = 0; m < kMt; ++m) {
        const u32 word = half == 0 ? scale[m].x : scale[m].y;
        dequantise(half == 0 ? codes[m].x : codes[m].z, scale_pair(word, false, scale_base), a[m][0]);
        dequantise(half == 0 ? codes[m].y : codes[m].w, scale_pair(word, true, scale_base), a[m][1]);
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        u32 x[4];
        load_matrix4(x, rows + row_at + static_cast<u32>(n * S::kWn * 8) * S::kRowStride +
                            static_cast<u32>(unit * 128 + half * 64));
#pragma unroll
        for (int m = 0; m < kMt; ++m) {
          mma_m16n8k16(sum.v[0][m][n], a[m][0], x[0], x[1]);
          mma_m16n8k16(sum.v[Sum<NT>::kSets - 1][m][n], a[m][1], x[2], x[3]);
        }
      }
    }
  }

  // A lane holds rows g and g + 8, columns 2l and 2l + 1 of each fragment.
  template <int NT>
  __device__ __forceinline__ void finish(Sum<NT>& sum, const Block& block, int tile0, int wn) const {
    if constexpr (Sum<NT>::kSets == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.v[0][0][0][i] += sum.v[1][0][0][i];
    }
    using Out = OutputOf<S::kGateUp, u16>;
    const int left = block.count - (wn * 8 + 2 * l);
    const int tiles = args.row_tiles - tile0;
    const int place = !S::kGateUp ? partial_place(tile0, g) : tile0 * (S::kGated ? 8 : kTileRows) + g;
    Out* out =
        static_cast<Out*>(args.out) + static_cast<long long>(block.first + wn * 8 + 2 * l) * args.out_stride + place;
    for_columns<S, NT>(out, args.out_stride, left, [&](int n, int e, Out* to) {
#pragma unroll
      for (int m = 0; m < kMt; ++m) {
        if (m >= tiles) break;
        const float low = sum.v[0][m][n][e] * first;
        const float high = sum.v[0][m][n][2 + e];
        if constexpr (!S::kGateUp) {
          *reinterpret_cast<float2*>(to + m * kTileRows) = make_float2(low, high * first);
        } else if constexpr (S::kGated) {
          to[m * 8] = to_bf16(swiglu(low, high * second, args.limit));
        } else {
          to[m * kTileRows] = to_bf16(squared_relu(low));
          to[m * kTileRows + 8] = to_bf16(squared_relu(high * first));
        }
      }
    });
  }
};

}  // namespace async_detail

// `Tile`: see stream_shape.h. Grid: at most items, a persistent CTA takes every gridDim.x-th.
template <typename Tile>
__global__ void __launch_bounds__(Tile::value.warps * 32, Tile::ctas)
    moe_mma_sync(const __grid_constant__ GemmArgs args) {
  using namespace async_detail;
  static_assert(Tile::value.family == plan::moe::Family::kMmaSync);
  FOURFOLD_DYNAMIC_SHARED(smem);
  const RowSource source{reinterpret_cast<const u8*>(args.source), static_cast<u64>(args.source_stride) * 2, nullptr,
                         0};
  Bf16Math<Tile> math(args);
  run<Tile>(args, source, math, shared_address(smem), smem);
}

}  // namespace fourfold::moe
