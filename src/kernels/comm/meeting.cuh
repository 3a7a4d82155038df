// How the CTAs of ranks meet over a row: each puts its part into every other rank's memory, raises a flag there, and
// waits for the flags of all in its own. docs/kernels/comm.md
#pragma once

#include "kernels/comm/reduce_args.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::comm {

using namespace ptx;

// Of a row: which time it is that it is exchanged; and whether the rank that this thread meets was given up before.
struct Turn {
  u32 use;
  bool given_up;
  __device__ __forceinline__ int slot() const { return static_cast<int>(use % kSlots); }
};

__device__ __forceinline__ u16* part_of(const Peers& peers, int memory, int slot, int rank, int row) {
  return reinterpret_cast<u16*>(peers.memory[memory]) + peers.exchange.flag_part(slot, rank, row);
}
__device__ __forceinline__ u32* flag_of(const Peers& peers, int memory, int row, int rank) {
  return reinterpret_cast<u32*>(peers.memory[memory] + peers.exchange.flag_parts_bytes()) +
         peers.exchange.flag(row, rank);
}
// The thread that meets rank `thread`.
__device__ __forceinline__ bool meets(const Peers& peers, int thread) {
  return thread < peers.exchange.ranks && thread != peers.rank;
}

// That `rank` did not come.
__device__ __forceinline__ void give_up(const Peers& peers, int rank) {
  atomicMax(peers.absent + rank, 1u);
  raise_peer_flag(peers.report, 1u + static_cast<u32>(rank));
}

// The slot is free: every rank has raised its flag for the row since it read what was there.
__device__ __forceinline__ Turn begin_turn(const Peers& peers, int row, int thread) {
  return {__ldcg(peers.uses + row) + 1u, meets(peers, thread) && __ldcg(peers.absent + thread) != 0u};
}
// The CTA's threads have put the row's part into the others' memory.
__device__ __forceinline__ void end_put(const Peers& peers, int row, const Turn& turn, int thread) {
  __syncthreads();
  if (meets(peers, thread)) raise_peer_flag(flag_of(peers, thread, row, peers.rank), turn.use);
}
// The others' parts of the row are in this rank's memory.
__device__ __forceinline__ void await_parts(const Peers& peers, int row, const Turn& turn, int thread) {
  if (meets(peers, thread) && !turn.given_up &&
      !wait_peer_flag(flag_of(peers, peers.rank, row, thread), turn.use, peers.patience)) {
    give_up(peers, thread);
  }
  __syncthreads();
  if (thread == 0) peers.uses[row] = turn.use;
}

}  // namespace fourfold::comm
