// Rows that nobody will read again.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

namespace route_detail {

// A warp has added up its 512 bytes, from `first` on, of each of a token's `count` rows, and nobody will read them
// again: what of them is in L2 only need not be written to memory. A lane takes line l % 4 of row l / 4.
__device__ __forceinline__ void discard_rows(const void* rows, long long row_bytes, const int* slots, int count,
                                             int first) {
  if (row_bytes % 128 != 0) return;  // lines of two rows
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int line = first + lane % 4 * 128;
  for (int i = lane / 4; i < count; i += 8) {
    if (line < row_bytes && slots[i] >= 0) {
      ptx::discard_l2(static_cast<char*>(const_cast<void*>(rows)) + slots[i] * row_bytes + line);
    }
  }
}

}  // namespace route_detail

}  // namespace fourfold::moe
