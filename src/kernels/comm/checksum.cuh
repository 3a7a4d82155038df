// A number that two ranks have in common if they have the same bits: of rows of words, whatever the order in which they
// are added up.
#pragma once

#include "kernels/comm/reduce_args.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::comm {

using namespace ptx;

// *sum += the checksum. A CTA a row.
__global__ void __launch_bounds__(kGatherThreads) checksum_rows(const __grid_constant__ ChecksumArgs args) {
  grid_launch_dependents();
  grid_dependency_wait();
  const unsigned* words = args.words + blockIdx.x * args.stride;
  const long long first = static_cast<long long>(blockIdx.x) * args.columns;
  unsigned long long sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < args.columns; i += kGatherThreads) {
    sum += checksum_of(first + i, __ldcg(words + i));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (threadIdx.x % 32 == 0) atomicAdd(args.sum, sum);
}

}  // namespace fourfold::comm
