// What is left between products and mixers: rounding, sums, the gate of an MLP, the shared expert's share.
#pragma once

#include "kernels/ptx/sm90.cuh"
#include "kernels/step/rows_args.h"
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

__global__ void __launch_bounds__(kRowsThreads) add_rows(const __grid_constant__ AddArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < args.columns; i += kRowsThreads) {
    float* x = args.x + t * args.x_stride + i;
    *x = __ldcg(x) + nvfp4::bf16_to_float(__ldcg(args.delta + t * args.delta_stride + i));
  }
}

__global__ void __launch_bounds__(kRowsThreads) gate_rows(const __grid_constant__ GateArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < args.columns; i += kRowsThreads) {
    const unsigned short* x = args.x + t * args.x_stride + i;
    const float gate = nvfp4::bf16_to_float(__ldcg(x));
    const float up = nvfp4::bf16_to_float(__ldcg(x + args.columns));
    args.out[t * args.out_stride + i] = nvfp4::float_to_bf16(gate / (1.0f + expf(-gate)) * up);
  }
}

__global__ void __launch_bounds__(kRowsThreads) add_shared(const __grid_constant__ SharedArgs args) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const long long t = blockIdx.x;
  const float weight =
      args.logits != nullptr ? 1.0f / (1.0f + expf(-__ldcg(args.logits + t * args.logits_stride))) : 1.0f;
  for (int i = static_cast<int>(threadIdx.x); i < args.columns; i += kRowsThreads) {
    unsigned short* out = args.out + t * args.out_stride + i;
    const float share = nvfp4::bf16_to_float(__ldcg(args.x + t * args.x_stride + i));
    *out = nvfp4::float_to_bf16(fmaf(weight, share, nvfp4::bf16_to_float(__ldcg(out))));
  }
}

// A step's tables without the copy engine, which costs more to get to than they take to read. Who reads them does so
// without a wait: nothing starts before this kernel has ended.
__global__ void __launch_bounds__(kTablesThreads) copy_tables(const __grid_constant__ TablesArgs args) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int t = 0; t < args.count; ++t) {
    const TableCopy& table = args.tables[t];
    const uint4* from = static_cast<const uint4*>(table.from);
    uint4* to = static_cast<uint4*>(table.to);
    for (long long i = thread; i < table.bytes / 16; i += kTablesThreads) to[i] = from[i];
  }
  const CarryArgs& carry = args.carry;
  if (carry.count == 0) return;
  __syncthreads();
  for (int i = thread; i < carry.count; i += kTablesThreads) {
    const CarriedToken carried = carry.rows[i];
    const int token = carry.chosen[carried.choice];
    bool ended = token < 0;
    for (int k = 0; k < carried.stop_count; ++k) ended = ended || token == carry.stops[carried.stop_first + k];
    carry.tokens[carried.row] = token < 0 ? 0 : token;
    if (ended) carry.sequences[carried.place].count = 0;
  }
}

}  // namespace fourfold::step
