// Arguments of the sum over ranks, and the memory that ranks have for each other. Host and device, freestanding.
#pragma once

#include "kernels/norm/norm_args.h"

namespace fourfold::comm {

inline constexpr int kMostRanks = 8;
// A rank may put its part of the next sum before the slowest has read those of this one.
inline constexpr int kSlots = 2;

// What each rank has for the others, in memory of its own that they reach: parts, then flags. `rows`: of the largest
// sum; columns as in NormArgs.
struct Exchange {
  int ranks;
  int rows;
  int columns;

  // Of the part that `rank` puts there for a row: elements, bf16.
  FOURFOLD_HD constexpr long long part(int slot, int rank, int row) const {
    return ((static_cast<long long>(slot) * ranks + rank) * rows + row) * columns;
  }
  FOURFOLD_HD constexpr long long parts_bytes() const { return part(kSlots, 0, 0) * 2; }
  // flags[row][rank]: how often that rank has put its part of the row there. Zero at first.
  FOURFOLD_HD constexpr long long flag(int row, int rank) const { return static_cast<long long>(row) * ranks + rank; }
  FOURFOLD_HD constexpr long long bytes() const { return parts_bytes() + flag(rows, 0) * 4; }
};

// residual += the ranks' deltas, in the order of ranks, in fp32; out = bf16(residual / rms(residual) x weight). On
// every rank, with the same rows; one CTA of norm::kRowThreads a row.
struct ReduceArgs {
  norm::NormArgs norm;  // delta: this rank's part, not null
  Exchange exchange;
  unsigned char* memory[kMostRanks];  // Exchange::bytes() of each rank, as this rank reaches it
  int rank;
  // Of this rank's own, zero at first.
  unsigned* uses;    // [rows]: how often a row was summed
  unsigned* absent;  // [rows][ranks]: not zero: that rank did not come for the row, and is not waited for any more
  unsigned* failed;  // 1 + a rank that did not come
  unsigned long long patience;  // nanoseconds
};

}  // namespace fourfold::comm
