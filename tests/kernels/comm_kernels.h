// The kernels between ranks as tests launch them on the host executor.
#pragma once

#include "kernels/comm/reduce_args.h"

namespace fourfold::comm {

// With as many pieces as the columns want; with flags, or by words.
void reduce_kernel(const ReduceArgs& args, bool words);

}  // namespace fourfold::comm
