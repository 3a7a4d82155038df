// The router's choice: softmax and top-k of a row's logits by one warp.
#pragma once

#include "kernels/gemm/rows_tile.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gemm {

// Greater floats have greater keys, and NaN has the least.
__device__ __forceinline__ unsigned order_key(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_value(unsigned key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ float exp_of(float x) { return ptx::exp2_approx(x * 1.4426950408889634f); }

// kMost: logits of a lane at most: experts lane, lane + 32, ...
template <int kMost>
__device__ __forceinline__ void route_row_of(const RouteArgs& args, int t, int lane) {
  const float* logits = args.logits + t * args.logits_stride;
  unsigned keys[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    keys[i] = i * 32 + lane < args.experts ? order_key(__ldcg(logits + i * 32 + lane)) : 0u;
  }
  const float gate = args.slices > 0 && args.gate >= 0 ? __ldcg(logits + args.gate) : 0.0f;

  // Choice c is kept by lane c.
  int id = -1;
  unsigned chosen = 0;
  unsigned first = 0;  // the largest key
  for (int c = 0; c < args.top_k; ++c) {
    unsigned best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        at = i * 32 + lane;
      }
    }
    const unsigned largest = __reduce_max_sync(0xffffffffu, best);
    if (c == 0) first = largest;
    const unsigned expert = __reduce_min_sync(0xffffffffu, best == largest ? static_cast<unsigned>(at) : ~0u);
    if (lane == c && largest != 0) {
      id = static_cast<int>(expert);
      chosen = largest;
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (static_cast<unsigned>(i * 32 + lane) == expert) keys[i] = 0;
    }
  }
  const float most = key_value(first);
  const float mine = chosen != 0 ? exp_of(key_value(chosen) - most) : 0.0f;
  float sum = mine;
  if (args.renormalize == 0) {  // the others count too
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (keys[i] != 0) sum += exp_of(key_value(keys[i]) - most);
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (lane < args.top_k) {
    const int local = id - args.first_here;
    const bool elsewhere = args.here > 0 && (local < 0 || local >= args.here);
    args.ids[t * args.width + lane] = id < 0 || elsewhere ? -1 : local;
    args.weights[t * args.width + lane] = id >= 0 ? mine / sum : 0.0f;
  } else if (lane < args.top_k + args.slices) {
    args.ids[t * args.width + lane] = args.first_slice + lane - args.top_k;
    args.weights[t * args.width + lane] = args.gate >= 0 ? 1.0f / (1.0f + exp_of(-gate)) : 1.0f;
  }
}

__device__ __forceinline__ void route_row(const RouteArgs& args, int t, int lane) {
  if (args.experts <= 256) {
    route_row_of<8>(args, t, lane);
  } else if (args.experts <= 512) {
    route_row_of<16>(args, t, lane);
  } else {
    route_row_of<kMostRouted / 32>(args, t, lane);
  }
}

// Logits that another kernel computed. One warp a row.
__global__ void __launch_bounds__(kRouteThreads) gemm_route(const __grid_constant__ RouteArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const int t = static_cast<int>((blockIdx.x * kRouteThreads + threadIdx.x) / 32);
  if (t < args.tokens) route_row(args, t, static_cast<int>(threadIdx.x) % 32);
}

}  // namespace fourfold::gemm
