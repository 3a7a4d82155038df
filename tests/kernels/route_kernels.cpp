#include "kernels/moe/route_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {

RouteKernels route_kernels() {
  return {kRouteOnePass,
          kRouteThreads,
          kRouteManyPicks,
          kRouteThreads,
          kRouteManyThreads,
          kMaxExperts,
          [](const Routing& routing, const RouteTable& table, int tile) { moe_route(routing, table, tile); },
          [](const Routing& routing, const RouteTable& table, int tile) { moe_route_count(routing, table, tile); },
          [](const Routing& routing, const RouteTable& table) { moe_route_scatter(routing, table); },
          [](const float* partial, long long partial_stride, const int* pick_slot, const float* weights, int top_k,
             int columns, unsigned short* out, long long out_stride) {
            moe_combine(partial, partial_stride, pick_slot, weights, top_k, columns, out, out_stride);
          }};
}

}  // namespace fourfold::moe
