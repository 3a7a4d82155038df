#include "cpu/host/routing.h"

#include <cmath>
#include <limits>

namespace fourfold::cpu {

void select_experts(const float* logits, int64_t experts, int64_t top_k, bool renormalize, int32_t* indices,
                    float* weights) {
  constexpr int64_t kKept = 16;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  // Insertion into a short sorted list; equal logits keep the order of their indices. Softmax is monotonic, so logits
  // are compared instead of probabilities.
  int64_t found = 0;
  bool nan = false;
  for (int64_t e = 0; e < experts; ++e) {
    const bool is_nan = std::isnan(logits[e]);
    nan = nan || is_nan;
    const float value = is_nan ? kLowest : logits[e];
    if (found == top_k && !(value > weights[top_k - 1])) continue;
    int64_t at = found < top_k ? found++ : top_k - 1;
    for (; at > 0 && value > weights[at - 1]; --at) {
      weights[at] = weights[at - 1];
      indices[at] = indices[at - 1];
    }
    weights[at] = value;
    indices[at] = static_cast<int32_t>(e);
  }
  if (nan) {
    for (int64_t i = 0; i < top_k; ++i) weights[i] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float largest = weights[0];
  const auto exponential = [&](float logit) { return std::exp(static_cast<double>(logit - largest)); };
  double sum = 0;
  if (renormalize && top_k <= kKept) {
    double kept[kKept];
    for (int64_t i = 0; i < top_k; ++i) {
      kept[i] = exponential(weights[i]);
      sum += kept[i];
    }
    for (int64_t i = 0; i < top_k; ++i) weights[i] = static_cast<float>(kept[i] / sum);
    return;
  }
  for (int64_t e = 0; e < (renormalize ? top_k : experts); ++e)
    sum += exponential(renormalize ? weights[e] : logits[e]);
  for (int64_t i = 0; i < top_k; ++i) weights[i] = static_cast<float>(exponential(weights[i]) / sum);
}

}  // namespace fourfold::cpu
