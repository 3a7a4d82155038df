// Weights from a checkpoint's form to the stored form (layout.h) on the device, once at load.
#pragma once

#include "kernels/gemm/repack_args.h"

namespace fourfold::gemm {

// Any grid; one thread repacks one unit at a time. 16 CTAs per SM: for more, NVRTC would spill.
__global__ void __launch_bounds__(kRepackThreads, 16) gemm_repack(const __grid_constant__ RepackArgs args) {
  const long long all = static_cast<long long>(args.tiles) * args.units;
  const int bytes = unit_bytes(packed_format(args.first.stored));
  for (long long i = static_cast<long long>(blockIdx.x) * kRepackThreads + threadIdx.x; i < all;
       i += static_cast<long long>(gridDim.x) * kRepackThreads) {
    const int tile = args.first_tile + static_cast<int>(i / args.units);
    if (!repack_unit(args.first, args.second, args.paired != 0, tile, static_cast<int>(i % args.units),
                     args.out + i * bytes)) {
      atomicMax(args.bad, tile);
    }
  }
}

}  // namespace fourfold::gemm
