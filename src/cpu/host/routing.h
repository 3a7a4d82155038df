// Choice of experts, the same for every CPU backend.
#pragma once

#include <cstdint>

namespace fourfold::cpu {

// Softmax over logits[experts], the top_k largest in descending order (ties: the lower index), their weights
// renormalised to sum 1 when `renormalize`. Always writes top_k distinct indices inside [0, experts): a NaN logit
// counts as minus infinity when experts are chosen, and any NaN makes all weights NaN, so that it stays visible in the
// output. 1 <= top_k <= experts.
void select_experts(const float* logits, int64_t experts, int64_t top_k, bool renormalize, int32_t* indices,
                    float* weights);

}  // namespace fourfold::cpu
