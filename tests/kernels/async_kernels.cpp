#include "kernels/expert_kernels.h"
#include "kernels/moe/fp4_sm120.cuh"
#include "kernels/moe/mma_sync.cuh"

namespace fourfold::moe {
namespace {
using namespace tiles;

template <TileConfig T, int Ctas>
ExpertKernel async() {
  ExpertKernel k(T, Ctas);
  if constexpr (T.family == Family::kFp4) {
    k.run_fp4 = [](const Fp4Args& args) { moe_fp4<Of<T, Ctas>>(args); };
  } else {
    k.run = [](const GemmArgs& args) { moe_mma_sync<Of<T, Ctas>>(args); };
  }
  return k;
}
}  // namespace

std::vector<ExpertKernel> async_kernels() {
  // tokens, rows, k, stages, warps
  return {
      async<mma_sync(kUp, 16, 128, 64, 2, 4), 2>(),
      async<mma_sync(kDown, 16, 64, 64, 3, 4), 2>(),
      async<mma_sync(kUp, 64, 64, 128, 3, 8), 1>(),
      async<mma_sync(kDown, 64, 64, 256, 2, 8), 1>(),
      async<mma_sync(kUp, 16, 64, 128, 2, 4, false), 2>(),  // squared ReLU
      async<fp4(kUp, 16, 128, 64, 2, 4), 2>(),
      async<fp4(kDown, 16, 64, 64, 2, 4), 2>(),
      async<fp4(kUp, 64, 128, 128, 3, 8), 1>(),
      async<fp4(kDown, 64, 128, 256, 2, 8), 1>(),
      async<fp4(kUp, 16, 64, 64, 3, 4, false), 2>(),
      async<fp4(kUp, 8, 64, 64, 2, 2), 3>(),
      async<fp4(kDown, 8, 64, 128, 3, 2), 1>(),
  };
}

void quantize_kernel(const unsigned short* rows, long long stride, int columns, int units, const float* input_scale,
                     unsigned char* codes, long long code_stride, unsigned char* scales, long long scale_stride) {
  moe_quantize(rows, stride, columns, units, input_scale, codes, code_stride, scales, scale_stride);
}

}  // namespace fourfold::moe
