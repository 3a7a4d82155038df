#include "kernels/moe/prefill_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {
namespace {
template <bool GateUp, int Tokens, int Stages>
ExpertKernel prefill(const char* name) {
  using Tile = PrefillTileOf<GateUp, Tokens, Stages>;
  return {name,
          GateUp,
          false,
          Tokens,
          0,
          kPrefillRowTiles,
          1,
          kPrefillThreads,
          prefill_map(Tile::value).total,
          [](const GemmArgs& args) { moe_prefill<Tile>(args); }};
}
}  // namespace

#define PREFILL(...) prefill<__VA_ARGS__>("prefill {" #__VA_ARGS__ "}")

std::vector<ExpertKernel> prefill_kernels() {
  return {PREFILL(true, 160, 7), PREFILL(false, 160, 7), PREFILL(true, 32, 4), PREFILL(false, 32, 4)};
}

}  // namespace fourfold::moe
