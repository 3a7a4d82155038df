// The router's choice as a kernel of its own.
#pragma once

#include "kernels/gemm/rows_tile.h"
#include "kernels/moe/choice.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gemm {

// Logits that another kernel computed. One warp a row. The next kernel is let in behind the wait: the experts have
// nothing to ask for before they know which they are, and CTAs of theirs that were there while the output projection
// ran made a step of 35B 3 % longer.
__global__ void __launch_bounds__(kRouteThreads) gemm_route(const __grid_constant__ RouteArgs args) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int t = static_cast<int>((blockIdx.x * kRouteThreads + threadIdx.x) / 32);
  if (t < args.tokens) moe::store_choice(args, t, static_cast<int>(threadIdx.x) % 32);
}

}  // namespace fourfold::gemm
