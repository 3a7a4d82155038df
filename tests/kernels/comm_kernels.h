// The kernels between ranks as tests launch them on the host executor.
#pragma once

#include "kernels/comm/reduce_args.h"

namespace fourfold::comm {

void reduce_kernel(const ReduceArgs& args);  // with as many pieces as the columns want

}  // namespace fourfold::comm
