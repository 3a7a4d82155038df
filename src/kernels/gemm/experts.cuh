// Products of experts in the formats of dense products: each block of tokens that chose an expert is multiplied with
// that expert's matrix as dense.cuh does it. Gate and up come as one paired matrix and leave as the activation; down
// leaves rows that the expert layers' moe_combine adds up.
#pragma once

#include "kernels/gemm/dense.cuh"
#include "kernels/gemm/experts_args.h"

namespace fourfold::gemm {

// `Tile`: a DenseTileOf, whose tokens are the routing's block. GateUp: rows of x are those of tokens.
template <typename Tile, bool GateUp>
__global__ void __launch_bounds__(kDenseThreads, Tile::value.ctas)
    gemm_experts(const __grid_constant__ ExpertsArgs args) {
  using namespace dense_detail;
  FOURFOLD_DYNAMIC_SHARED(smem);
  grid_dependency_wait();
  grid_launch_dependents();
  const u32 base = shared_address(smem);
  const int first = static_cast<int>(blockIdx.x) * kDenseTiles;
  const int left = args.tiles - first;
  const Group group = {0, first, left < kDenseTiles ? left : kDenseTiles};
  const int blocks = args.route.counts[0];
  for (int i = static_cast<int>(blockIdx.y); i < blocks; i += static_cast<int>(gridDim.y)) {
    const moe::Block block = args.route.blocks[i];
    const u64 skip = static_cast<u64>(block.expert) * args.expert_bytes;
    Part part = args.part;
    part.weights += skip;
    part.factors = reinterpret_cast<const float*>(reinterpret_cast<const u8*>(part.factors) + skip);
    if (part.cells != nullptr) {
      part.cells = reinterpret_cast<const float*>(reinterpret_cast<const u8*>(part.cells) + skip);
    }
    const RowsOf rows = {
        args.x,     args.x_stride, GateUp ? args.route.slot_token : nullptr, block.first + block.count, args.columns,
        args.units, args.zero};
    const auto end = [&](int tile, int g, int slot, float low, float high) {
      if (slot >= rows.tokens) return;
      if constexpr (GateUp) {
        if (tile * 8 + g >= part.rows) return;
        static_cast<u16*>(args.out)[slot * args.out_stride + tile * 8 + g] = to_bf16(silu(low) * high);
      } else {
        if (tile * 16 + g >= part.rows) return;  // a multiple of 16
        float* out = static_cast<float*>(args.out) + slot * args.out_stride + moe::partial_place(tile, g);
        out[0] = low;
        out[1] = high;
      }
    };
    __syncthreads();  // the last block's stages are read
    with_format<Tile>(part.format,
                      [&]<Weights F>() { multiply_group<Tile, F>(rows, base, smem, part, group, block.first, end); });
  }
}

}  // namespace fourfold::gemm
