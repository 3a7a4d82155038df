// The sum over ranks behind a mixer in two shots, by words as in words.cuh: of each row one rank, its owner, gets the
// parts of all and adds them to the residual in the order of ranks, so that all ranks have the bits that the other ways
// give. With `Whole` it sends the sum, fp32, and every rank has the residual; without, it keeps the residual for itself
// and sends the row under its norm, bf16. docs/kernels/comm.md
#pragma once

#include "kernels/comm/part.cuh"
#include "kernels/comm/words.cuh"
#include "kernels/moe/packed_sum.cuh"

namespace fourfold::comm {

// `Share`: args.norm.share is this rank's, a part of its part. `Packed`: the rest of it is args.sum, so that memory
// brings the experts' rows of one token while the link carries another one.
template <int Pieces, bool Whole, bool Share = false, bool Packed = false>
__global__ void __launch_bounds__(norm::kRowThreads, words_ctas(Pieces, Share || Packed))
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
  // The first row from `row` on that is this rank's, or another one's.
  const auto following = [&](int row, bool own) {
    while (row < args.rows && (row % ranks == me) != own) row += step;
    return row;
  };
  moe::PackedPick pick;  // of the row that is to come
  const auto look_up = [&](int row) {
    if constexpr (Packed) {
      if (row < args.rows) pick.look_up(args.sum, row);
    }
  };
  // This rank's part of a row, `next` behind it.
  const auto part_of_row = [&](int row, int next) {
    OwnPart<Pieces, Share> mine;
    mine.load_logit(n.share, row);
    if constexpr (Packed) {
      each([&](int i, int column) { mine.load_share(n.share, row, i, column); });
      const moe::PackedPick now = pick;
      look_up(next);
      moe::packed_sum<5>(args.sum, now, thread, mine.from.delta);
    } else {
      each([&](int i, int column) { mine.load(n.share, n.delta, n.delta_stride, row, i, column); });
    }
    return mine;
  };
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
  // What the owner sends goes where its part would, which nobody puts there. A sum has two words where a part has one:
  // the lower four of eight columns go there, the others where the receiver's own part would.
  const auto sent_at = [&](int memory, u32 slot, int owner, int row, int half) {
    return words_of(peers, memory, slot, half == 0 ? owner : memory, row);
  };
  // To all others, each rank beginning with the one behind it, so that not all send to the same one.
  const auto send = [&](u32 slot, int row, int half, const uint4(&words)[Pieces]) {
    for (int i = 1; i < ranks; ++i) {
      const int rank = me + i < ranks ? me + i : me + i - ranks;
      if ((absent >> rank & 1u) != 0) continue;
      u32* to = sent_at(rank, slot, me, row, half);
      each([&](int k, int column) { send_words(to + column / 2, words[k]); });
    }
  };
  int turn = 0;
  // Keeps a row of the residual; what its norm multiplies it with.
  const auto keep = [&](int row, const Piece(&x)[Pieces]) {
    float squares = 0.0f;
    each([&](int i, int column) { squares = norm::keep_piece(n, row, column, x[i], squares); });
    squares = norm::warp_sum(squares);
    if (thread % 32 == 0) sums[turn][thread / 32] = squares;
    __syncthreads();
    const float inverse = norm::inverse_rms(sums[turn], n.columns, n.eps);
    turn ^= 1;
    return inverse;
  };
  const auto store = [&](int row, const Piece(&x)[Pieces], float inverse) {
    each([&](int i, int column) {
      norm::store_normed(n, row, column, x[i], inverse, norm::load_floats(n.weight + column));
    });
  };

  // Each CTA sends all its parts before it waits for any, and all its rows before it waits for others'.
  int row = following(begin, false), next;
  look_up(row);
#pragma unroll 1
  for (; row < args.rows; row = next) {
    const int owner = row % ranks;
    next = following(row + step, false);
    if ((absent >> owner & 1u) != 0) {
      look_up(next);
      continue;
    }
    u32* to = words_of(peers, owner, (__ldcg(uses + row) + 1u) % kSlots, me, row);
    const OwnPart<Pieces, Share> mine = part_of_row(row, next);
    each([&](int i, int column) { send_words(to + column / 2, mine.words(n.share, i)); });
  }
  row = following(begin, true);
  look_up(row);
#pragma unroll 1
  for (; row < args.rows; row = next) {
    next = following(row + step, true);
    const u32 slot = (__ldcg(uses + row) + 1u) % kSlots;
    Piece x[Pieces];
    each([&](int i, int column) { x[i] = norm::load_floats(n.residual + row * n.residual_stride + column); });
    const OwnPart<Pieces, Share> mine = part_of_row(row, next);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == me) {
        each([&](int i, int) { norm::add_piece(x[i], norm::bf16_piece(mine.words(n.share, i))); });
        continue;
      }
      Vec4 part[Pieces] = {};
      take(part, words_of(peers, me, slot, rank, row), rank, peers.patience);
      each([&](int i, int) {
        norm::add_piece(x[i], norm::bf16_piece(make_uint4(part[i].x, part[i].y, part[i].z, part[i].w)));
      });
    }
    uint4 words[Pieces];
    if constexpr (Whole) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        each([&](int i, int) {
          const float* v = x[i].v + half * 4;
          words[i] =
              make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
        });
        send(slot, row, half, words);
      }
      store(row, x, keep(row, x));
    } else {
      const float inverse = keep(row, x);
      each([&](int i, int column) {
        words[i] = norm::to_bf16_piece(norm::scaled(x[i], inverse, norm::load_floats(n.weight + column)));
      });
      send(slot, row, 0, words);
      each([&](int i, int column) { *reinterpret_cast<uint4*>(n.out + row * n.out_stride + column) = words[i]; });
    }
  }
#pragma unroll 1
  for (row = following(begin, false); row < args.rows; row = following(row + step, false)) {
    const int owner = row % ranks;
    const u32 slot = (__ldcg(uses + row) + 1u) % kSlots;
    Vec4 words[Pieces] = {};
    if constexpr (Whole) {
      Piece x[Pieces];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        take(words, sent_at(me, slot, owner, row, half), owner, owners_patience);
        each([&](int i, int) {
          float* v = x[i].v + half * 4;
          v[0] = __uint_as_float(words[i].x);
          v[1] = __uint_as_float(words[i].y);
          v[2] = __uint_as_float(words[i].z);
          v[3] = __uint_as_float(words[i].w);
        });
      }
      store(row, x, keep(row, x));
    } else {
      take(words, sent_at(me, slot, owner, row, 0), owner, owners_patience);
      each([&](int i, int column) {
        *reinterpret_cast<uint4*>(n.out + row * n.out_stride + column) =
            make_uint4(words[i].x, words[i].y, words[i].z, words[i].w);
      });
    }
  }
  if constexpr (!Whole) __syncthreads();  // all have read the counts; of whole residuals each row has a barrier
  for (row = begin + thread * step; row < args.rows; row += kRowThreads * step) uses[row] = __ldcg(uses + row) + 1u;
}

}  // namespace fourfold::comm
