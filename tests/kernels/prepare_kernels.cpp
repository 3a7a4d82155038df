#include "executor/cuda.h"
#include "kernels/expert_kernels.h"
#include "kernels/moe/prepare.cuh"

namespace fourfold::moe {

void repack_kernel(const RepackArgs& args) { moe_repack(args); }

void pad_rows_kernel(const unsigned short* from, unsigned short* to, int columns, int padded) {
  moe_pad_rows(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), columns, padded);
}

void append_shared_kernel(const int* ids, const float* weights, const float* gates, int tokens, int top_k,
                          int first_slice, int slices, int* all_ids, float* all_weights) {
  moe_append_shared(ids, weights, gates, tokens, top_k, first_slice, slices, all_ids, all_weights);
}

}  // namespace fourfold::moe
