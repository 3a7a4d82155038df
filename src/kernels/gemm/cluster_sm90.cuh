// Products of few rows whose items are few, too: gemm_middle's items and units, with the CTAs of an item in a cluster.
// Each multiplies its share of the columns; then everybody sends the others the sums of their eight rows of x, and adds
// up what it has got, in the order of the columns. No fence, no count, no memory: two barriers of the cluster.
#pragma once

#include "kernels/gemm/middle_sm90.cuh"

namespace fourfold::gemm {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Grid: cluster_grid. `x` and `Tile` as gemm_middle's; args.split_units: cluster_share. `args.partial` and
// `args.arrived` are not used.
template <typename Tile>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kMiddleThreads, Tile::value.ctas)
    gemm_cluster(const __grid_constant__ ptx::TensorMap x, const __grid_constant__ DenseArgs args) {
  using namespace middle_detail;
  static constexpr MiddleTile T = Tile::value;
  static constexpr MiddleMap kMap = middle_map(T);
  static_assert(T.rows == kMiddleRows && kFragments == kClusterCtas, "a CTA ends eight rows of x");
  static_assert(kMap.row_stride * T.stages >= kClusterCtas * kMiddleTiles * 512u, "room for sums where x was");
  FOURFOLD_DYNAMIC_SHARED(smem);
  const u32 base = keep_register(shared_address(smem));
  const Barriers<Tile> bars{base + kMap.barriers};
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) begin_ring(bars, x);
  grid_launch_dependents();
  __syncthreads();
  const int rank = static_cast<int>(blockIdx.x) % kClusterCtas;
  const int item = static_cast<int>(blockIdx.x) / kClusterCtas;
  const int end_of_item = (item + 1) * args.matrix.units;
  const int begin = item * args.matrix.units + rank * args.split_units;
  const int end = begin + args.split_units < end_of_item ? begin + args.split_units : end_of_item;
  const Place place = place_of(args, item, kMiddleRows);
  const int left = args.tokens - place.first_token;
  const int tokens = left < kMiddleRows ? left : kMiddleRows;
  const bool multiplies = warp < kMiddleTiles;
  const bool there = warp < place.group.tiles;
  const int tile = place.group.first + (there ? warp : 0);
  float acc[kMiddleRows / 2];
#pragma unroll
  for (int i = 0; i < kMiddleRows / 2; ++i) acc[i] = 0.0f;
  if (begin < end) {
    if (multiplies) {
      grid_dependency_wait();
      const u32 scale_base = moe::opaque_scale_base(args.zero);
      Ring ring{0, 0};
      const Segment segment = segment_at(args, begin, end);
      const Part& part = args.matrix.parts[part_of(args.matrix, tile)];
      with_format<Tile>(part.format, [&]<Weights F>() {
        multiply_segment<Tile, F>(args, base, ring, segment, part, tile, there, scale_base, acc);
      });
    } else {
      produce<Tile>(x, args, base, begin, end);
      __syncwarp();
    }
  } else {
    grid_dependency_wait();  // for kernels further on
  }
  // All have multiplied: where their x was, sums may arrive.
  cluster_arrive();
  cluster_wait();
  const u32 sums = base + kMap.rows;
  if (multiplies) {
    const u32 to = sums + static_cast<u32>(((rank * kMiddleTiles + warp) * 32 + lane) * 16);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (i * 8 >= tokens) break;
      cluster_store4(to, static_cast<u32>(i), make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
  }
  cluster_arrive();
  cluster_wait();
  if (!multiplies || !there || rank * 8 >= tokens) return;
  const float4* from = reinterpret_cast<const float4*>(smem + kMap.rows) + warp * 32 + lane;
  float4 sum = from[0];
#pragma unroll
  for (int k = 1; k < kClusterCtas; ++k) {
    const float4 part = from[k * kMiddleTiles * 32];
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  const Ending ending = ending_of(args, tile, lane / 4);
  dense_detail::with_end(args.end, [&]<DenseEnd End>() {
    finish_sums<End>(args, ending, lane / 4, place.first_token + rank * 8 + lane % 4 * 2, sum);
  });
}

#endif

}  // namespace fourfold::gemm
