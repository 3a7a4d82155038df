// Problems: validation, slices, and the arithmetic of random routing against a simulation.
#include "plan/moe/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/check.h"
#include "plan/arch.h"

namespace fourfold::plan::moe {
namespace {

Problem shape(const char* name, int64_t tokens) {
  Problem p = find_shape(name);
  p.tokens = tokens;
  return p;
}

template <typename F>
std::string error_of(F&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Problem, NamesTheFieldThatIsWrong) {
  const auto bad = [](auto change) {
    Problem p = shape("35B-A3B", 1);
    change(p);
    return error_of([&] { validate(p); });
  };
  EXPECT_EQ(bad([](Problem& p) { p.experts = 0; }), "experts: found 0, wanted 1 to 4096");
  EXPECT_EQ(bad([](Problem& p) { p.top_k = 257; }), "top-k: found 257, wanted 1 to 64");
  EXPECT_EQ(bad([](Problem& p) { p.top_k = 0; }), "top-k: found 0, wanted 1 to 64");
  EXPECT_EQ(bad([](Problem& p) { p.tokens = -1; }), "tokens: found -1, wanted 0 to 1048576");
  EXPECT_EQ(bad([](Problem& p) { p.hidden = 2056; }), "hidden: found 2056, wanted a multiple of the scale vector 16");
  EXPECT_EQ(bad([](Problem& p) { p.intermediate = int64_t{1} << 60; }),
            "intermediate: found 1152921504606846976, wanted 16 to 262144");
  EXPECT_NE(bad([](Problem& p) {
              p.weights = WeightFormat::kMxfp4;
              p.activations = ActivationFormat::kNvfp4;
            }),
            "");
  EXPECT_EQ(bad([](Problem&) {}), "");
}

// A rank that has some of the experts as a whole: a token's choices may be more than these.
TEST(Problem, ChoicesMayBeOfOtherRanksExperts) {
  Problem p = shape("35B-A3B", 4);
  p.experts = 8;
  p.top_k = 16;
  EXPECT_EQ(error_of([&] { validate(p); }), "top-k: found 16, wanted 1 to 8");
  p.elsewhere = 8;
  validate(p);
  EXPECT_DOUBLE_EQ(touched_experts(p), 8);
  EXPECT_EQ(busiest_rows(p), 4);
}

TEST(Problem, UnknownNamesAreAnsweredWithTheKnownOnes) {
  EXPECT_NE(error_of([] { find_shape("36B"); }).find("397B-A17B"), std::string::npos);
  EXPECT_NE(error_of([] { find_gpu("h300"); }).find("rtx-pro-6000"), std::string::npos);
  EXPECT_NE(error_of([] { find_arch("sm_120"); }).find("sm_120a"), std::string::npos);
  EXPECT_EQ(find_shape("397b-a17b").experts, 512);
}

TEST(Problem, SlicesTheIntermediateDimension) {
  EXPECT_EQ(rank_slice(shape("flash-next", 1), 2).intermediate, 320);
  EXPECT_EQ(rank_slice(shape("i704", 1), 4).intermediate, 176);
  // The shared expert is cut alike; what does not divide is padded to whole scale vectors.
  Problem p = shape("flash-next", 1);
  p.shared_intermediate = 640;
  EXPECT_EQ(rank_slice(p, 2).shared_intermediate, 320);
  p.shared_intermediate = 656;
  EXPECT_EQ(rank_slice(p, 2).shared_intermediate, 336);
  EXPECT_EQ(rank_slice(find_shape("i704"), 8).intermediate, 96);
  EXPECT_EQ(rank_slice(shape("flash-next", 1), 2).shared_intermediate, 0);
}

TEST(Problem, DepthIsPaddedToWholeUnits) {
  EXPECT_EQ(shape("nemotron-30B", 1).padded_depth(Pass::kDown), 1856);
  EXPECT_EQ(rank_slice(shape("i704", 1), 4).padded_depth(Pass::kDown), 192);
}

TEST(Routing, ExpectationsAgreeWithASimulation) {
  std::mt19937 random(7);
  for (const int64_t tokens : {1, 7, 64, 300}) {
    const Problem p = shape("35B-A3B", tokens);
    constexpr int kTrials = 400;
    double touched = 0, tiles = 0, busiest = 0;
    std::vector<int> order(static_cast<size_t>(p.experts));
    for (int trial = 0; trial < kTrials; ++trial) {
      std::vector<int64_t> rows(static_cast<size_t>(p.experts));
      for (int64_t t = 0; t < tokens; ++t) {
        std::iota(order.begin(), order.end(), 0);
        for (int64_t k = 0; k < p.top_k; ++k) {
          std::swap(order[static_cast<size_t>(k)],
                    order[static_cast<size_t>(k) + random() % static_cast<size_t>(p.experts - k)]);
          ++rows[static_cast<size_t>(order[static_cast<size_t>(k)])];
        }
      }
      for (const int64_t r : rows) {
        touched += r > 0;
        tiles += static_cast<double>((r + 7) / 8);
      }
      busiest += static_cast<double>(*std::max_element(rows.begin(), rows.end()));
    }
    EXPECT_NEAR(touched / kTrials, touched_experts(p), 0.01 * touched_experts(p) + 0.3) << tokens;
    EXPECT_NEAR(tiles / kTrials, token_tiles(p, 8), 0.01 * token_tiles(p, 8) + 0.3) << tokens;
    EXPECT_NEAR(busiest / kTrials, static_cast<double>(busiest_rows(p)), 1.5) << tokens;
  }
}

TEST(Routing, HoldsAtTheEnds) {
  EXPECT_EQ(touched_experts(shape("35B-A3B", 0)), 0);
  EXPECT_EQ(token_tiles(shape("35B-A3B", 0), 8), 0);
  EXPECT_EQ(busiest_rows(shape("35B-A3B", 0)), 0);
  EXPECT_DOUBLE_EQ(touched_experts(shape("35B-A3B", 1)), 8);
  // A dense layer: one expert takes every row.
  EXPECT_EQ(busiest_rows(shape("27B", 100)), 100);
  EXPECT_DOUBLE_EQ(token_tiles(shape("27B", 100), 8), 13);
  // Tiles of one row are rows.
  EXPECT_NEAR(token_tiles(shape("397B-A17B", 16384), 1), 163840, 1);
}

}  // namespace
}  // namespace fourfold::plan::moe
