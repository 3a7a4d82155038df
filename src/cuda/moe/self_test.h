// The check that every kernel passes before it is used on a device: a small slice of the layer with adversarial block
// scales (every e4m3 code, subnormals, 448, zero blocks, negative ones), skewed routing with duplicate and invalid
// expert ids and a row of NaN, compared stage by stage with the reference. Each GEMM is judged on the inputs that it
// really got, so that a mismatch names the kernel that made it.
#pragma once

#include <string>

#include "cuda/moe/layer.h"

namespace fourfold::cuda {

struct SelfTestResult {
  std::string gate_up, down;  // empty: right; otherwise where it was wrong, with both values
};

// Error when the kernel that repacks weights, the routing or the summing kernel is wrong: nothing replaces those.
SelfTestResult self_test(const LayerContext& context, const PlannedPair& pair);

}  // namespace fourfold::cuda
