// What the kernels that bring a step's tables have in common. What they read lies in the host's memory for the most
// part, a microsecond away, so it is asked for before the wait for the kernel in front.
#pragma once

#include "kernels/ptx/sm90.cuh"
#include "kernels/step/rows_args.h"

namespace fourfold::step {

// Each table's first 16 bytes of a thread.
struct FirstPieces {
  uint4 pieces[kMostTables];
};
__device__ __forceinline__ FirstPieces first_pieces(const TablesArgs& args, int thread) {
  FirstPieces first = {};
#pragma unroll
  for (int t = 0; t < kMostTables; ++t) {
    const TableCopy& table = args.tables[t];
    if (t < args.count && thread < table.bytes / 16) first.pieces[t] = static_cast<const uint4*>(table.from)[thread];
  }
  return first;
}
__device__ __forceinline__ void copy_pieces(const TablesArgs& args, const FirstPieces& first, int thread) {
#pragma unroll
  for (int t = 0; t < kMostTables; ++t) {
    if (t >= args.count) break;
    const TableCopy& table = args.tables[t];
    const uint4* from = static_cast<const uint4*>(table.from);
    uint4* to = static_cast<uint4*>(table.to);
    if (thread < table.bytes / 16) to[thread] = first.pieces[t];
    for (long long i = thread + kTablesThreads; i < table.bytes / 16; i += kTablesThreads) to[i] = from[i];
  }
}

// Stop tokens of a lane, of which the first ones have been asked for.
inline constexpr int kEarlyStops = 4;
struct Stops {
  const int* all;
  int count;
  int early[kEarlyStops];

  __device__ __forceinline__ bool have(int token) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kEarlyStops; ++i) found |= i < count && early[i] == token;
    for (int i = kEarlyStops; i < count; ++i) found |= all[i] == token;
    return found;
  }
};
__device__ __forceinline__ Stops stops_of(const int* all, int count) {
  Stops stops = {all, count, {}};
#pragma unroll
  for (int i = 0; i < kEarlyStops; ++i) {
    if (i < count) stops.early[i] = all[i];
  }
  return stops;
}

}  // namespace fourfold::step
