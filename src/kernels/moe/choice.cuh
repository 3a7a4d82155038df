// The router's choice: softmax and top-k of a row's logits by one warp.
#pragma once

#include "kernels/moe/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

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

// Choice `lane` of a row, of its top_k and the slices of the shared expert; beyond them id is -1.
struct Choice {
  int id;
  float weight;
};

// kMost: logits of a lane at most: experts lane, lane + 32, ... logit(column) is one of the row's, but for a positive
// factor that does not matter before the experts are chosen: factor().
template <int kMost, typename Logit, typename Factor>
__device__ __forceinline__ Choice choose_experts_of(const ChoiceArgs& args, int lane, const Logit& logit,
                                                    const Factor& factor) {
  unsigned keys[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    keys[i] = i * 32 + lane < args.experts ? order_key(logit(i * 32 + lane)) : 0u;
  }
  const float gate = args.slices > 0 && args.gate >= 0 ? logit(args.gate) : 0.0f;

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
  const float scale = factor();
  const float most = key_value(first);
  const float mine = chosen != 0 ? exp_of((key_value(chosen) - most) * scale) : 0.0f;
  float sum = mine;
  if (args.renormalize == 0) {  // the others count too
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (keys[i] != 0) sum += exp_of((key_value(keys[i]) - most) * scale);
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (lane < args.top_k) {
    const int local = id - args.first_here;
    const bool elsewhere = args.here > 0 && (local < 0 || local >= args.here);
    return {id < 0 || elsewhere ? -1 : local, id >= 0 ? mine / sum : 0.0f};
  }
  if (lane >= args.top_k + args.slices) return {-1, 0.0f};
  return {args.first_slice + lane - args.top_k, args.gate >= 0 ? 1.0f / (1.0f + exp_of(-gate * scale)) : 1.0f};
}

// A whole warp.
template <typename Logit, typename Factor>
__device__ __forceinline__ Choice choose_experts(const ChoiceArgs& args, int lane, const Logit& logit,
                                                 const Factor& factor) {
  if (args.experts <= 256) return choose_experts_of<8>(args, lane, logit, factor);
  if (args.experts <= 512) return choose_experts_of<16>(args, lane, logit, factor);
  return choose_experts_of<kMaxExperts / 32>(args, lane, logit, factor);
}

// To args.ids and args.weights.
template <typename Logit, typename Factor>
__device__ __forceinline__ void store_choice(const ChoiceArgs& args, int t, int lane, const Logit& logit,
                                             const Factor& factor) {
  const Choice choice = choose_experts(args, lane, logit, factor);
  if (lane >= args.top_k + args.slices) return;
  args.ids[t * args.width + lane] = choice.id;
  args.weights[t * args.width + lane] = choice.weight;
}
// Of args.logits.
__device__ __forceinline__ void store_choice(const ChoiceArgs& args, int t, int lane) {
  const float* logits = args.logits + t * args.logits_stride;
  store_choice(
      args, t, lane, [&](int column) { return __ldcg(logits + column); }, [] { return 1.0f; });
}

}  // namespace fourfold::moe
