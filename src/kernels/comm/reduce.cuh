// The sum over ranks behind a mixer, with residual and norm, in one shot over peer memory: each rank puts its part of a
// row into every other rank's memory, raises a flag there, waits for the flags of all in its own, and adds up what it
// finds. All add in the order of ranks, so all have the same bits. docs/kernels/comm.md
#pragma once

#include "kernels/comm/reduce_args.h"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

using namespace ptx;
using norm::kPieceColumns;
using norm::kRowThreads;
using norm::Piece;

template <int Pieces>
__global__ void __launch_bounds__(kRowThreads) reduce_norm_rows(const __grid_constant__ ReduceArgs args) {
  __shared__ float sums[kRowThreads / 32];
  grid_launch_dependents();
  const norm::NormArgs& n = args.norm;
  const Exchange& exchange = args.exchange;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.x);
  const auto parts_of = [&](int rank) { return reinterpret_cast<u16*>(args.memory[rank]); };
  const auto flags_of = [&](int rank) { return reinterpret_cast<u32*>(args.memory[rank] + exchange.parts_bytes()); };
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const int column = (thread + i * kRowThreads) * kPieceColumns;
      if (column < n.columns) body(i, column);
    }
  };
  Piece weights[Pieces];
  each([&](int i, int column) { weights[i] = norm::load_floats(n.weight + column); });
  grid_dependency_wait();

  // The slot is free: every rank has raised its flag for the row since it read what was there.
  const bool meets = thread < exchange.ranks && thread != args.rank;
  const u32 use = __ldcg(args.uses + row) + 1u;
  unsigned* absent = args.absent + exchange.flag(row, thread);
  const bool given_up = meets && __ldcg(absent) != 0u;
  const int slot = static_cast<int>(use % kSlots);
  uint4 mine[Pieces];
  each([&](int i, int column) {
    mine[i] = __ldcg(reinterpret_cast<const uint4*>(n.delta + row * n.delta_stride + column));
    for (int rank = 0; rank < exchange.ranks; ++rank) {
      if (rank == args.rank) continue;
      *reinterpret_cast<uint4*>(parts_of(rank) + exchange.part(slot, args.rank, row) + column) = mine[i];
    }
  });
  __syncthreads();
  if (meets) {
    raise_peer_flag(flags_of(thread) + exchange.flag(row, args.rank), use);
    if (!given_up && !wait_peer_flag(flags_of(args.rank) + exchange.flag(row, thread), use, args.patience)) {
      *absent = 1u;
      atomicMax(args.failed, 1u + static_cast<u32>(thread));
    }
  }
  __syncthreads();
  if (thread == 0) args.uses[row] = use;

  Piece x[Pieces];
  float squares = 0.0f;
  each([&](int i, int column) {
    x[i] = norm::load_floats(n.residual + row * n.residual_stride + column);
    for (int rank = 0; rank < exchange.ranks; ++rank) {
      uint4 words = mine[i];
      if (rank != args.rank) {
        words = __ldcg(reinterpret_cast<const uint4*>(parts_of(args.rank) + exchange.part(slot, rank, row) + column));
      }
      const Piece delta = norm::bf16_piece(words);
#pragma unroll
      for (int e = 0; e < kPieceColumns; ++e) x[i].v[e] += delta.v[e];
    }
    squares = norm::add_squares(squares, x[i]);
    if (n.residual_out != nullptr) norm::store_floats(n.residual_out + row * n.residual_stride + column, x[i]);
  });
  squares = norm::warp_sum(squares);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();
  const float inverse = norm::inverse_rms(sums, n.columns, n.eps);
  each([&](int i, int column) {
    *reinterpret_cast<uint4*>(n.out + row * n.out_stride + column) =
        norm::to_bf16_piece(norm::scaled(x[i], inverse, weights[i]));
  });
}

}  // namespace fourfold::comm
