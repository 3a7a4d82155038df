#include "kernels/comm_kernels.h"

#include "executor/cuda.h"
#include "kernels/comm/reduce.cuh"

namespace fourfold::comm {

void reduce_kernel(const ReduceArgs& args) {
  switch (norm::norm_pieces(args.norm.columns)) {
    case 1:
      return reduce_norm_rows<1>(args);
    case 2:
      return reduce_norm_rows<2>(args);
    default:
      return reduce_norm_rows<4>(args);
  }
}

}  // namespace fourfold::comm
