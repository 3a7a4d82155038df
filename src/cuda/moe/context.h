// What the parts of an expert layer share: the device, the shape, and the kernels that every plan uses.
#pragma once

#include "cuda/device/device.h"
#include "plan/moe/problem.h"

namespace fourfold::cuda {

struct FixedKernels {
  Kernel route, route_count, route_scatter, combine, combine_beside, combine_packed;  // kernels/moe/route_sm90.cuh
  Kernel repack, pad_rows, append_shared;                                             // kernels/moe/prepare.cuh
  Kernel quantise;  // kernels/moe/fp4_sm120.cuh; only where a plan multiplies NVFP4 activations
};

struct LayerContext {
  const Device* device = nullptr;
  plan::moe::Problem problem;  // `tokens` is not used
  const FixedKernels* kernels = nullptr;
};

}  // namespace fourfold::cuda
