// What the kernels without sorting (one_sm90.cuh, few_sm90.cuh) have in common: their barriers, and the end of a layer.
#pragma once

#include "kernels/moe/stream_shape.h"
#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe::stream_detail {

using namespace ptx;

// Where they are in shared memory (StreamShape::kBarriers), a ring's first.
template <typename Tile>
struct UnsortedBarriers {
  using T = StreamShape<Tile>;
  u32 at;

  __device__ __forceinline__ u32 full(u32 stage) const { return at + 8u * stage; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(static_cast<u32>(T::stages) + stage); }
  // Gate-up's two buffers of partial sums, and for few tokens: its token rows with the tokens of each expert.
  __device__ __forceinline__ u32 summed(u32 half) const { return full(2u * static_cast<u32>(T::stages) + half); }
  __device__ __forceinline__ u32 taken(u32 half) const { return summed(2u + half); }
  __device__ __forceinline__ u32 rows_full() const { return summed(4u); }

  // By one thread. Arrivals at a full stage, and at the rows: 0 where there are none.
  __device__ __forceinline__ void init(u32 stage_arrivals, u32 row_arrivals) const {
    if (T::gate_up) {
      for (u32 i = 0; i < 2; ++i) {
        mbarrier_init(summed(i), T::wk);
        mbarrier_init(taken(i), 1);
      }
      if (row_arrivals > 0) mbarrier_init(rows_full(), row_arrivals);
    }
    for (u32 s = 0; s < static_cast<u32>(T::stages); ++s) {
      mbarrier_init(full(s), stage_arrivals);
      mbarrier_init(empty(s), T::wu);
    }
    fence_barrier_init();
  }
};

// The end of down's warp that brings weights. Whoever waits for down's end may rely on gate-up's. When no CTA of either
// asks any more, the other half's turn comes; `rows` of the present one have been written.
__device__ __forceinline__ void end_turn(OneTurn* turn, int half, int rows, int lane) {
  grid_dependency_wait();
  if (lane != 0) return;
  __threadfence();
  if (atomicAdd(&turn->arrived, 1) == static_cast<int>(gridDim.x) - 1) {
    turn->arrived = 0;
    turn->rows = rows;
    turn->half = half ^ 1;
  }
}

}  // namespace fourfold::moe::stream_detail
