// A token's sum over its experts, of down's rows of groups (PackedGroup), in the columns that the threads of a norm
// have, with the bits of moe_combine_packed.
#pragma once

#include "kernels/moe/sum_args.h"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::moe {

namespace route_detail {

// The four values of a group (tables.h) times `factor`, added to sum.
__device__ __forceinline__ void add_group(unsigned w0, unsigned w1, float factor, float (&sum)[4]) {
  const unsigned exponent = ((w0 >> 5) & 0x07800000u) | ((w1 >> 1) & 0x78000000u);
  const float scale = exponent == 0x7f800000u ? __uint_as_float(0x7fc00000u) : __uint_as_float(exponent - 0x06000000u);
  const float f = factor * scale;
  const unsigned words[4] = {w0, w0 >> 14, w1, w1 >> 14};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += f * (__uint_as_float((words[i] & 0x3fffu) | 0x4b000000u) - 8396800.0f);
}

// What a row of groups counts: router weight times tensor scale.
__device__ __forceinline__ float group_factor(const int* ids, const float* weights, const float* scales, long long pick,
                                              int slot) {
  const float scale = scales == nullptr ? 1.0f : slot >= 0 ? scales[ids[pick]] * kEpilogueScale : 0.0f;
  return slot >= 0 ? weights[pick] * scale : 0.0f;
}

}  // namespace route_detail

// Of a token: lane i of each warp has choice i.
struct PackedPick {
  int slot;
  float factor;

  __device__ __forceinline__ void look_up(const RowSum& sum, long long token) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const long long pick = token * sum.top_k + lane;
    slot = lane < sum.top_k ? __ldcg(sum.pick_slot + pick) : -1;
    factor = route_detail::group_factor(sum.ids, sum.weights, sum.scales, pick, slot);
  }
};

// Thread v of norm::kRowThreads gets columns 8 v .. 8 v + 7, and 256 threads further on, rounded to bf16. All threads
// of a warp call it; `Rows` choices of a piece are under way at a time.
template <int Rows, int Pieces>
__device__ __forceinline__ void packed_sum(const RowSum& sum, const PackedPick& pick, int thread,
                                           uint4 (&words)[Pieces]) {
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    // 16 bytes of a row are two groups: columns 2 q, 2 q + 1 and 8, 16, 24 further on of the 32 that four threads have.
    const int piece = thread + p * norm::kRowThreads;
    const bool there = piece / 4 * 32 < sum.columns;
    float s[2][4] = {};
#pragma unroll 1
    for (int base = 0; base < sum.top_k; base += Rows) {
      uint4 v[Rows];
      float factor[Rows];
      bool counts[Rows];
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        const int slot = __shfl_sync(0xffffffffu, pick.slot, (base + i) % 32);
        factor[i] = __shfl_sync(0xffffffffu, pick.factor, (base + i) % 32);
        counts[i] = base + i < sum.top_k && slot >= 0;
        v[i] = make_uint4(0u, 0u, 0u, 0u);
        if (counts[i] && there) v[i] = __ldcs(reinterpret_cast<const uint4*>(sum.groups + slot * sum.stride) + piece);
      }
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        if (!counts[i]) continue;
        route_detail::add_group(v[i].x, v[i].y, factor[i], s[0]);
        route_detail::add_group(v[i].z, v[i].w, factor[i], s[1]);
      }
    }
    // Word i of thread q of four has columns 8 i + 2 q; wanted are those of columns 8 q on: a 4 x 4 transpose.
    ptx::u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = norm::to_bf16x2(s[0][i], s[1][i]);
    const auto trade = [&](ptx::u32& low, ptx::u32& high, int distance) {
      const bool upper = (thread & distance) != 0;
      const ptx::u32 got = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      (upper ? low : high) = got;
    };
    trade(w[0], w[2], 2);
    trade(w[1], w[3], 2);
    trade(w[0], w[1], 1);
    trade(w[2], w[3], 1);
    words[p] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

}  // namespace fourfold::moe
