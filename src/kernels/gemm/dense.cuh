// Products of 17 rows and more by mma.sync, for every architecture: a CTA multiplies 128 weight rows with a block of
// tokens. Units of weights and pieces of x come by cp.async into stages; weights are dequantised in registers.
#pragma once

#include "kernels/gemm/dense_parts.cuh"

namespace fourfold::gemm {

namespace dense_detail {

using namespace ptx;

// Two fragments of a unit, blocks 2 P and 2 P + 1, weights as they are but for fragment_scale (of bf16 and NVFP4) or
// none (of fp8, brought to size here, or its products would leave fp32's range). `unit`: its shared address.
template <Weights F, int P>
__device__ __forceinline__ void load_fragments(u32 unit, int lane, u32 scale_base, u32 (&a)[2][4]) {
  const u32 at = unit + static_cast<u32>(lane) * 16u;
  if constexpr (F == Weights::kBf16) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const Vec4 w = load_shared4(at + static_cast<u32>(2 * P + s) * 512u);
      a[s][0] = w.x;
      a[s][1] = w.y;
      a[s][2] = w.z;
      a[s][3] = w.w;
    }
  } else if constexpr (F == Weights::kFp8) {
    const Vec4 w = load_shared4(at + P * 512u);
    fp8_fragment(w.x, w.y, a[0]);
    fp8_fragment(w.z, w.w, a[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = mul_bf16x2(a[i / 4][i % 4], kFp8Pair);
  } else {
    const Vec2 w = load_shared2(at + P * 8u);
    const u32 scales = load_shared1(unit + moe::kUnitCodeBytes + static_cast<u32>(lane / 4) * 8u + P * 4u);
    moe::dequantise(w.x, moe::scale_pair(scales, false, scale_base), a[0]);
    moe::dequantise(w.y, moe::scale_pair(scales, true, scale_base), a[1]);
  }
}
// The rows of x that a CTA multiplies.
struct RowsOf {
  const u16* x;
  long long stride;   // elements
  const int* places;  // of row t among them; null: t
  int tokens;         // rows from here on are not there
  int columns;
  int units;
  int zero;  // 0
};

// `end`(row tile, g, t, low, high): what becomes of rows g and g + 8 of a row tile's products with row t.
template <typename Tile, Weights F, typename End>
__device__ __forceinline__ void multiply_group(const RowsOf& x_rows, u32 base, unsigned char* smem, const Part& part,
                                               const Group& group, int first_token, const End& end) {
  static constexpr DenseTile T = Tile::value;
  static constexpr DenseMap kMap = dense_map(T);
  constexpr int kMt = T.mt();
  constexpr int kNt = T.nt();
  constexpr int kUnitPieces = unit_bytes(F) / 16;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int row_warp = warp % T.row_warps;
  const int token_warp = warp / T.row_warps;
  const int units = x_rows.units;
  const u8* strips = part.weights + static_cast<u64>(group.first) * static_cast<u64>(units) * unit_bytes(F);
  const u64 strip_bytes = static_cast<u64>(units) * unit_bytes(F);

  const auto bring_weights = [&](int unit, int stage) {
    const u32 to = base + kMap.weights + static_cast<u32>(stage) * kMap.weight_stride;
    for (int i = thread; i < group.tiles * kUnitPieces; i += kDenseThreads) {
      async_copy16(to + static_cast<u32>(i) * 16u, strips + static_cast<u64>(i / kUnitPieces) * strip_bytes +
                                                       static_cast<u64>(unit) * unit_bytes(F) +
                                                       static_cast<u32>(i % kUnitPieces) * 16u);
    }
  };
  const auto bring_rows = [&](int unit, int stage) {
    const u32 to = kMap.rows + static_cast<u32>(stage) * kMap.row_stride;
    for (int i = thread; i < T.tokens * 8; i += kDenseThreads) {
      const int row = i / 8;
      const int piece = i % 8;
      const u32 at = to + static_cast<u32>(row * 128 + (piece ^ (row & 7)) * 16);
      const int column = unit * kUnitK + piece * 8;
      // Tokens that are not there may be anything; columns may not, zero weights or not.
      int t = first_token + row < x_rows.tokens ? first_token + row : x_rows.tokens - 1;
      if (x_rows.places != nullptr) t = x_rows.places[t];
      if (column < x_rows.columns) {
        async_copy16(base + at, x_rows.x + t * x_rows.stride + column);
      } else {
        *reinterpret_cast<uint4*>(smem + at) = make_uint4(0u, 0u, 0u, 0u);
      }
    }
  };

#pragma unroll 1
  for (int s = 0; s < T.stages - 1 && s < units; ++s) bring_weights(s, s);
  grid_dependency_wait();
#pragma unroll 1
  for (int s = 0; s < T.stages - 1; ++s) {
    if (s < units) bring_rows(s, s);
    async_copy_commit();
  }

  const u32 scale_base = moe::opaque_scale_base(x_rows.zero);
  const u32 my_row = static_cast<u32>(token_warp * kNt * 8 + lane % 8);
  float acc[kMt][kNt][4] = {};
  float total[T.cells() ? kMt : 1][T.cells() ? kNt : 1][4] = {};
  const bool cells = F == Weights::kFp8 && T.cells() && part.cells != nullptr;
  int stage = 0;
  for (int unit = 0; unit < units; ++unit) {
    async_copy_wait<T.stages - 2>();
    __syncthreads();  // everyone's copies are there, and nobody reads the stage before this one any more
    const int ahead = unit + T.stages - 1;
    if (ahead < units) {
      const int free = stage == 0 ? T.stages - 1 : stage - 1;
      bring_weights(ahead, free);
      bring_rows(ahead, free);
    }
    async_copy_commit();
    const u32 weights = base + kMap.weights + static_cast<u32>(stage) * kMap.weight_stride +
                        static_cast<u32>(row_warp * kMt * unit_bytes(F));
    const u32 rows = base + kMap.rows + static_cast<u32>(stage) * kMap.row_stride + my_row * 128u;
    const auto half = [&]<int P>() {
      u32 a[kMt][2][4];
#pragma unroll
      for (int m = 0; m < kMt; ++m) {
        load_fragments<F, P>(weights + static_cast<u32>(m * unit_bytes(F)), lane, scale_base, a[m]);
      }
      const u32 piece = static_cast<u32>((P * 4 + lane / 8) ^ (lane & 7)) * 16u;
#pragma unroll
      for (int n = 0; n < kNt; ++n) {
        u32 x[4];
        load_matrix4(x, rows + static_cast<u32>(n) * 1024u + piece);
#pragma unroll
        for (int m = 0; m < kMt; ++m) {
          mma_m16n8k16(acc[m][n], a[m][0], x[0], x[1]);
          mma_m16n8k16(acc[m][n], a[m][1], x[2], x[3]);
        }
      }
    };
    half.template operator()<0>();
    half.template operator()<1>();
    if constexpr (F == Weights::kFp8 && T.cells()) {
      const u32 cell = static_cast<u32>(unit) * part.cell_of >> 16;
      if (cells && (unit + 1 == units || (static_cast<u32>(unit + 1) * part.cell_of >> 16) != cell)) {
#pragma unroll
        for (int m = 0; m < kMt; ++m) {
          const int tile = row_warp * kMt + m;
          if (tile >= group.tiles) continue;
          const float2 scale = *(reinterpret_cast<const float2*>(part.cells) +
                                 static_cast<long long>(group.first + tile) * part.cell_count + cell);
#pragma unroll
          for (int i = 0; i < kNt * 4; ++i) {
            total[m][i / 4][i % 4] = fmaf(acc[m][i / 4][i % 4], i % 4 < 2 ? scale.x : scale.y, total[m][i / 4][i % 4]);
            acc[m][i / 4][i % 4] = 0.0f;
          }
        }
      }
    }
    if (++stage == T.stages) stage = 0;
  }
  async_copy_wait<0>();

  const int g = lane / 4;
#pragma unroll
  for (int m = 0; m < kMt; ++m) {
    const int tile = row_warp * kMt + m;
    if (tile >= group.tiles) continue;
    const float* factors = part.factors + static_cast<long long>(group.first + tile) * 16 + g;
    const float low = factors[0] * dense_scale(F);
    const float high = factors[8] * dense_scale(F);
#pragma unroll
    for (int n = 0; n < kNt; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float y[2] = {acc[m][n][e], acc[m][n][2 + e]};
        if constexpr (T.cells()) {
          if (cells) {
            y[0] = total[m][n][e];
            y[1] = total[m][n][2 + e];
          }
        }
        end(group.first + tile, g, first_token + (token_warp * kNt + n) * 8 + lane % 4 * 2 + e, y[0] * low,
            y[1] * high);
      }
    }
  }
}

}  // namespace dense_detail

// Grid: dense_grid; the blocks of tokens of one group of rows follow each other. `Tile` is a DenseTileOf.
template <typename Tile>
__global__ void __launch_bounds__(kDenseThreads, Tile::value.ctas) gemm_dense(const __grid_constant__ DenseArgs args) {
  using namespace dense_detail;
  static constexpr DenseTile T = Tile::value;
  static_assert(T.nt() >= 1 && T.nt() * (8 / T.row_warps) * 8 == T.tokens && T.stages >= 2);
  FOURFOLD_DYNAMIC_SHARED(smem);
  grid_launch_dependents();
  const int blocks = (args.tokens + T.tokens - 1) / T.tokens;
  const Group group = group_of(args.matrix, static_cast<int>(blockIdx.x) / blocks, kDenseTiles);
  const Part& part = args.matrix.parts[group.part];
  const RowsOf rows = {args.x, args.x_stride, nullptr, args.tokens, args.matrix.columns, args.matrix.units, args.zero};
  const auto end = [&](int tile, int g, int t, float low, float high) {
    with_end(args.end, [&]<DenseEnd End>() { finish<End>(args, part, tile, g, t, low, high); });
  };
  with_format<Tile>(part.format, [&]<Weights F>() {
    multiply_group<Tile, F>(rows, shared_address(smem), smem, part, group,
                            static_cast<int>(blockIdx.x) % blocks * T.tokens, end);
  });
}

}  // namespace fourfold::gemm
