// The router's choice as a kernel of its own, alone or with the norm in front of it.
#pragma once

#include "kernels/gemm/rows_tile.h"
#include "kernels/moe/choice.cuh"
#include "kernels/norm/norm_row.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gemm {

// Logits that another kernel computed. One warp a row. The next kernel is let in behind the wait: the experts have
// nothing to ask for before they know which they are, and CTAs of theirs that were there while the output projection
// ran made a step of 35B 3 % longer.
__global__ void __launch_bounds__(kRouteThreads) gemm_route(const __grid_constant__ RouteArgs args) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int t = static_cast<int>((blockIdx.x * kRouteThreads + threadIdx.x) / 32);
  if (t < args.tokens) moe::store_choice(args, t, static_cast<int>(threadIdx.x) % 32);
}

// The norm and the choice of rows whose logits the product in front has added up (routing.h). A row that is not finite
// has some experts, with weights that are not numbers.
template <int Pieces>
__global__ void __launch_bounds__(norm::kRowThreads) gemm_routed(const __grid_constant__ RoutedArgs args) {
  using namespace norm;
  constexpr int kAtOnce = 2;  // columns of a thread
  __shared__ float squares_of[kRowThreads / 32];
  __shared__ float logits[kMostRouted + kAtOnce * kRowThreads];
  const NormArgs& n = args.norm;
  const int thread = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.x;
  Piece weights[Pieces];
  const auto each = [&](const auto& body) { each_piece<Pieces>(thread, n.columns, body); };
  each([&](int i, int column) { weights[i] = load_floats(n.weight + column); });
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  Piece x[Pieces];
  Addends<Pieces> more;
  more.load_logit(n.share, t);
  each([&](int i, int column) {
    x[i] = load_floats(n.residual + t * n.residual_stride + column);
    more.load(n.share, n.delta, n.delta_stride, t, i, column);
  });
  const int stride = routing_stride(args.columns);
  // Columns `first` and `first` + kRowThreads, where they are there.
  const auto take = [&](int first) {
    unsigned long long sums[kAtOnce][kRoutingCopies] = {};
    unsigned long long* from = args.sums + t * kRoutingCopies * stride + first;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kRowThreads >= args.columns) continue;
#pragma unroll
      for (int c = 0; c < kRoutingCopies; ++c) sums[i][c] = __ldcg(from + c * stride + i * kRowThreads);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kRowThreads >= args.columns) continue;
      unsigned long long sum = 0;
#pragma unroll
      for (int c = 0; c < kRoutingCopies; ++c) {
        sum += sums[i][c];
        if (args.keep == 0) from[c * stride + i * kRowThreads] = 0;
      }
      logits[first + i * kRowThreads] =
          static_cast<float>(static_cast<long long>(sum)) * (1.0f / static_cast<float>(1 << kRoutingBits));
    }
  };
  take(thread);  // nearly always all that there are
#pragma unroll 1
  for (int first = thread + kAtOnce * kRowThreads; first < args.columns; first += kAtOnce * kRowThreads) take(first);
  const float weight = more.weight(n.share);
  float squares = 0.0f;
  each([&](int i, int column) {
    more.add(n.share, n.delta, x[i], i, weight);
    squares = keep_piece(n, t, column, x[i], squares);
  });
  share_squares(squares, squares_of, thread);
  const float inverse = inverse_rms(squares_of, n.columns, n.eps);
  if (thread < 32) {
    moe::store_choice(
        args.choice, static_cast<int>(t), thread, [&](int column) { return logits[column]; }, [&] { return inverse; });
  }
  each([&](int i, int column) { store_normed(n, t, column, x[i], inverse, weights[i]); });
}

// The router's weights as Routing has them.
__global__ void __launch_bounds__(kRoutingPackThreads) gemm_pack_routing(const __grid_constant__ RoutingPackArgs args) {
  using namespace ptx;
  grid_launch_dependents();
  grid_dependency_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>((blockIdx.x * kRoutingPackThreads + threadIdx.x) / 32);
  if (tile >= args.tiles) return;
#pragma unroll 1
  for (int row = lane; row < args.rows; row += 32) {
    // Of the unit with these columns, the block, and in it the row's words of lanes 4 g to 4 g + 3.
    const u64 unit = static_cast<u64>(row / 16) * static_cast<u64>(args.units) + static_cast<u64>(tile / 4);
    const u32* block = reinterpret_cast<const u32*>(args.router + unit * unit_bytes(Weights::kBf16)) + tile % 4 * 128;
    u32* out = reinterpret_cast<u32*>(args.out + (static_cast<long long>(tile) * args.columns + args.first + row) * 16);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
#pragma unroll
      for (int h = 0; h < 2; ++h) out[h * 4 + l] = block[(row % 8 * 4 + l) * 4 + h * 2 + row % 16 / 8];
    }
  }
}

}  // namespace fourfold::gemm
