#include "executor/cuda.h"
#include "kernels/gemm/route.cuh"
#include "kernels/gemm/rows.cuh"
#include "kernels/moe/route_sm90.cuh"
#include "kernels/moe/sum_norm.cuh"
#include "kernels/norm/norm.cuh"

#include "kernels/product_kernels.h"

namespace fourfold::gemm {
namespace {
template <auto... Values>
RowsKernel rows_kernel(const char* name) {
  using Tile = RowsTileOf<Values...>;
  return {name, Tile::value, [](const RowsArgs& args) { gemm_rows<Tile>(args); }};
}
}  // namespace

#define ROWS(...) rows_kernel<__VA_ARGS__>("rows {" #__VA_ARGS__ "}")

std::vector<RowsKernel> rows_kernels() {
  // formats, row tiles, warps to a strip, teams, slots, CTAs, norm pieces, choice, share, columns of a router
  return {
      ROWS(15, 1, 8, 1, 3, 1, 0),                  // any stack
      ROWS(15, 2, 8, 1, 3, 1, 0),                  // 9 to 16 rows
      ROWS(15, 1, 8, 2, 3, 1, 0),                  // two teams
      ROWS(15, 1, 8, 1, 2, 1, 1),                  // normalised first
      ROWS(10, 1, 8, 1, 4, 2, 0),                  // FP8 alone
      ROWS(4, 1, 4, 2, 2, 2, 0),                   // NVFP4 alone, sums of 32 row tiles meet at a time
      ROWS(4, 1, 2, 4, 3, 2, 0),                   // the same, strips of two warps
      ROWS(3, 1, 8, 1, 2, 1, 0, true),             // beside the router's choice
      ROWS(15, 1, 8, 1, 2, 1, 1, false, true),     // a share first
      ROWS(3, 1, 8, 1, 2, 1, 0, false, false, 2),  // a router behind it
  };
}

void route_kernel(const RouteArgs& args) { gemm_route(args); }
void pack_routing_kernel(const RoutingPackArgs& args) { gemm_pack_routing(args); }
void routed_kernel(const RoutedArgs& args) {
  switch (norm::norm_pieces(args.norm.columns)) {
    case 1:
      return gemm_routed<1>(args);
    case 2:
      return gemm_routed<2>(args);
    default:
      return gemm_routed<4>(args);
  }
}
void norm_kernel(const norm::NormArgs& args) {
  switch (norm::norm_pieces(args.columns)) {
    case 1:
      return norm::norm_rows<1>(args);
    case 2:
      return norm::norm_rows<2>(args);
    default:
      return norm::norm_rows<4>(args);
  }
}
void sum_kernel(const moe::RowSum& s) {
  if (s.groups != nullptr) {
    const moe::Routing routing = {s.ids, s.weights, 0, s.top_k, 0};
    return moe::moe_combine_packed(s.groups, s.stride, s.pick_slot, routing, s.scales, s.columns, s.out, s.out_stride);
  }
  moe::moe_combine(s.partial, s.stride, s.pick_slot, s.weights, s.top_k, s.columns, s.out, s.out_stride, s.keep);
}
void sum_norm_kernel(const moe::RowSum& sum, const norm::NormArgs& args) {
  const int pieces = norm::norm_pieces(args.columns);
  if (sum.groups == nullptr) return pieces == 1 ? moe::moe_sum_norm<1>(sum, args) : moe::moe_sum_norm<2>(sum, args);
  if (pieces == 1) return moe::moe_sum_norm_packed<1>(sum, args);
  if (pieces == 2) return moe::moe_sum_norm_packed<2>(sum, args);
  moe::moe_sum_norm_packed<4>(sum, args);
}
void embed_kernel(const norm::EmbedArgs& args) { norm::embed_rows(args); }
void gather_kernel(const norm::GatherArgs& args) { norm::gather_rows(args); }

}  // namespace fourfold::gemm
