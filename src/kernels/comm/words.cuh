// The sum of reduce.cuh without flags: a word of a part is its own flag, all ones until it is there, so that nothing is
// ordered by anything else, neither fence nor barrier stands between what a rank sends and what another one reads, and
// what comes is seen by the load that reads it. docs/kernels/comm.md
#pragma once

#include "kernels/comm/meeting.cuh"
#include "kernels/comm/part.cuh"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

__device__ __forceinline__ u32* words_of(const Peers& peers, int memory, u32 slot, int rank, int row) {
  return reinterpret_cast<u32*>(peers.memory[memory] + peers.exchange.words_at()) +
         peers.exchange.part(static_cast<int>(slot), rank, row) / 2;
}
// All ones are two numbers that are none; so are the words that go in their place.
__device__ __forceinline__ u32 sendable(u32 word) { return word == 0xffffffffu ? 0x7fff7fffu : word; }
__device__ __forceinline__ void send_words(u32* to, const uint4& words) {
  store_peer4(to, {sendable(words.x), sendable(words.y), sendable(words.z), sendable(words.w)});
}

// `Share`: args.norm.share is this rank's, a part of its part.
template <int Pieces, bool Share = false>
__global__ void __launch_bounds__(norm::kRowThreads, words_ctas(Pieces, Share))
    reduce_norm_words(const __grid_constant__ ReduceArgs args) {
  using norm::kPieceColumns;
  using norm::kRowThreads;
  using norm::Piece;
  __shared__ float sums[2][kRowThreads / 32];
  const Peers& peers = args.peers;
  const norm::NormArgs& n = args.norm;
  if (peers.early != 0) grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), ranks = peers.exchange.ranks, me = peers.rank;
  // As norm::each_piece() has it, with which the compiler orders this kernel in another way.
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const int column = (thread + i * kRowThreads) * kPieceColumns;
      if (column < n.columns) body(i, column);
    }
  };
  int pieces = 0;  // of this thread
  each([&](int i, int) { pieces = i + 1; });
  Piece weights[Pieces];
  each([&](int i, int column) { weights[i] = norm::load_floats(n.weight + column); });
  grid_dependency_wait();

  u32* const uses = peers.uses + peers.exchange.rows;
  // Lane r has it of rank r; asked for when it has come, so that it is not waited for before all else is loaded.
  const u32 given_up = thread % 32 < ranks ? __ldcg(peers.absent + thread % 32) : 0u;
  // Every rank has taken what this one put into the slot: it has since put its part of the sum between.
  const auto put = [&](int row) {
    const u32 slot = (__ldcg(uses + row) + 1u) % kSlots;
    OwnPart<Pieces, Share> mine;
    mine.load_logit(n.share, row);
    each([&](int i, int column) { mine.load(n.share, n.delta, n.delta_stride, row, i, column); });
    const u32 absent = __ballot_sync(0xffffffffu, given_up != 0u);
    // Each begins with the rank behind it, so that not all send to the same one.
    for (int i = 1; i < ranks; ++i) {
      const int rank = me + i < ranks ? me + i : me + i - ranks;
      if ((absent >> rank & 1u) != 0) continue;
      u32* to = words_of(peers, rank, slot, me, row);
      each([&](int k, int column) { send_words(to + column / 2, mine.words(n.share, k)); });
    }
  };
  const int step = static_cast<int>(gridDim.x);
  int sent = static_cast<int>(blockIdx.x);  // the row to be put next
#pragma unroll 1
  for (int i = 0; i < kRowsAhead && sent < args.rows; ++i, sent += step) put(sent);
  int turn = 0;
#pragma unroll 1
  for (int row = static_cast<int>(blockIdx.x); row < args.rows; row += step, turn ^= 1) {
    if (sent < args.rows) {
      put(sent);
      sent += step;
    }
    const u32 use = __ldcg(uses + row) + 1u;
    Piece x[Pieces];
    OwnPart<Pieces, Share> mine;
    mine.load_logit(n.share, row);
    each([&](int i, int column) {
      x[i] = norm::load_floats(n.residual + row * n.residual_stride + column);
      mine.load(n.share, n.delta, n.delta_stride, row, i, column);
    });
    const u32 absent = __ballot_sync(0xffffffffu, given_up != 0u);
    const auto add = [&](int i, const uint4& words) { norm::add_piece(x[i], norm::bf16_piece(words)); };
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == me) {
        each([&](int i, int) { add(i, mine.words(n.share, i)); });
        continue;
      }
      const bool gone = (absent >> rank & 1u) != 0;
      Vec4 theirs[Pieces] = {};
      const bool came =
          take_peer_words(theirs, words_of(peers, me, use % kSlots, rank, row) + thread * 4, kRowThreads * 4, pieces,
                          gone ? 0ull : peers.patience, step > kBusyCtas ? kPause : 0u);
      if (!came && !gone) {
        give_up(peers, rank);
      }
      each([&](int i, int) { add(i, make_uint4(theirs[i].x, theirs[i].y, theirs[i].z, theirs[i].w)); });
    }
    float squares = 0.0f;
    each([&](int i, int column) { squares = norm::keep_piece(n, row, column, x[i], squares); });
    squares = norm::warp_sum(squares);
    if (thread % 32 == 0) sums[turn][thread / 32] = squares;
    __syncthreads();
    if (thread == 0) uses[row] = use;
    const float inverse = norm::inverse_rms(sums[turn], n.columns, n.eps);
    each([&](int i, int column) { norm::store_normed(n, row, column, x[i], inverse, weights[i]); });
  }
}

}  // namespace fourfold::comm
