// Arguments of gemm_unpack (unpack.cuh). Host and device, freestanding.
#pragma once

#include "kernels/gemm/layout.h"

namespace fourfold::gemm {

struct UnpackArgs {
  Part part;  // not paired, without cells
  int tiles;  // of it
  int units;
  int columns;          // a multiple of 16
  unsigned short* out;  // [part.rows][columns] bf16
};
inline constexpr int kUnpackThreads = 128;

}  // namespace fourfold::gemm
