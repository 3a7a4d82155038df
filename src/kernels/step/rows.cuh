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

// Who reads these tables does so without a wait: nothing starts before this kernel has ended.
__global__ void __launch_bounds__(kRowsThreads) carry_tokens(const __grid_constant__ CarryArgs args) {
  const int i = static_cast<int>(blockIdx.x) * kRowsThreads + static_cast<int>(threadIdx.x);
  if (i >= args.count) return;
  const CarriedToken carried = args.rows[i];
  const int token = args.chosen[carried.choice];
  bool ended = token < 0;
  for (int k = 0; k < carried.stop_count; ++k) ended = ended || token == args.stops[carried.stop_first + k];
  args.tokens[carried.row] = token < 0 ? 0 : token;
  if (ended) args.sequences[carried.place].count = 0;
}

}  // namespace fourfold::step
