#include "kernels/comm_kernels.h"

#include "base/check.h"
#include "executor/cuda.h"
#include "kernels/comm/each.cuh"
#include "kernels/comm/reduce.cuh"
#include "kernels/comm/routed.cuh"
#include "kernels/comm/two_shot.cuh"
#include "kernels/comm/words.cuh"
#include "kernels/moe/route_sm90.cuh"

namespace fourfold::comm {
namespace {

template <int Pieces>
void reduce(const ReduceArgs& args, Way way) {
  switch (way) {
    case Way::kFlags:
      return reduce_norm_rows<Pieces>(args);
    case Way::kWords:
      return args.norm.share.x != nullptr ? reduce_norm_words<Pieces, true>(args) : reduce_norm_words<Pieces>(args);
    case Way::kTwoShot:
      return args.norm.share.x != nullptr ? reduce_norm_two_shot<Pieces, true, true>(args)
                                          : reduce_norm_two_shot<Pieces, true>(args);
    case Way::kTwoShotOwned:
      if (args.sum.groups != nullptr) {
        return args.norm.share.x != nullptr ? reduce_norm_two_shot<Pieces, false, true, true>(args)
                                            : reduce_norm_two_shot<Pieces, false, false, true>(args);
      }
      return args.norm.share.x != nullptr ? reduce_norm_two_shot<Pieces, false, true>(args)
                                          : reduce_norm_two_shot<Pieces, false>(args);
    case Way::kEach:
      return args.norm.share.x != nullptr ? reduce_norm_each<Pieces, true>(args) : reduce_norm_each<Pieces>(args);
    case Way::kEachAlone:
      return reduce_norm_each<Pieces, false, true>(args);
    case Way::kEachRouted:
      break;
  }
  FF_ASSERT(false);
}

}  // namespace

void sum_of_groups(const moe::RowSum& sum) {
  const moe::Routing routing = {sum.ids, sum.weights, 0, sum.top_k, 0};
  moe::moe_combine_packed(sum.groups, sum.stride, sum.pick_slot, routing, sum.scales, sum.columns, sum.out,
                          sum.out_stride);
}

void reduce_kernel(const ReduceArgs& args, Way way) {
  switch (norm::norm_pieces(args.norm.columns)) {
    case 1:
      return reduce<1>(args, way);
    case 2:
      return reduce<2>(args, way);
    default:
      return reduce<4>(args, way);
  }
}

void reduce_routed_kernel(const ReduceRoutedArgs& args) {
  norm::norm_pieces(args.routed.norm.columns) == 1 ? reduce_norm_routed<1>(args) : reduce_norm_routed<2>(args);
}

}  // namespace fourfold::comm
