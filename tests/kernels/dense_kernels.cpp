#include "executor/cuda.h"
#include "kernels/gemm/cluster_sm90.cuh"
#include "kernels/gemm/dense.cuh"
#include "kernels/gemm/dense_sm90.cuh"
#include "kernels/gemm/experts.cuh"
#include "kernels/gemm/middle_sm90.cuh"
#include "kernels/gemm/repack.cuh"

#include "kernels/product_kernels.h"

namespace fourfold::gemm {
namespace {
template <int... Values>
DenseKernel dense_kernel(const char* name) {
  using Tile = DenseTileOf<Values...>;
  return {name,
          false,
          Tile::value.tokens,
          kDenseThreads,
          dense_map(Tile::value).total,
          [](const ptx::TensorMap&, const DenseArgs& args) { gemm_dense<Tile>(args); }};
}
template <int... Values>
DenseKernel wide_kernel(const char* name) {
  using Tile = WideTileOf<Values...>;
  return {name,
          true,
          Tile::value.tokens,
          kWideThreads,
          wide_map(Tile::value).total,
          [](const ptx::TensorMap& x, const DenseArgs& args) { gemm_wide<Tile>(x, args); }};
}
template <int... Values>
DenseKernel middle_kernel(const char* name) {
  using Tile = MiddleTileOf<Values...>;
  return {name,
          false,
          Tile::value.rows,
          kMiddleThreads,
          middle_map(Tile::value).total,
          [](const ptx::TensorMap& x, const DenseArgs& args) { gemm_middle<Tile>(x, args); },
          true,
          Tile::value};
}
template <int... Values>
DenseKernel cluster_kernel(const char* name) {
  using Tile = MiddleTileOf<Values...>;
  DenseKernel k = middle_kernel<Values...>(name);
  k.run = [](const ptx::TensorMap& x, const DenseArgs& args) { gemm_cluster<Tile>(x, args); };
  k.middle = false;
  k.cluster = true;
  return k;
}
}  // namespace

#define DENSE(...) dense_kernel<__VA_ARGS__>("dense {" #__VA_ARGS__ "}")
#define CLUSTER(...) cluster_kernel<__VA_ARGS__>("cluster {" #__VA_ARGS__ "}")
#define MIDDLE(...) middle_kernel<__VA_ARGS__>("middle {" #__VA_ARGS__ "}")
#define WIDE(...) wide_kernel<__VA_ARGS__>("wide {" #__VA_ARGS__ "}")

std::vector<DenseKernel> dense_kernels() {
  return {
      DENSE(15, 64, 4, 3, 1),                    // formats, tokens, warps along rows, stages, CTAs
      DENSE(15, 32, 8, 2, 1),                    //
      WIDE(15, 32, 3),                           // formats, tokens, stages
      WIDE(7, 64, 2),         MIDDLE(15, 4, 1),  // formats, stages, CTAs
      MIDDLE(7, 2, 2),        CLUSTER(15, 3, 1), MIDDLE(15, 2, 1, 32),  // and rows of x
  };
}

namespace {
template <bool GateUp, int... Values>
ExpertsKernel experts_kernel(const char* name) {
  using Tile = DenseTileOf<Values...>;
  return {name, GateUp, Tile::value, [](const ExpertsArgs& args) { gemm_experts<Tile, GateUp>(args); }};
}
}  // namespace

std::vector<ExpertsKernel> experts_kernels() {
  return {
      experts_kernel<true, 15, 16, 8, 3, 1>("gate-up {15, 16, 8, 3, 1}"),
      experts_kernel<false, 15, 16, 8, 3, 1>("down {15, 16, 8, 3, 1}"),
      experts_kernel<true, 15, 64, 4, 2, 1>("gate-up {15, 64, 4, 2, 1}"),
      experts_kernel<false, 15, 64, 4, 2, 1>("down {15, 64, 4, 2, 1}"),
  };
}

void repack_kernel(const Source& first, const Source& second, bool paired, int first_tile, int tiles, int units,
                   unsigned char* out, int* bad) {
  gemm_repack(RepackArgs{first, second, paired ? 1 : 0, first_tile, tiles, units, out, bad});
}

}  // namespace fourfold::gemm
