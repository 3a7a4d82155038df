// What is left between products and mixers: rounding, sums, the gate of an MLP, the shared expert's share.
#pragma once

#include "kernels/step/tables.cuh"
#include "nvfp4/number.h"

namespace fourfold::step {

__global__ void __launch_bounds__(kRowsThreads) round_rows(const __grid_constant__ RoundArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < args.columns; i += kRowsThreads) {
    args.out[t * args.out_stride + i] = nvfp4::float_to_bf16(__ldcg(args.x + t * args.x_stride + i));
  }
}

// For columns i, i + 1, ... of the row that are this thread's: eight at a time where they are whole pieces of 16 bytes,
// otherwise one by one.
template <typename Eight, typename One>
__device__ __forceinline__ void each_column(int columns, bool pieces, const Eight& eight, const One& one) {
  const int first = (static_cast<int>(blockIdx.y) * kRowsThreads + static_cast<int>(threadIdx.x)) * kRowsPiece;
  if (pieces) {
    if (first < columns) eight(first);
    return;
  }
  for (int i = first; i < columns && i < first + kRowsPiece; ++i) one(i);
}

struct Eight {
  float v[kRowsPiece];
};
__device__ __forceinline__ Eight unpacked(const uint4& w) {
  const unsigned words[4] = {w.x, w.y, w.z, w.w};
  Eight x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x.v[2 * i] = __uint_as_float(words[i] << 16);
    x.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  return x;
}
__device__ __forceinline__ uint4 packed(const Eight& x) {
  return make_uint4(ptx::to_bf16x2(x.v[0], x.v[1]), ptx::to_bf16x2(x.v[2], x.v[3]), ptx::to_bf16x2(x.v[4], x.v[5]),
                    ptx::to_bf16x2(x.v[6], x.v[7]));
}
__device__ __forceinline__ uint4 load_piece(const unsigned short* p) {
  return __ldcg(reinterpret_cast<const uint4*>(p));
}

__global__ void __launch_bounds__(kRowsThreads) add_rows(const __grid_constant__ AddArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  float* x = args.x + t * args.x_stride;
  const unsigned short* delta = args.delta + t * args.delta_stride;
  each_column(
      args.columns, args.pieces != 0,
      [&](int i) {
        float4* at = reinterpret_cast<float4*>(x + i);
        const uint4 words = load_piece(delta + i);
        const float4 low = __ldcg(at), high = __ldcg(at + 1);
        const Eight d = unpacked(words);
        at[0] = make_float4(low.x + d.v[0], low.y + d.v[1], low.z + d.v[2], low.w + d.v[3]);
        at[1] = make_float4(high.x + d.v[4], high.y + d.v[5], high.z + d.v[6], high.w + d.v[7]);
      },
      [&](int i) { x[i] = __ldcg(x + i) + nvfp4::bf16_to_float(__ldcg(delta + i)); });
}

__global__ void __launch_bounds__(kRowsThreads) gate_rows(const __grid_constant__ GateArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  const unsigned short* x = args.x + t * args.x_stride;
  unsigned short* out = args.out + t * args.out_stride;
  const auto gated = [](float gate, float up) { return gate / (1.0f + expf(-gate)) * up; };
  each_column(
      args.columns, args.pieces != 0,
      [&](int i) {
        const uint4 gates = load_piece(x + i), ups = load_piece(x + args.columns + i);
        Eight g = unpacked(gates);
        const Eight u = unpacked(ups);
#pragma unroll
        for (int e = 0; e < kRowsPiece; ++e) g.v[e] = gated(g.v[e], u.v[e]);
        *reinterpret_cast<uint4*>(out + i) = packed(g);
      },
      [&](int i) {
        out[i] = nvfp4::float_to_bf16(
            gated(nvfp4::bf16_to_float(__ldcg(x + i)), nvfp4::bf16_to_float(__ldcg(x + args.columns + i))));
      });
}

__global__ void __launch_bounds__(kRowsThreads) add_shared(const __grid_constant__ SharedArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  const unsigned short* x = args.x + t * args.x_stride;
  unsigned short* out = args.out + t * args.out_stride;
  const float logit = args.logits != nullptr ? __ldcg(args.logits + t * args.logits_stride) : 0.0f;
  const auto weight = [&] { return args.logits != nullptr ? 1.0f / (1.0f + expf(-logit)) : 1.0f; };
  each_column(
      args.columns, args.pieces != 0,
      [&](int i) {
        const uint4 shares = load_piece(x + i), before = load_piece(out + i);
        const Eight share = unpacked(shares);
        Eight sum = unpacked(before);
#pragma unroll
        for (int e = 0; e < kRowsPiece; ++e) sum.v[e] = fmaf(weight(), share.v[e], sum.v[e]);
        *reinterpret_cast<uint4*>(out + i) = packed(sum);
      },
      [&](int i) {
        const float share = nvfp4::bf16_to_float(__ldcg(x + i));
        out[i] = nvfp4::float_to_bf16(fmaf(weight(), share, nvfp4::bf16_to_float(__ldcg(out + i))));
      });
}

// A step's tables without the copy engine, which costs more to get to than they take to read. Who reads them does so
// without a wait: nothing starts before this kernel has ended.
__global__ void __launch_bounds__(kTablesThreads) copy_tables(const __grid_constant__ TablesArgs args) {
  const int thread = static_cast<int>(threadIdx.x);
  const CarryArgs& carry = args.carry;
  const FirstPieces first = first_pieces(args, thread);
  CarriedToken carried = {};
  Stops stops = {};
  if (thread < carry.count) {
    carried = carry.rows[thread];
    stops = stops_of(carry.stops + carried.stop_first, carried.stop_count);
  }
  ptx::grid_dependency_wait();
  copy_pieces(args, first, thread);
  if (carry.count == 0) return;
  __syncthreads();
  for (int i = thread; i < carry.count; i += kTablesThreads) {
    if (i != thread) {
      carried = carry.rows[i];
      stops = stops_of(carry.stops + carried.stop_first, carried.stop_count);
    }
    const int token = carry.chosen[carried.choice];
    carry.tokens[carried.row] = token < 0 ? 0 : token;
    if (token < 0 || stops.have(token)) carry.sequences[carried.place].count = 0;
  }
}

}  // namespace fourfold::step
