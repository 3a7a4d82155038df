// The sum over ranks behind a mixer, with residual and norm, in one shot over peer memory (meeting.cuh). All ranks add
// in the order of ranks, so all have the same bits. A CTA puts its next row while it waits for the one before.
// docs/kernels/comm.md
#pragma once

#include "kernels/comm/meeting.cuh"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

using norm::kRowThreads;
using norm::Piece;

template <int Pieces>
__global__ void __launch_bounds__(kRowThreads, reduce_ctas(Pieces))
    reduce_norm_rows(const __grid_constant__ ReduceArgs args) {
  __shared__ float sums[kRowThreads / 32];
  const Peers& peers = args.peers;
  const norm::NormArgs& n = args.norm;
  if (peers.early != 0) grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), ranks = peers.exchange.ranks;
  const auto each = [&](const auto& body) { norm::each_piece<Pieces>(thread, n.columns, body); };
  Piece weights[Pieces];
  each([&](int i, int column) { weights[i] = norm::load_floats(n.weight + column); });
  grid_dependency_wait();

  const auto put = [&](int row, uint4(&mine)[Pieces]) {
    const Turn turn = begin_turn(peers, row, thread);
    each([&](int i, int column) {
      mine[i] = __ldcg(reinterpret_cast<const uint4*>(n.delta + row * n.delta_stride + column));
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == peers.rank) continue;
        *reinterpret_cast<uint4*>(part_of(peers, rank, turn.slot(), peers.rank, row) + column) = mine[i];
      }
    });
    end_put(peers, row, turn, thread);
    return turn;
  };
  const int step = static_cast<int>(gridDim.x);
  int row = static_cast<int>(blockIdx.x);
  uint4 mine[Pieces], next[Pieces];
  Turn turn = {}, next_turn = {};
  if (row < args.rows) turn = put(row, mine);
  for (; row < args.rows; row += step) {
    if (row + step < args.rows) next_turn = put(row + step, next);
    await_parts(peers, row, turn, thread);
    Piece x[Pieces];
    float squares = 0.0f;
    each([&](int i, int column) {
      x[i] = norm::load_floats(n.residual + row * n.residual_stride + column);
      for (int rank = 0; rank < ranks; ++rank) {
        uint4 words = mine[i];
        if (rank != peers.rank) {
          words = __ldcg(reinterpret_cast<const uint4*>(part_of(peers, peers.rank, turn.slot(), rank, row) + column));
        }
        norm::add_piece(x[i], norm::bf16_piece(words));
      }
      squares = norm::keep_piece(n, row, column, x[i], squares);
    });
    norm::share_squares(squares, sums, thread);
    const float inverse = norm::inverse_rms(sums, n.columns, n.eps);
    each([&](int i, int column) { norm::store_normed(n, row, column, x[i], inverse, weights[i]); });
    turn = next_turn;
#pragma unroll
    for (int i = 0; i < Pieces; ++i) mine[i] = next[i];
  }
}

}  // namespace fourfold::comm
