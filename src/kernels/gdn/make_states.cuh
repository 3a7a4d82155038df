// States of slots that hold updates (updates.h): for who reads slots without them.
#pragma once

#include "kernels/gdn/panel.cuh"
#include "kernels/gdn/updates.h"

namespace fourfold::gdn {

// A CTA has a group of panels of one head, layer and slot, and reads all of it before it writes: updates may lie where
// the state goes. Grid: make_states_launch().
template <int KeyDim, int ValueDim>
__global__ void __launch_bounds__(32 * update_group(ValueDim))
    delta_make_states(const __grid_constant__ MakeStatesArgs args) {
  constexpr int kGroup = update_group(ValueDim);
  constexpr int kKeys = KeyDim / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const MadeState& made = args.made[blockIdx.z];
  // Groups of a head, and heads, follow each other.
  const long long group_at =
      blockIdx.y * args.layer_stride + static_cast<long long>(blockIdx.x) * (kGroup * KeyDim * kPanel);
  const int panel_at = warp * (KeyDim * kPanel);
  const float4* base =
      reinterpret_cast<const float4*>(args.states + made.base * args.state_stride + group_at + panel_at) + lane;
  ptx::grid_dependency_wait();
  float4 state[kKeys];
#pragma unroll
  for (int j = 0; j < kKeys; ++j) state[j] = base[j * 32];
  const float* keys = args.states + made.from * args.state_stride + group_at;
#pragma unroll 1
  for (int i = 0; i < made.count; ++i, keys += update_floats(KeyDim)) {
    add_update(state, keys, keys + panel_at + KeyDim, lane);
  }
  __syncthreads();
  float4* to = reinterpret_cast<float4*>(args.states + made.slot * args.state_stride + group_at + panel_at) + lane;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) to[j * 32] = state[j];
}

}  // namespace fourfold::gdn
