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
  using norm::Piece;
  __shared__ float sums[norm::kRowThreads / 32];
  const norm::NormArgs& n = args.norm;
  grid_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  const long long row = blockIdx.x;
  const auto each = [&](const auto& body) { norm::each_piece<Pieces>(thread, n.columns, body); };
  grid_dependency_wait();
  Piece x[Pieces];
  float squares = 0.0f;
  each([&](int i, int column) {
    x[i] = norm::load_floats(n.residual + row * n.residual_stride + column);
    for (int rank = 0; rank < args.ranks; ++rank) {
      norm::add_piece(x[i], norm::load_bf16(args.parts + (rank * args.rows + row) * n.columns + column));
    }
    squares = norm::keep_piece(n, row, column, x[i], squares);
  });
  norm::share_squares(squares, sums, thread);
  const float inverse = norm::inverse_rms(sums, n.columns, n.eps);
  each([&](int i, int column) {
    norm::store_normed(n, row, column, x[i], inverse, norm::load_floats(n.weight + column));
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
