// The chain of kernels of an expert layer on the host executor, against the fp32 reference.
#include "kernels/expert_layer.h"

#include <gtest/gtest.h>

#include <map>

namespace fourfold::moe {
namespace {

using executor::Options;
using executor::schedules;

// Pairs of kernels that run together: the same batch sizes and, when sorted, the same blocks.
std::vector<std::pair<ExpertKernel, ExpertKernel>> pairs(bool few, bool gated = true) {
  std::vector<ExpertKernel> all = stream_kernels();
  if (!few) {
    for (ExpertKernel& k : prefill_kernels()) all.push_back(std::move(k));
  }
  std::vector<std::pair<ExpertKernel, ExpertKernel>> result;
  for (const ExpertKernel& up : all) {
    for (const ExpertKernel& down : all) {
      if (up.gate_up && !down.gate_up && up.few == few && down.few == few && up.tokens == down.tokens &&
          up.slots == down.slots && up.gated == gated) {
        result.push_back({up, down});
      }
    }
  }
  return result;
}

TEST(ExpertLayer, FewTokens) {
  const LayerShape shape{12, 3, 320, 96};
  const LayerWeights weights = make_weights(shape, 1);
  unsigned seed = 0;
  for (const auto& [up, down] : pairs(true)) {
    for (const int tokens : {1, 7}) {
      if (tokens > up.max_tokens || tokens > down.max_tokens) continue;
      for (const Options& o : schedules(3, ++seed)) {
        const LayerInput input = make_input(shape, tokens, Pattern::kDistinct, seed);
        EXPECT_EQ(check_layer(weights, input, up, down, o), "") << up.name << " " << down.name << " " << tokens;
      }
    }
  }
}

TEST(ExpertLayer, Sorted) {
  const LayerShape shape{12, 3, 320, 96};
  const LayerWeights weights = make_weights(shape, 1);
  unsigned seed = 0;
  for (const auto& [up, down] : pairs(false)) {
    for (const int tokens : {9, 63}) {
      for (const Options& o : schedules(3, ++seed)) {
        const LayerInput input = make_input(shape, tokens, Pattern::kDistinct, seed);
        EXPECT_EQ(check_layer(weights, input, up, down, o), "") << up.name << " " << down.name << " " << tokens;
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::moe
