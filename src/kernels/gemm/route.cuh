// The router's choice as a kernel of its own.
#pragma once

#include "kernels/gemm/rows_tile.h"
#include "kernels/moe/choice.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gemm {

__device__ __forceinline__ void route_row(const RouteArgs& args, int t, int lane) {
  const moe::Choice choice = moe::choose_experts(args, t, lane);
  if (lane >= args.top_k + args.slices) return;
  args.ids[t * args.width + lane] = choice.id;
  args.weights[t * args.width + lane] = choice.weight;
}

// Logits that another kernel computed. One warp a row. The next kernel is let in behind the wait: the experts have
// nothing to ask for before they know which they are, and CTAs of theirs that were there while the output projection
// ran made a step of 35B 3 % longer.
__global__ void __launch_bounds__(kRouteThreads) gemm_route(const __grid_constant__ RouteArgs args) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int t = static_cast<int>((blockIdx.x * kRouteThreads + threadIdx.x) / 32);
  if (t < args.tokens) route_row(args, t, static_cast<int>(threadIdx.x) % 32);
}

}  // namespace fourfold::gemm
