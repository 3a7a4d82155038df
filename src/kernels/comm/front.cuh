// The sum over ranks in front of a product of one or two rows (gemm/rows.cuh): every CTA of the product adds up all
// parts itself, as it would a norm's residual and delta, and of each row one CTA, which begins with it, sends this
// rank's. Words as in words.cuh, in memory of their own; since all CTAs read them, a later launch makes them all ones
// again. docs/kernels/comm.md
//
// Sums have numbers, one after the other, the same on all ranks; sum n is in slot n % kFrontSlots. A launch
//   makes the words of sum n - 1 all ones (the last CTA),
//   sends its part of sum n (the first CTAs),
//   waits for the others' parts of sum n (every CTA).
// Nobody here reads sum n - 1's words any more: its launch has ended. And nobody stores to that slot yet: that would be
// sum n + 3 of another rank, whose launch n + 2 has ended, so it has this rank's part of sum n + 2, which this one sent
// when its launch n + 1 had ended, and with it, launch n.
//
// The number is a count that each CTA adds to when all of its threads have read it, the first as much as makes
// kFrontTurn of all of them: until the last has added, the count says the same number.
#pragma once

#include "kernels/comm/meeting.cuh"
#include "kernels/comm/part.cuh"
#include "kernels/comm/words.cuh"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

__device__ __forceinline__ u32* front_words(const Peers& peers, int memory, u32 slot, int rank, int row) {
  return reinterpret_cast<u32*>(peers.memory[memory] + peers.exchange.front_at()) +
         peers.exchange.front_part(static_cast<int>(slot), rank, row) / 2;
}

// Threads 0 to kRowThreads - 1 of a CTA, behind the wait for the kernel before.
template <int Pieces, bool Share>
struct FrontSum {
  const Peers& peers;
  const unsigned short* delta;  // this rank's part is made of it, and of
  long long delta_stride;
  const norm::Share& share;
  int columns;
  int thread;
  u32 count, given_up;  // as they are asked for
  u32 lost = 0;         // ranks that this thread has given up

  __device__ __forceinline__ FrontSum(const Peers& p, const unsigned short* d, long long stride, const norm::Share& s,
                                      int columns_, int thread_)
      : peers(p), delta(d), delta_stride(stride), share(s), columns(columns_), thread(thread_) {
    count = load_count(peers.fronts);
    given_up = thread % 32 < peers.exchange.ranks ? __ldcg(peers.absent + thread % 32) : 0u;
  }
  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
    norm::each_piece<Pieces>(thread, columns, body);
  }
  __device__ __forceinline__ u32 slot() const { return count / kFrontTurn % kFrontSlots; }
  __device__ __forceinline__ u32 absent() const { return __ballot_sync(0xffffffffu, given_up != 0u) | lost; }
  // Of the sum before this one.
  __device__ __forceinline__ void clear() const {
    u32* words = front_words(peers, peers.rank, (slot() + kFrontSlots - 1) % kFrontSlots, 0, 0);
    const int all = static_cast<int>(peers.exchange.front_part(1, 0, 0) / 2);
#pragma unroll 1
    for (int i = thread * 4; i < all; i += norm::kRowThreads * 4) clear_peer4(words + i);
  }
  // x = the row of the residual + the ranks' parts, in the order of ranks. One CTA sends a row's part, so early that it
  // has waited for no other row's.
  __device__ __forceinline__ void add(norm::Piece (&x)[Pieces], const float* residual, int row, bool sends) {
    const int ranks = peers.exchange.ranks, me = peers.rank;
    OwnPart<Pieces, Share> mine;
    mine.load_logit(share, row);
    each([&](int i, int column) { mine.load(share, delta, delta_stride, row, i, column); });
    uint4 part[Pieces];
    each([&](int i, int) { part[i] = mine.words(share, i); });
    const u32 gone = absent();
    if (sends) {
#pragma unroll 1
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == me || (gone >> rank & 1u) != 0) continue;
        u32* to = front_words(peers, rank, slot(), me, row);
        each([&](int i, int column) { send_words(to + column / 2, part[i]); });
      }
    }
    each([&](int i, int column) { x[i] = norm::load_floats(residual + column); });
    int pieces = 0;  // of this thread
    each([&](int i, int) { pieces = i + 1; });
    // Code once for all ranks: a step has little of it in an SM's cache.
#pragma unroll 1
    for (int rank = 0; rank < ranks; ++rank) {
      Vec4 words[Pieces] = {};
      each([&](int i, int) { words[i] = {part[i].x, part[i].y, part[i].z, part[i].w}; });
      if (rank != me) {
        const bool is_gone = (gone >> rank & 1u) != 0;
        const bool came = look_peer_words(words, front_words(peers, me, slot(), rank, row) + thread * 4,
                                          norm::kRowThreads * 4, pieces, is_gone ? 0ull : peers.patience, kFrontPause);
        if (!came && !is_gone) {
          lost |= 1u << rank;
          give_up(peers, rank);
        }
      }
      each([&](int i, int) {
        norm::add_piece(x[i], norm::bf16_piece(make_uint4(words[i].x, words[i].y, words[i].z, words[i].w)));
      });
    }
  }
  // One thread, when all of the CTA have read the count.
  __device__ __forceinline__ void end(int cta, int ctas) const {
    atomicAdd(peers.fronts, cta == 0 ? kFrontTurn - static_cast<u32>(ctas - 1) : 1u);
  }
};

}  // namespace fourfold::comm
