// The second node of attention for few rows (decode.cuh): adds up a sequence's splits in their order, and applies the
// output gate. Of few heads and rows each has a CTA (attention_combine); of more than there is room for at once each
// has a warp (attention_combine_many), which asks for all that it wants behind one wait. The same sums in the same
// order.
#pragma once

#include "kernels/attn/decode_tile.h"
#include "kernels/attn/rows.cuh"

namespace fourfold::attn {

namespace combine_detail {

constexpr u32 kAll = 0xffffffffu;

// A sequence's splits are kParts sums beside each other: split i is added to sum i % kParts.
template <int HeadDim>
inline constexpr int kParts = kCombineThreads / (HeadDim / 4);

// The sequence at `place`, which is asked for before the wait for its splits, behind that wait; no rows where `row` is
// none of it.
__device__ __forceinline__ SequenceRows wait_for(const AttentionArgs& args, int place, int row) {
  if (args.settled == 0) ptx::grid_dependency_wait();
  SequenceRows sequence = args.sequences[place];  // of the bucket, live or not: both are asked for at once
  if (place >= *args.live) sequence.count = 0;
  sequence.count = sequence.count < args.most_rows ? sequence.count : args.most_rows;
  if (sequence.first < 0 || row >= sequence.count) sequence.count = 0;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  return sequence;
}

// What a head of a row is made of: where the first of its splits is, and how far the next one.
struct Splits {
  long long first, stride;  // in rows of head_dim
  int count;
};
__device__ __forceinline__ Splits splits_of(const AttentionArgs& args, const SequenceRows& sequence, int place,
                                            int head, int row) {
  const AttentionShape& shape = args.shape;
  const int group = shape.group();
  const long long stride = args.most_rows * group;
  return {(static_cast<long long>(place) * shape.kv_heads + head / group) * args.splits * stride + row * group +
              head % group,
          stride, split_count(sequence.position + sequence.count)};
}

// A warp's: {largest score, sum} of splits lane, lane + 32 ..; then the splits' weights.
struct Weights {
  float2 s[kMostSplits / 32];

  __device__ __forceinline__ void load(const AttentionArgs& args, const Splits& splits, int lane) {
    const float2* from = reinterpret_cast<const float2*>(args.partial_sums) + splits.first;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      const int split = lane + 32 * i;
      s[i] = split < splits.count ? from[split * splits.stride] : make_float2(kNobody, 0.0f);
    }
  }
  __device__ __forceinline__ void settle() {
    float most = kNobody;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) most = fmaxf(most, s[i].x);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, d));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      s[i].x = ptx::exp2_approx(s[i].x - most);
      sum += s[i].x * s[i].y;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) s[i].x /= sum;
  }
};

__device__ __forceinline__ float gated(float y, u32 gate) { return y / (1.0f + expf(-__uint_as_float(gate << 16))); }

}  // namespace combine_detail

// Grid: combine_launch, heads x rows of a sequence x sequences of the bucket.
template <int HeadDim>
__global__ void __launch_bounds__(kCombineThreads) attention_combine(const __grid_constant__ AttentionArgs args) {
  using namespace combine_detail;
  constexpr int kQuads = HeadDim / 4;
  __shared__ float weights[kMostSplits];
  __shared__ float4 sums[kParts<HeadDim>][kQuads];
  const int tid = static_cast<int>(threadIdx.x);
  const AttentionShape& shape = args.shape;
  const int head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int place = static_cast<int>(blockIdx.z);
  const SequenceRows sequence = wait_for(args, place, row);
  if (sequence.count <= 0) return;
  const Splits splits = splits_of(args, sequence, place, head, row);
  if (tid < 32) {
    Weights w;
    w.load(args, splits, tid);
    w.settle();
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) weights[tid + 32 * i] = w.s[i].x;
  }
  // Asked for before the weights are known.
  constexpr int kAtOnce = 8;
  const int quad = tid % kQuads;
  const int mine = tid / kQuads;
  const float4* from = reinterpret_cast<const float4*>(args.partial) + splits.first * kQuads + quad;
  const auto load = [&](float4(&x)[kAtOnce], int round) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = (round * kAtOnce + i) * kParts<HeadDim> + mine;
      x[i] = split < splits.count ? from[split * splits.stride * kQuads] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  };
  float4 x[kAtOnce];
  load(x, 0);
  __syncthreads();
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int round = 0; round * kAtOnce * kParts<HeadDim> < splits.count; ++round) {
    if (round > 0) load(x, round);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = (round * kAtOnce + i) * kParts<HeadDim> + mine;
      const float w = split < splits.count ? weights[split] : 0.0f;
      sum.x += w * x[i].x;
      sum.y += w * x[i].y;
      sum.z += w * x[i].z;
      sum.w += w * x[i].w;
    }
  }
  sums[mine][quad] = sum;
  __syncthreads();
  const u16* gates = args.rows + (sequence.first + row) * args.row_stride + shape.gate_column(head);
  u16* out = args.out + (sequence.first + row) * args.out_stride + head * HeadDim;
  for (int d = tid * 2; d < HeadDim; d += kCombineThreads * 2) {
    float y[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < kParts<HeadDim>; ++k) y[i] += reinterpret_cast<const float*>(&sums[k][0])[d + i];
      if (shape.gated) y[i] = gated(y[i], gates[d + i]);
    }
    *reinterpret_cast<u32*>(out + d) = ptx::to_bf16x2(y[0], y[1]);
  }
}

// Grid: combine_many_launch, heads of all rows of a sequence, kCombineWarps to a CTA, x sequences of the bucket.
template <int HeadDim>
__global__ void __launch_bounds__(kCombineWarps * 32)
    attention_combine_many(const __grid_constant__ AttentionArgs args) {
  using namespace combine_detail;
  constexpr int kQuads = HeadDim / 4;
  constexpr int kLaneQuads = (kQuads + 31) / 32;
  constexpr int kSums = kParts<HeadDim>;
  const AttentionShape& shape = args.shape;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int index = static_cast<int>(blockIdx.x) * kCombineWarps + static_cast<int>(threadIdx.x) / 32;
  const int head = index % shape.heads;
  const int row = index / shape.heads;
  const int place = static_cast<int>(blockIdx.y);
  const SequenceRows sequence = wait_for(args, place, row);
  if (sequence.count <= 0) return;
  const Splits splits = splits_of(args, sequence, place, head, row);
  Weights w;
  w.load(args, splits, lane);
  const bool there = kQuads >= 32 || lane < kQuads;
  const u16* gates = args.rows + (sequence.first + row) * args.row_stride + shape.gate_column(head);
  uint2 gate[kLaneQuads] = {};
#pragma unroll
  for (int q = 0; q < kLaneQuads; ++q) {
    if (there && shape.gated) gate[q] = *reinterpret_cast<const uint2*>(gates + (lane + 32 * q) * 4);
  }
  const float4* from = reinterpret_cast<const float4*>(args.partial) + splits.first * kQuads + lane;
  // kSums splits a round, and as many rounds at once as there are registers for.
  constexpr int kRounds = 16 / (kSums * kLaneQuads) > 0 ? 16 / (kSums * kLaneQuads) : 1;
  float4 x[kRounds][kSums][kLaneQuads];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRounds * kSums; ++i) {
#pragma unroll
      for (int q = 0; q < kLaneQuads; ++q) {
        x[i / kSums][i % kSums][q] = there && first + i < splits.count
                                         ? from[(first + i) * splits.stride * kQuads + 32 * q]
                                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  };
  load(0);
  w.settle();
  float4 sum[kSums][kLaneQuads];
#pragma unroll
  for (int i = 0; i < kSums * kLaneQuads; ++i) {
    sum[i / kLaneQuads][i % kLaneQuads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll 1
  for (int first = 0; first < splits.count; first += kRounds * kSums) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kRounds * kSums; ++i) {
      const int split = first + i;  // the same for all lanes
      float mine = w.s[0].x;
#pragma unroll
      for (int k = 1; k < kMostSplits / 32; ++k) mine = split / 32 == k ? w.s[k].x : mine;
      const float theirs = __shfl_sync(kAll, mine, split % 32);
      const float weight = split < splits.count ? theirs : 0.0f;
#pragma unroll
      for (int q = 0; q < kLaneQuads; ++q) {
        float4& to = sum[i % kSums][q];
        const float4& v = x[i / kSums][i % kSums][q];
        to.x += weight * v.x;
        to.y += weight * v.y;
        to.z += weight * v.z;
        to.w += weight * v.w;
      }
    }
  }
  u16* out = args.out + (sequence.first + row) * args.out_stride + head * HeadDim;
#pragma unroll
  for (int q = 0; q < kLaneQuads; ++q) {
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      y.x += sum[k][q].x;
      y.y += sum[k][q].y;
      y.z += sum[k][q].z;
      y.w += sum[k][q].w;
    }
    if (shape.gated) {
      y.x = gated(y.x, gate[q].x & 0xffffu);
      y.y = gated(y.y, gate[q].x >> 16);
      y.z = gated(y.z, gate[q].y & 0xffffu);
      y.w = gated(y.w, gate[q].y >> 16);
    }
    if (there) {
      *reinterpret_cast<uint2*>(out + (lane + 32 * q) * 4) =
          make_uint2(ptx::to_bf16x2(y.x, y.y), ptx::to_bf16x2(y.z, y.w));
    }
  }
}

}  // namespace fourfold::attn
