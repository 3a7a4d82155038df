// The kernels between ranks as tests launch them on the host executor.
#pragma once

#include "kernels/comm/reduce_args.h"

namespace fourfold::comm {

enum class Way { kFlags, kWords, kTwoShot, kTwoShotOwned, kEach, kEachAlone, kEachRouted };

// With as many pieces as the columns want. kEach: a CTA for each row, up to two pieces; kEachAlone: without residual
// and norm. kTwoShotOwned: the residual stays with the row's owner.
void reduce_kernel(const ReduceArgs& args, Way way);
// kEachRouted: with the router's choice behind it.
void reduce_routed_kernel(const ReduceRoutedArgs& args);
// moe_combine_packed: sum.out of rows of groups.
void sum_of_groups(const moe::RowSum& sum);

}  // namespace fourfold::comm
