// A check of a backend's matrix products before it is used: a kernel that this processor, compiler or system breaks is
// found at start and not in an answer.
#pragma once

#include "ops/ops.h"

namespace fourfold::cpu {

// The relative error of a small random NVFP4 product and of a small layer of experts, for one token and for two tiles
// of tokens, against plain arithmetic; the largest. Takes about 2 ms.
double self_test_error(ops::Backend& backend);

inline constexpr double kSelfTestLimit = 2e-3;

}  // namespace fourfold::cpu
