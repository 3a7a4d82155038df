// A rank's part of a row's sum: what its mixer left and, with `Share`, its share of the shared expert's output, rounded
// together as add_shared (step/rows.cuh) rounds them, to the same bits.
#pragma once

#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

// A thread's pieces, asked for before any of them is used.
template <int Pieces, bool Share>
struct OwnPart {
  norm::Addends<Pieces> from;

  __device__ __forceinline__ void load_logit(const norm::Share& share, long long row) {
    if constexpr (Share) from.load_logit(share, row);
  }
  __device__ __forceinline__ void load_share(const norm::Share& share, long long row, int i, int column) {
    if constexpr (Share) from.share[i] = norm::load_words(share.x + row * share.stride + column);
  }
  __device__ __forceinline__ void load(const norm::Share& share, const unsigned short* delta, long long stride,
                                       long long row, int i, int column) {
    from.delta[i] = norm::load_words(delta + row * stride + column);
    load_share(share, row, i, column);
  }
  __device__ __forceinline__ uint4 words(const norm::Share& share, int i) const {
    if constexpr (!Share) return from.delta[i];
    norm::Piece sum = norm::bf16_piece(from.delta[i]);
    norm::add_share(sum, norm::bf16_piece(from.share[i]), from.weight(share));
    return norm::to_bf16_piece(sum);
  }
};

}  // namespace fourfold::comm
