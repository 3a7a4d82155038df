#include "kernels/expert_kernels.h"
#include "kernels/moe/route_sm90.cuh"

namespace fourfold::moe {

RouteKernels route_kernels() {
  RouteKernels k = {};
  k.one_pass_picks = kRouteOnePass;
  k.one_pass_threads = kRouteThreads;
  k.many_picks = kRouteManyPicks;
  k.count_threads = kRouteThreads;
  k.scatter_threads = kRouteManyThreads;
  k.max_experts = kMaxExperts;
  k.one_pass = [](const Routing& routing, const RouteTable& table, int tile) { moe_route(routing, table, tile); };
  k.count = [](const Routing& routing, const RouteTable& table, int tile) { moe_route_count(routing, table, tile); };
  k.scatter = [](const Routing& routing, const RouteTable& table) { moe_route_scatter(routing, table); };
  k.combine = [](const float* partial, long long stride, const int* pick_slot, const float* weights, int top_k,
                 int columns, unsigned short* out, long long out_stride) {
    moe_combine(partial, stride, pick_slot, weights, top_k, columns, out, out_stride, 0);
  };
  k.beside_threads = kCombineBesideThreads;
  k.beside_columns = kSumColumns;
  k.combine_beside = [](const float* partial, long long stride, const RouteTable& table, const float* weights,
                        int top_k, int columns, unsigned short* out, long long out_stride) {
    moe_combine_beside(partial, stride, table, weights, top_k, columns, out, out_stride, 0);
  };
  k.combine_packed = [](const PackedGroup* partial, long long stride, const int* pick_slot, const Routing& routing,
                        const float* scales, int columns, unsigned short* out, long long out_stride) {
    moe_combine_packed(partial, stride, pick_slot, routing, scales, columns, out, out_stride);
  };
  return k;
}

}  // namespace fourfold::moe
