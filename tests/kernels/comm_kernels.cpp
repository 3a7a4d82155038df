#include "kernels/comm_kernels.h"

#include "executor/cuda.h"
#include "kernels/comm/reduce.cuh"
#include "kernels/comm/words.cuh"

namespace fourfold::comm {

void reduce_kernel(const ReduceArgs& args, bool words) {
  switch (norm::norm_pieces(args.norm.columns)) {
    case 1:
      return words ? reduce_norm_words<1>(args) : reduce_norm_rows<1>(args);
    case 2:
      return words ? reduce_norm_words<2>(args) : reduce_norm_rows<2>(args);
    default:
      return words ? reduce_norm_words<4>(args) : reduce_norm_rows<4>(args);
  }
}

}  // namespace fourfold::comm
