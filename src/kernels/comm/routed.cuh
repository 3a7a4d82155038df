// The sum of each.cuh with the router's choice behind it (gemm/route.cuh's gemm_routed, of several ranks). A rank's
// part goes to the others with what the product that made it has added up of the router's logits: those are sums over
// columns of the residual and of all parts, so ranks add them as they add the parts, and the router is no node of its
// own. docs/kernels/comm.md
#pragma once

#include "kernels/comm/meeting.cuh"
#include "kernels/comm/words.cuh"
#include "kernels/moe/choice.cuh"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

// This rank's sums of four columns of the router, as numbers, and 0 again in memory.
__device__ __forceinline__ Vec4 take_logits(const gemm::RoutedArgs& args, int row, int first) {
  using namespace gemm;
  const int stride = routing_stride(args.columns);
  uint4* from = reinterpret_cast<uint4*>(args.sums + static_cast<long long>(row) * kRoutingCopies * stride + first);
  uint4 words[kRoutingCopies][2];
#pragma unroll
  for (int c = 0; c < kRoutingCopies; ++c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) words[c][h] = __ldcg(from + c * stride / 2 + h);
  }
  u64 sums[4] = {};
#pragma unroll
  for (int c = 0; c < kRoutingCopies; ++c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[2 * h] += static_cast<u64>(words[c][h].y) << 32 | words[c][h].x;
      sums[2 * h + 1] += static_cast<u64>(words[c][h].w) << 32 | words[c][h].z;
      if (args.keep == 0) from[c * stride / 2 + h] = make_uint4(0u, 0u, 0u, 0u);
    }
  }
  const auto number = [&](int i) {
    return __float_as_uint(static_cast<float>(static_cast<long long>(sums[i])) *
                           (1.0f / static_cast<float>(1 << kRoutingBits)));
  };
  return {number(0), number(1), number(2), number(3)};
}

template <int Pieces>
__global__ void __launch_bounds__(norm::kRowThreads, 1)
    reduce_norm_routed(const __grid_constant__ ReduceRoutedArgs args) {
  using norm::kRowThreads;
  using norm::Piece;
  __shared__ float squares_of[kRowThreads / 32];
  alignas(16) __shared__ float logits[4 * kRowThreads];
  const Peers& peers = args.peers;
  const norm::NormArgs& n = args.routed.norm;
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x);
  const int ranks = peers.exchange.ranks, me = peers.rank;
  const auto each = [&](const auto& body) { norm::each_piece<Pieces>(thread, n.columns, body); };
  int pieces = 0;  // of this thread
  each([&](int i, int) { pieces = i + 1; });
  const bool routes = 4 * thread < args.routed.columns;
  Piece weights[Pieces];
  each([&](int i, int column) { weights[i] = norm::load_floats(n.weight + column); });
  const int of_logits = args.rows + row;  // the row that they go as
  u32* const uses = peers.uses + peers.exchange.rows;
  grid_dependency_wait();
  if (peers.early != 0) grid_launch_dependents();  // experts: as in gemm_routed, behind the wait

  const u32 use = __ldcg(uses + row) + 1u, use_of_logits = __ldcg(uses + of_logits) + 1u;
  const u32 given_up = thread % 32 < ranks ? __ldcg(peers.absent + thread % 32) : 0u;
  Piece x[Pieces] = {};
  uint4 part[Pieces];
  each([&](int i, int column) {
    part[i] = norm::load_words(n.delta + row * n.delta_stride + column);
    x[i] = norm::load_floats(n.residual + row * n.residual_stride + column);
  });
  Vec4 own = {};
  if (routes) own = take_logits(args.routed, row, 4 * thread);
  const u32 absent = __ballot_sync(0xffffffffu, given_up != 0u);
  // Where rank `from` puts logits, and its part of the row, in the memory of rank `memory`.
  const auto logits_in = [&](int memory, int from) {
    return words_of(peers, memory, use_of_logits % kSlots, from, of_logits) + thread * 4;
  };
  const auto part_in = [&](int memory, int from) { return words_of(peers, memory, use % kSlots, from, row); };
  // Every rank has taken what this one put into the slots: it has since put its part of the sum between.
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == me || (absent >> rank & 1u) != 0) continue;
    u32* to = part_in(rank, me);
    each([&](int i, int column) { send_words(to + column / 2, part[i]); });
    if (routes) store_peer4(logits_in(rank, me), own);  // sums of integers: none is all ones
  }
  float logit[4] = {};
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    Vec4 words[1 + Pieces] = {};
    words[0] = own;
    each([&](int i, int) { words[1 + i] = {part[i].x, part[i].y, part[i].z, part[i].w}; });
    if (rank != me) {
      const bool gone = (absent >> rank & 1u) != 0;
      u32* const from = part_in(me, rank) + thread * 4;
      u32* const from_logits = logits_in(me, rank);
      const bool came = take_peer_words_at(
          words, [&](int i) { return i == 0 ? routes : i <= pieces; },
          [&](int i) { return i == 0 ? from_logits : from + (i - 1) * (kRowThreads * 4); },
          gone ? 0ull : peers.patience, 0u);
      if (!came && !gone) give_up(peers, rank);
    }
    each([&](int i, int) {
      const Vec4& w = words[1 + i];
      norm::add_piece(x[i], norm::bf16_piece(make_uint4(w.x, w.y, w.z, w.w)));
    });
    logit[0] += __uint_as_float(words[0].x);
    logit[1] += __uint_as_float(words[0].y);
    logit[2] += __uint_as_float(words[0].z);
    logit[3] += __uint_as_float(words[0].w);
  }
  if (routes) {
    *reinterpret_cast<float4*>(logits + 4 * thread) = make_float4(logit[0], logit[1], logit[2], logit[3]);
  }
  float squares = 0.0f;
  each([&](int i, int column) { squares = norm::keep_piece(n, row, column, x[i], squares); });
  norm::share_squares(squares, squares_of, thread);
  if (thread == 0) {
    uses[row] = use;
    uses[of_logits] = use_of_logits;
  }
  const float inverse = norm::inverse_rms(squares_of, n.columns, n.eps);
  if (thread < 32) {
    moe::store_choice(
        args.routed.choice, row, thread, [&](int column) { return logits[column]; }, [&] { return inverse; });
  }
  each([&](int i, int column) { norm::store_normed(n, row, column, x[i], inverse, weights[i]); });
}

}  // namespace fourfold::comm
