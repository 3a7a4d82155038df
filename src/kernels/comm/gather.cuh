// The ranks' columns of rows side by side on every rank, over peer memory (meeting.cuh), and what shows at start-up
// that peer memory is what it seems. docs/kernels/comm.md
#pragma once

#include "kernels/comm/meeting.cuh"

namespace fourfold::comm {

__global__ void __launch_bounds__(kGatherThreads, kGatherCtas)
    gather_parts(const __grid_constant__ GatherColumnsArgs args) {
  const Peers& peers = args.peers;
  if (peers.early != 0) grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), words = words_of_piece(peers.exchange);
  grid_dependency_wait();
  // A piece of a rank's part: its first word among the part's, and how many.
  const auto place = [&](int item, int rank, int& first) {
    first = item % args.pieces * words;
    const int left = args.first[rank + 1] - args.first[rank] - first;
    return left < words ? left : words;
  };
  const int items = args.rows * args.pieces;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const int row = item / args.pieces;
    const Turn turn = begin_turn(peers, item, thread);
    int first;
    const int mine = place(item, peers.rank, first);
    const u32* from = args.part + row * args.part_stride + first;
    u32* own = args.out + row * args.out_stride + args.first[peers.rank] + first;
    for (int i = thread; i < mine; i += kGatherThreads) {
      const u32 word = __ldcg(from + i);
      for (int rank = 0; rank < peers.exchange.ranks; ++rank) {
        if (rank == peers.rank) continue;
        reinterpret_cast<u32*>(part_of(peers, rank, turn.slot(), peers.rank, item))[i] = word;
      }
      if (own != from) own[i] = word;
    }
    end_put(peers, item, turn, thread);
    await_parts(peers, item, turn, thread);
    for (int rank = 0; rank < peers.exchange.ranks; ++rank) {
      if (rank == peers.rank) continue;
      const int theirs = place(item, rank, first);
      u32* to = args.out + row * args.out_stride + args.first[rank] + first;
      const u32* words_there = reinterpret_cast<const u32*>(part_of(peers, peers.rank, turn.slot(), rank, item));
      for (int i = thread; i < theirs; i += kGatherThreads) to[i] = __ldcg(words_there + i);
    }
  }
}

// By ordinary stores, as sums write into other cards' memory.
__global__ void __launch_bounds__(kGatherThreads) peer_copy(const __grid_constant__ PeerCopyArgs args) {
  grid_launch_dependents();
  grid_dependency_wait();
  const long long step = static_cast<long long>(gridDim.x) * kGatherThreads;
  for (long long i = static_cast<long long>(blockIdx.x) * kGatherThreads + threadIdx.x; i < args.count; i += step) {
    static_cast<uint4*>(args.to)[i] = __ldcg(static_cast<const uint4*>(args.from) + i);
  }
}

}  // namespace fourfold::comm
