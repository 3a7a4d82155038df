// The chain of kernels of an expert layer on the host executor, against the fp32 reference: every kernel that is
// instantiated here, over shapes, batch sizes and routings that have broken such kernels elsewhere.
#include "kernels/expert_layer.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "plan/moe/plan.h"

namespace fourfold::moe {
namespace {

using executor::Options;
using executor::schedules;

using Pair = std::pair<ExpertKernel, ExpertKernel>;

// Kernels that run together: the same batch sizes and, when sorted, the same blocks. Every kernel is in one pair at
// least; `all`: every combination.
std::vector<Pair> pairs(bool one, bool gated = true, bool all = false) {
  const std::vector<ExpertKernel> list = all_kernels();
  std::vector<Pair> result;
  const auto seen = [&](const std::string& name) {
    return std::any_of(result.begin(), result.end(),
                       [&](const Pair& p) { return p.first.name == name || p.second.name == name; });
  };
  for (const ExpertKernel& up : list) {
    for (const ExpertKernel& down : list) {
      if (!fit(up, down) || up.one() != one || up.gated() != gated) continue;
      if (all || !seen(up.name) || !seen(down.name)) result.push_back({up, down});
    }
  }
  return result;
}
// One pair of each sorted family.
std::vector<Pair> families(bool gated = true) {
  std::vector<Pair> result;
  for (const Pair& p : pairs(false, gated)) {
    if (std::none_of(result.begin(), result.end(),
                     [&](const Pair& q) { return q.first.tile().family == p.first.tile().family; })) {
      result.push_back(p);
    }
  }
  return result;
}

unsigned g_seed = 0;

void expect_equal(const LayerWeights& weights, const std::vector<Pair>& list, int tokens, Pattern pattern, int runs = 1,
                  float limit = 0.0f) {
  for (const auto& [up, down] : list) {
    if (up.one() && (tokens > up.tokens() || (tokens == 1) != (up.tokens() == 1))) continue;
    LayerInput input = make_input(weights.shape, tokens, pattern, ++g_seed);
    input.limit = limit;
    const std::vector<float> want = reference(weights, input, up.fp4());
    // The schedules are dealt out over the cases, so that each kernel meets all of them.
    for (Options o : schedules(runs, g_seed * 9)) {
      constexpr executor::Delivery kDeliveries[] = {executor::Delivery::kLate, executor::Delivery::kAtOnce,
                                                    executor::Delivery::kRandom};
      constexpr executor::Order kOrders[] = {executor::Order::kUniform, executor::Order::kPriority,
                                             executor::Order::kSticky};
      o.delivery = kDeliveries[o.seed % 3];
      o.order = kOrders[o.seed / 3 % 3];
      std::string got;
      try {
        got = compare(input, want, run_layer(weights, input, up, down, o).out, tolerance_of(up));
      } catch (const executor::Violation& v) {
        got = v.what();
      }
      EXPECT_EQ(got, "") << up.name << ", " << down.name << ", " << tokens << " tokens, pattern "
                         << static_cast<int>(pattern) << ", seed " << o.seed;
    }
  }
}

TEST(ExpertLayer, FewTokens) {
  const LayerWeights weights = make_weights({12, 3, 320, 96}, 1);
  for (const int tokens : {1, 2, 7, 8}) expect_equal(weights, pairs(true, true, true), tokens, Pattern::kDistinct, 2);
}

TEST(ExpertLayer, SortedTokens) {
  const LayerWeights weights = make_weights({12, 3, 320, 96}, 1);
  for (const int tokens : {1, 9, 63}) expect_equal(weights, pairs(false), tokens, Pattern::kDistinct, 2);
}

TEST(ExpertLayer, SquaredRelu) {
  const LayerWeights weights = make_weights({6, 2, 192, 96, false}, 2);
  for (const int tokens : {3, 8}) expect_equal(weights, pairs(true, false), tokens, Pattern::kHoles, 2);
  for (const int tokens : {9, 40}) expect_equal(weights, pairs(false, false), tokens, Pattern::kHoles, 2);
}

TEST(ExpertLayer, Routings) {
  const LayerWeights weights = make_weights({9, 3, 192, 64}, 3);
  for (const Pattern p : {Pattern::kOneExpert, Pattern::kHoles, Pattern::kDuplicates, Pattern::kNobody}) {
    for (const int tokens : {1, 7}) expect_equal(weights, pairs(true), tokens, p);
    for (const int tokens : {7, 50}) expect_equal(weights, families(), tokens, p);
  }
}

TEST(ExpertLayer, NoTokens) {
  const LayerWeights weights = make_weights({4, 2, 64, 64}, 4);
  expect_equal(weights, families(), 0, Pattern::kDistinct);
}

// The number of choices is a number to the kernels: all of them see the ends, and each some between.
TEST(ExpertLayer, TopKFrom1To16) {
  const std::vector<Pair> one = pairs(true), sorted = families();
  const auto share = [](const std::vector<Pair>& list, int k) {
    if (k == 1 || k == 16) return list;
    std::vector<Pair> some;
    for (size_t i = static_cast<size_t>(k) % 4; i < list.size(); i += 4) some.push_back(list[i]);
    return some;
  };
  for (int k = 1; k <= 16; ++k) {
    const LayerWeights weights = make_weights({18, k, 64, 64}, 5);
    for (const int tokens : {1, 8}) expect_equal(weights, share(one, k), tokens, Pattern::kDistinct);
    expect_equal(weights, share(sorted, k), 11, Pattern::kDistinct);
  }
}

// Depths of one unit, an odd number of units, units that a stage or a split does not divide, and padding; row counts
// that no tile divides.
TEST(ExpertLayer, OddShapes) {
  for (const LayerShape& s : {LayerShape{3, 2, 64, 64}, LayerShape{3, 2, 64, 704}, LayerShape{3, 2, 336, 16},
                              LayerShape{3, 2, 80, 48}, LayerShape{3, 2, 576, 176}, LayerShape{2, 1, 1040, 80}}) {
    const LayerWeights weights = make_weights(s, 6);
    for (const int tokens : {1, 5}) expect_equal(weights, pairs(true), tokens, Pattern::kDistinct);
    expect_equal(weights, pairs(false), 21, Pattern::kHoles);
  }
}

TEST(ExpertLayer, EveryScaleAndTheClamp) {
  const LayerWeights adversarial = make_weights({4, 2, 192, 64}, 7, true);
  expect_equal(adversarial, pairs(true), 6, Pattern::kDistinct);
  expect_equal(adversarial, families(), 12, Pattern::kDistinct);
  const LayerWeights weights = make_weights({4, 2, 192, 64}, 8);
  expect_equal(weights, pairs(true), 6, Pattern::kDistinct, 1, 0.5f);
  expect_equal(weights, families(), 12, Pattern::kDistinct, 1, 0.5f);
}

TEST(ExpertLayer, RoutesOfAnySize) {
  const LayerShape shape{37, 8, 16, 16};
  for (const Pattern p : {Pattern::kDistinct, Pattern::kOneExpert, Pattern::kHoles, Pattern::kNobody}) {
    for (const int tokens : {0, 1, 7, 63, 1024, 1025, 2100}) {
      for (const int tile : {8, 24, 176}) {
        const LayerInput input = make_input(shape, tokens, p, ++g_seed);
        for (const Options& o : schedules(1, g_seed))
          EXPECT_EQ(check_route(shape, input, tile, o), "") << tokens << " " << tile;
      }
    }
  }
}

// What is instantiated here is in the planner's list: a tile that was dropped there must go here, too.
TEST(ExpertLayer, TilesAreInTheList) {
  for (const ExpertKernel& k : all_kernels()) {
    plan::moe::Problem problem = plan::moe::find_shape("397B-A17B");
    if (!k.gated()) problem.activation = plan::moe::Activation::kRelu2;
    if (k.fp4()) problem.activations = plan::moe::ActivationFormat::kNvfp4;
    problem.tokens = k.one() ? k.tokens() : 64;
    const plan::Gpu& gpu = plan::find_gpu(k.fp4() ? "rtx-pro-6000" : "h200");
    if (k.tile().resident_k > 0) problem.hidden = k.tile().resident_k;
    if (k.one() && k.tile().k < 512) problem.hidden = problem.intermediate = 320;     // short copies where K is short
    if (k.fp4() && k.tile().warps == 2) problem.hidden = problem.intermediate = 192;  // no multiple of 128
    const auto candidates = plan::moe::candidates(problem, k.tile().pass, plan::arch_of(gpu));
    const bool found = std::any_of(candidates.begin(), candidates.end(), [&](const plan::moe::Candidate& c) {
      return c.tile == k.tile() && c.ctas_per_sm == k.ctas();
    });
    EXPECT_TRUE(found) << k.name;
  }
}

}  // namespace
}  // namespace fourfold::moe
