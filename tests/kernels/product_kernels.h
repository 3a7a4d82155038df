// The product and norm kernels as tests launch them on the host executor.
#pragma once

#include <string>
#include <vector>

#include "kernels/gemm/dense_tile.h"
#include "kernels/gemm/experts_args.h"
#include "kernels/gemm/rows_tile.h"
#include "kernels/moe/sum_args.h"
#include "kernels/norm/norm_args.h"
#include "kernels/ptx/tensor_map.h"

namespace fourfold::gemm {

struct RowsKernel {
  std::string name;
  RowsTile tile;
  void (*run)(const RowsArgs&);
};
std::vector<RowsKernel> rows_kernels();

// Products of many rows: by mma.sync, or by wgmma with a tensor map of x.
struct DenseKernel {
  std::string name;
  bool wide;
  int tokens;  // of a CTA at a time
  int threads;
  unsigned shared_bytes;
  void (*run)(const ptx::TensorMap& x, const DenseArgs&);
  bool middle = false;
  MiddleTile tile = {};  // of gemm_middle and gemm_cluster
  bool cluster = false;
};
std::vector<DenseKernel> dense_kernels();

// Products of experts, gate-up or down.
struct ExpertsKernel {
  std::string name;
  bool gate_up;
  DenseTile tile;
  void (*run)(const ExpertsArgs&);
};
std::vector<ExpertsKernel> experts_kernels();

void repack_kernel(const Source& first, const Source& second, bool paired, int first_tile, int tiles, int units,
                   unsigned char* out, int* bad);

void route_kernel(const RouteArgs& args);
void pack_routing_kernel(const RoutingPackArgs& args);
void routed_kernel(const RoutedArgs& args);
void norm_kernel(const norm::NormArgs& args);  // with as many pieces as the columns want
// The sum over experts by itself, and with the norm behind it.
void sum_kernel(const moe::RowSum& sum);
void sum_norm_kernel(const moe::RowSum& sum, const norm::NormArgs& args);
void embed_kernel(const norm::EmbedArgs& args);
void gather_kernel(const norm::GatherArgs& args);

}  // namespace fourfold::gemm
