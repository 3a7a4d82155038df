// Arguments of gemm_repack (repack.cuh). Host and device, freestanding.
#pragma once

#include "kernels/gemm/layout.h"

namespace fourfold::gemm {

// Row tiles [first_tile, first_tile + tiles) of a matrix or a pair of them, whole rows of which are at the sources.
struct RepackArgs {
  Source first;
  Source second;  // `first` again where there is no pair
  int paired;
  int first_tile;
  int tiles;
  int units;
  unsigned char* out;  // of row tile first_tile
  int* bad;            // [1] -1, or the greatest row tile with a NaN
};
inline constexpr int kRepackThreads = 64;

}  // namespace fourfold::gemm
