#include "kernels/moe/prefill_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {
namespace {
using namespace tiles;

template <TileConfig T>
ExpertKernel prefill() {
  ExpertKernel k(T, 1);
  if constexpr (T.pass == Pass::kGateUp) {
    k.run_gather = [](const ptx::TensorMap& rows, const GemmArgs& args) { moe_prefill_gather<Of<T, 1>>(rows, args); };
  } else {
    k.run = [](const GemmArgs& args) { moe_prefill<Of<T, 1>>(args); };
  }
  return k;
}
}  // namespace

std::vector<ExpertKernel> prefill_kernels() {
  // tokens, stages
  return {
      prefill<wgmma(kUp, 176, 4)>(),  prefill<wgmma(kDown, 176, 6)>(), prefill<wgmma(kUp, 32, 3)>(),
      prefill<wgmma(kDown, 32, 2)>(), prefill<wgmma(kDown, 32, 3)>(),  prefill<wgmma(kUp, 32, 6, false)>(),
  };
}

}  // namespace fourfold::moe
