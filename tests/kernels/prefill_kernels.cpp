#include "kernels/moe/prefill_sm90.cuh"

#include "kernels/expert_kernels.h"

namespace fourfold::moe {
namespace {
template <bool GateUp, int Tokens, int Stages, bool Relu2 = false>
ExpertKernel prefill(const char* name) {
  using Tile = PrefillTileOf<GateUp, Tokens, Stages, Relu2>;
  ExpertKernel k = {};
  k.name = name;
  k.family = plan::Family::kWgmma;
  k.gate_up = GateUp;
  k.gated = !Relu2;
  k.tokens = Tokens;
  k.row_tiles = kPrefillRowTiles;
  k.ctas = 1;
  k.threads = kPrefillThreads;
  k.shared_bytes = prefill_map(Tile::value).total;
  if constexpr (GateUp) {
    k.run_gather = [](const ptx::TensorMap& rows, const GemmArgs& args) { moe_prefill_gather<Tile>(rows, args); };
  } else {
    k.run = [](const GemmArgs& args) { moe_prefill<Tile>(args); };
  }
  return k;
}
}  // namespace

#define PREFILL(...) prefill<__VA_ARGS__>("prefill {" #__VA_ARGS__ "}")

std::vector<ExpertKernel> prefill_kernels() {
  return {
      PREFILL(true, 176, 4), PREFILL(false, 176, 6), PREFILL(true, 32, 3),
      PREFILL(false, 32, 2), PREFILL(false, 32, 3),  PREFILL(true, 32, 6, true),
  };
}

}  // namespace fourfold::moe
