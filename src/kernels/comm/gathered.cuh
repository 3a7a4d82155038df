// Sums over ranks whose parts are all in this rank's memory, brought there by NCCL or by way of the host: the same
// order, the same bits as sums over peer memory. docs/kernels/comm.md
#pragma once

#include "kernels/comm/reduce_args.h"
#include "kernels/norm/norm_row.cuh"

namespace fourfold::comm {

using namespace ptx;

// A CTA a row.
template <int Pieces>
__global__ void __launch_bounds__(norm::kRowThreads) add_gathered_parts(const __grid_constant__ GatheredArgs args) {
  using norm::kPieceColumns;
  using norm::kRowThreads;
  using norm::Piece;
  __shared__ float sums[kRowThreads / 32];
  const norm::NormArgs& n = args.norm;
  grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  const long long row = blockIdx.x;
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const int column = (thread + i * kRowThreads) * kPieceColumns;
      if (column < n.columns) body(i, column);
    }
  };
  grid_dependency_wait();
  Piece x[Pieces];
  float squares = 0.0f;
  each([&](int i, int column) {
    x[i] = norm::load_floats(n.residual + row * n.residual_stride + column);
    for (int rank = 0; rank < args.ranks; ++rank) {
      const Piece delta = norm::load_bf16(args.parts + (rank * args.rows + row) * n.columns + column);
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
        norm::to_bf16_piece(norm::scaled(x[i], inverse, norm::load_floats(n.weight + column)));
  });
}

// Any grid; rows are those of grid y.
__global__ void __launch_bounds__(kGatherThreads) copy_columns(const __grid_constant__ CopyColumnsArgs args) {
  grid_launch_dependents();
  grid_dependency_wait();
  const unsigned* from = args.from + blockIdx.y * args.from_stride;
  unsigned* to = args.to + blockIdx.y * args.to_stride;
  const int step = static_cast<int>(gridDim.x) * kGatherThreads;
  for (int i = static_cast<int>(blockIdx.x * kGatherThreads + threadIdx.x); i < args.words; i += step) {
    to[i] = __ldcg(from + i);
  }
}

}  // namespace fourfold::comm
