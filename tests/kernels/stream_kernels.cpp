#include "kernels/moe/stream_sm90.cuh"

#include "kernels/moe/few_sm90.cuh"
#include "kernels/moe/one_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {
namespace {
using namespace tiles;

template <TileConfig T, int Ctas>
ExpertKernel stream() {
  ExpertKernel k(T, Ctas);
  k.run = [](const GemmArgs& args) {
    if constexpr (T.family == Family::kFewTokens) {
      moe_few<Of<T, Ctas>>(args);
    } else if constexpr (T.family == Family::kOneToken) {
      moe_one<Of<T, Ctas>>(args);
    } else {
      moe_stream<Of<T, Ctas>>(args);
    }
  };
  return k;
}
}  // namespace

std::vector<ExpertKernel> stream_kernels() {
  return {
      // rows, k, stages, warps, groups of warps that take whole stages
      stream<one_token(kUp, 32, 512, 4, 4, 1), 1>(),   // K split inside a stage
      stream<one_token(kUp, 32, 512, 3, 8, 1), 1>(),   // one unit of a stage for each warp
      stream<one_token(kUp, 16, 1024, 4, 8, 2), 1>(),  // one row tile
      stream<one_token(kUp, 16, 512, 4, 4, 2), 1>(),   // and by stages
      stream<one_token(kUp, 16, 512, 4, 8, 4), 1>(),
      stream<one_token(kDown, 16, 512, 4, 4, 2), 1>(),
      stream<one_token(kDown, 16, 512, 4, 8, 2), 1>(),
      stream<one_token(kDown, 32, 512, 4, 8, 2), 1>(),
      stream<one_token(kDown, 16, 256, 8, 8, 8), 1>(),  // every warp stages of its own
      stream<one_token(kDown, 32, 1024, 3, 8, 1), 1>(),
      // rows, k, stages, groups, columns that stay or rows of a stage
      stream<few_tokens(kUp, 16, 512, 4, 2, 17 * 64), 1>(),  // one row tile
      stream<few_tokens(kUp, 32, 512, 4, 2, 17 * 64), 1>(),
      stream<few_tokens(kUp, 32, 512, 4, 2, 48 * 64), 1>(),  // experts with one token apart
      stream<few_tokens(kDown, 16, 512, 4, 2, 4), 1>(),
      stream<few_tokens(kDown, 32, 512, 6, 2, 2), 1>(),
      stream<few_tokens(kDown, 32, 256, 4, 4, 2), 1>(),
      // tokens, rows, k, stages, warps, warps that share K, groups
      stream<streaming(kUp, 8, 64, 256, 3, 4, 2, 1), 2>(),
      stream<streaming(kUp, 24, 64, 128, 2, 4, 2, 2), 1>(),
      stream<streaming(kUp, 32, 128, 64, 3, 4, 1, 1), 1>(),
      stream<streaming(kDown, 8, 64, 256, 3, 4, 2, 1), 2>(),
      stream<streaming(kDown, 24, 64, 128, 2, 4, 2, 2), 1>(),
      stream<streaming(kDown, 32, 128, 64, 3, 4, 1, 1), 1>(),
      stream<streaming(kUp, 24, 512, 128, 3, 16, 1, 1), 1>(),  // registers move from the producers
      stream<streaming(kDown, 24, 512, 256, 2, 16, 1, 1), 1>(),
      stream<one_token(kUp, 32, 512, 4, 4, 1, false), 1>(),  // squared ReLU
      stream<few_tokens(kUp, 32, 512, 4, 2, 17 * 64, false), 1>(),
      stream<streaming(kUp, 8, 64, 256, 3, 4, 2, 1, false), 2>(),
  };
}

}  // namespace fourfold::moe
