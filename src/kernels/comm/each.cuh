// The sum of words.cuh for launches that have a CTA for each row: nothing is sent ahead, so a part is loaded once, all
// that is asked for is asked for at once, and there is little code. The same memory and counts, so a row may be summed
// by either. docs/kernels/comm.md
//
// Alone: out = the sum of the parts from 0 on, bf16; of `norm` only delta, out, their strides and columns are used.
#pragma once

#include "kernels/comm/meeting.cuh"
#include "kernels/comm/part.cuh"
#include "kernels/comm/words.cuh"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

template <int Pieces, bool Share = false, bool Alone = false>
__global__ void __launch_bounds__(norm::kRowThreads, 1) reduce_norm_each(const __grid_constant__ ReduceArgs args) {
  using norm::kRowThreads;
  using norm::Piece;
  static_assert(!Share || !Alone);
  __shared__ float sums[kRowThreads / 32];
  const Peers& peers = args.peers;
  const norm::NormArgs& n = args.norm;
  if (peers.early != 0) grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x);
  const int ranks = peers.exchange.ranks, me = peers.rank;
  const auto each = [&](const auto& body) { norm::each_piece<Pieces>(thread, n.columns, body); };
  int pieces = 0;  // of this thread
  each([&](int i, int) { pieces = i + 1; });
  Piece weights[Pieces];
  if constexpr (!Alone) each([&](int i, int column) { weights[i] = norm::load_floats(n.weight + column); });
  u32* const uses = peers.uses + peers.exchange.rows + row;
  grid_dependency_wait();

  const u32 use = __ldcg(uses) + 1u;
  const u32 given_up = thread % 32 < ranks ? __ldcg(peers.absent + thread % 32) : 0u;
  OwnPart<Pieces, Share> mine;
  mine.load_logit(n.share, row);
  each([&](int i, int column) { mine.load(n.share, n.delta, n.delta_stride, row, i, column); });
  Piece x[Pieces] = {};
  if constexpr (!Alone) {
    each([&](int i, int column) { x[i] = norm::load_floats(n.residual + row * n.residual_stride + column); });
  }
  const u32 absent = __ballot_sync(0xffffffffu, given_up != 0u);
  uint4 part[Pieces];
  each([&](int i, int) { part[i] = mine.words(n.share, i); });
  // Every rank has taken what this one put into the slot: it has since put its part of the sum between.
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == me || (absent >> rank & 1u) != 0) continue;
    u32* to = words_of(peers, rank, use % kSlots, me, row);
    each([&](int i, int column) { send_words(to + column / 2, part[i]); });
  }
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    Vec4 words[Pieces] = {};
    each([&](int i, int) { words[i] = {part[i].x, part[i].y, part[i].z, part[i].w}; });
    if (rank != me) {
      const bool gone = (absent >> rank & 1u) != 0;
      const bool came = take_peer_words(words, words_of(peers, me, use % kSlots, rank, row) + thread * 4,
                                        kRowThreads * 4, pieces, gone ? 0ull : peers.patience, 0u);
      if (!came && !gone) give_up(peers, rank);
    }
    each([&](int i, int) {
      norm::add_piece(x[i], norm::bf16_piece(make_uint4(words[i].x, words[i].y, words[i].z, words[i].w)));
    });
  }
  if constexpr (Alone) {
    each([&](int i, int column) {
      *reinterpret_cast<uint4*>(n.out + row * n.out_stride + column) = norm::to_bf16_piece(x[i]);
    });
    __syncthreads();  // all have read the count
    if (thread == 0) *uses = use;
    return;
  }
  float squares = 0.0f;
  each([&](int i, int column) { squares = norm::keep_piece(n, row, column, x[i], squares); });
  norm::share_squares(squares, sums, thread);
  if (thread == 0) *uses = use;
  const float inverse = norm::inverse_rms(sums, n.columns, n.eps);
  each([&](int i, int column) { norm::store_normed(n, row, column, x[i], inverse, weights[i]); });
}

}  // namespace fourfold::comm
