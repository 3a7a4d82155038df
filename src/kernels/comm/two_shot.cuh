// The sum over ranks behind a mixer in two shots, by words as in words.cuh: of each row one rank, its owner, gets the
// parts of all, adds them to the residual in the order of ranks, and sends the sum, fp32, to the others. So all ranks
// have the bits that the other ways give. docs/kernels/comm.md
#pragma once

#include "kernels/comm/words.cuh"

namespace fourfold::comm {

template <int Pieces>
__global__ void __launch_bounds__(norm::kRowThreads, words_ctas(Pieces))
    reduce_norm_two_shot(const __grid_constant__ ReduceArgs args) {
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
  grid_dependency_wait();

  u32* const uses = peers.uses + peers.exchange.rows;
  const u32 given_up = thread % 32 < ranks ? __ldcg(peers.absent + thread % 32) : 0u;
  u32 absent = __ballot_sync(0xffffffffu, given_up != 0u);  // and whom this thread has given up since
  const int step = static_cast<int>(gridDim.x), begin = static_cast<int>(blockIdx.x);
  // Waits for what `rank` stores at `from`.
  const auto take = [&](Vec4(&words)[Pieces], u32* from, int rank, u64 patience) {
    const bool gone = (absent >> rank & 1u) != 0;
    const bool came = take_peer_words(words, from + thread * 4, kRowThreads * 4, pieces, gone ? 0ull : patience,
                                      step > kBusyCtas ? kPause : 0u);
    if (!came && !gone) {
      absent |= 1u << rank;
      give_up(peers, rank);
    }
  };
  // An owner that waits for somebody else is late by that.
  const u64 owners_patience = peers.patience + peers.patience / 8;
  // A sum has two words where a part has one. The lower four of eight columns go where the owner's part would, the
  // others where the receiver's own would: nobody puts either there.
  const auto sum_at = [&](int memory, u32 slot, int owner, int row, int half) {
    return words_of(peers, memory, slot, half == 0 ? owner : memory, row);
  };
  int turn = 0;
  const auto finish = [&](int row, u32 use, const Piece(&x)[Pieces]) {
    float squares = 0.0f;
    each([&](int i, int column) { squares = norm::keep_piece(n, row, column, x[i], squares); });
    squares = norm::warp_sum(squares);
    if (thread % 32 == 0) sums[turn][thread / 32] = squares;
    __syncthreads();
    if (thread == 0) uses[row] = use;
    const float inverse = norm::inverse_rms(sums[turn], n.columns, n.eps);
    each([&](int i, int column) {
      norm::store_normed(n, row, column, x[i], inverse, norm::load_floats(n.weight + column));
    });
    turn ^= 1;
  };

  // Each CTA sends all its parts before it waits for any, and all its sums before it waits for others'.
#pragma unroll 1
  for (int row = begin; row < args.rows; row += step) {
    const int owner = row % ranks;
    if (owner == me || (absent >> owner & 1u) != 0) continue;
    u32* to = words_of(peers, owner, (__ldcg(uses + row) + 1u) % kSlots, me, row);
    each([&](int, int column) {
      const uint4 mine = __ldcg(reinterpret_cast<const uint4*>(n.delta + row * n.delta_stride + column));
      send_words(to + column / 2, mine);
    });
  }
#pragma unroll 1
  for (int row = begin; row < args.rows; row += step) {
    if (row % ranks != me) continue;
    const u32 use = __ldcg(uses + row) + 1u;
    Piece x[Pieces];
    each([&](int i, int column) { x[i] = norm::load_floats(n.residual + row * n.residual_stride + column); });
    for (int rank = 0; rank < ranks; ++rank) {
      Vec4 part[Pieces] = {};
      if (rank == me) {
        each([&](int i, int column) {
          const uint4 mine = __ldcg(reinterpret_cast<const uint4*>(n.delta + row * n.delta_stride + column));
          part[i] = {mine.x, mine.y, mine.z, mine.w};
        });
      } else {
        take(part, words_of(peers, me, use % kSlots, rank, row), rank, peers.patience);
      }
      each([&](int i, int) {
        norm::add_piece(x[i], norm::bf16_piece(make_uint4(part[i].x, part[i].y, part[i].z, part[i].w)));
      });
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == me || (absent >> rank & 1u) != 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32* to = sum_at(rank, use % kSlots, me, row, half);
        each([&](int i, int column) {
          const float* v = x[i].v + half * 4;
          send_words(to + column / 2, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                                 __float_as_uint(v[3])));
        });
      }
    }
    finish(row, use, x);
  }
#pragma unroll 1
  for (int row = begin; row < args.rows; row += step) {
    const int owner = row % ranks;
    if (owner == me) continue;
    const u32 use = __ldcg(uses + row) + 1u;
    Piece x[Pieces];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vec4 sum[Pieces] = {};
      take(sum, sum_at(me, use % kSlots, owner, row, half), owner, owners_patience);
      each([&](int i, int) {
        float* v = x[i].v + half * 4;
        v[0] = __uint_as_float(sum[i].x);
        v[1] = __uint_as_float(sum[i].y);
        v[2] = __uint_as_float(sum[i].z);
        v[3] = __uint_as_float(sum[i].w);
      });
    }
    finish(row, use, x);
  }
}

}  // namespace fourfold::comm
