// Constraints: their masks hold with drafts and overlap, and what goes wrong in one ends its own request only.
#include "engine/constraints.h"

#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "base/check.h"
#include "engine/engine.h"
#include "harness.h"
#include "test_constraint.h"

namespace fourfold::engine {
namespace {

using Fault = TestConstraint::Fault;

class Constraints : public testing::TestWithParam<int> {
 protected:
  EngineOptions options() const {
    EngineOptions options = small_options();
    options.drafts = GetParam();
    return options;
  }
  static FakeOptions fake() {
    FakeOptions fake;
    fake.mtp = true;
    fake.draft_accuracy = 0.8;
    return fake;
  }
  static Request constrained(uint64_t seed, Fault fault, uint64_t rarity = 10) {
    Request request = simple_request({1, 2, static_cast<int32_t>(seed % 40)}, 50, seed);
    request.sampling.temperature = seed % 2 == 0 ? 0.0f : 1.0f;
    request.constraint = std::make_shared<TestConstraint>(seed, fault, rarity);
    return request;
  }
};

TEST_P(Constraints, HoldForEveryToken) {
  const auto engine = fake_engine(options(), fake());
  std::vector<std::unique_ptr<EventStream>> streams;
  for (uint64_t seed = 0; seed < 12; ++seed) streams.push_back(engine->submit(constrained(seed, Fault::kNone)));
  for (uint64_t seed = 0; seed < 12; ++seed) {
    TestConstraint copy(seed, Fault::kNone, 10);
    EXPECT_EQ(collect(*streams[seed]), alone(constrained(seed, Fault::kNone), 40, 64, &copy)) << seed;
  }
  expect_idle(*engine);
}

TEST_P(Constraints, FailuresEndTheirOwnRequestOnly) {
  const auto engine = fake_engine(options(), fake());
  Request good = simple_request({5, 6}, 50);
  const auto beside = engine->submit(good);
  const std::pair<Fault, const char*> faults[] = {{Fault::kThrows, "constraint: mask() failed: no idea"},
                                                  {Fault::kRefuses, "was chosen from its mask, and is refused now"},
                                                  {Fault::kDeadEnd, "constraint: no token may come next"}};
  for (const auto& [fault, message] : faults) {
    // At once: nothing was accepted yet.
    const auto stream = engine->submit(constrained(3, fault, 1));
    const Outcome outcome = collect(*stream);
    EXPECT_EQ(outcome.end.reason, FinishReason::kError);
    EXPECT_NE(outcome.end.error.find(message), std::string::npos) << outcome.end.error;
    EXPECT_TRUE(outcome.tokens.empty());
    // In the middle.
    TestConstraint copy(8, fault, 6);
    const Request request = constrained(8, fault, 6);
    const Outcome expected = alone(request, 40, 64, &copy);
    ASSERT_EQ(expected.end.reason, FinishReason::kError);
    const auto later = engine->submit(request);
    const Outcome part = collect(*later);
    EXPECT_EQ(part.end.reason, FinishReason::kError);
    if (fault != Fault::kThrows || GetParam() == 0) {
      EXPECT_EQ(part.tokens, expected.tokens);
    }
  }
  EXPECT_EQ(collect(*beside), alone(good, 40, 64));
  expect_idle(*engine);
}

TEST_P(Constraints, CancelledRequestsNeedNoMasks) {
  const auto engine = fake_engine(options(), fake());
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto stream = engine->submit(constrained(seed, Fault::kNone));
    const Outcome outcome = collect(*stream, static_cast<int64_t>(seed % 5));
    EXPECT_TRUE(outcome.end.reason == FinishReason::kCancelled || outcome.tokens.size() == 50);
  }
  expect_idle(*engine);
}

INSTANTIATE_TEST_SUITE_P(Drafts, Constraints, testing::Values(0, 1, 5, kAutoDrafts), [](const auto& param) {
  return param.param < 0 ? std::string("Auto") : std::to_string(param.param);
});

// Any token; then only the one after the token before.
class Chain final : public Constraint {
 public:
  bool mask(std::span<uint32_t> bits) override {
    if (tokens.empty()) return false;
    const auto next = static_cast<size_t>(tokens.back() + 1);
    if (next < 40) bits[next / 32] |= uint32_t{1} << (next % 32);
    return true;
  }
  bool accept(int32_t token) override {
    if (!tokens.empty() && token != tokens.back() + 1) return false;
    tokens.push_back(token);
    return true;
  }
  void roll_back(int64_t count) override { tokens.resize(tokens.size() - static_cast<size_t>(count)); }
  std::vector<int32_t> tokens;
};

int64_t allowed(std::span<const uint32_t> row) {
  return std::accumulate(row.begin(), row.end(), int64_t{0},
                         [](int64_t sum, uint32_t word) { return sum + std::popcount(word); });
}

TEST(Masks, OneForEachDraftAsFarAsTheyFit) {
  Chain chain;
  std::vector<uint32_t> rows;
  append_masks(chain, {}, 40, rows);
  EXPECT_EQ(rows, (std::vector<uint32_t>{~0u, 0xffu}));  // not beyond the vocabulary
  accept_token(chain, 36);
  rows.clear();
  const std::vector<int32_t> fitting = {37, 38};
  append_masks(chain, fitting, 40, rows);
  ASSERT_EQ(rows.size(), 6u);
  EXPECT_EQ(rows[3], 1u << 6);
  EXPECT_EQ(rows[5], 1u << 7);
  EXPECT_EQ(chain.tokens, (std::vector<int32_t>{36}));
  rows.clear();
  const std::vector<int32_t> unfit = {37, 5, 6};
  append_masks(chain, unfit, 40, rows);
  EXPECT_EQ(rows.size(), 4u);
  EXPECT_EQ(allowed(std::span(rows).first(2)), 1);
  // Behind 39 nothing may come: the row is left out, and the draft is the lane's last token.
  rows.clear();
  const std::vector<int32_t> to_the_end = {37, 38, 39};
  append_masks(chain, to_the_end, 40, rows);
  EXPECT_EQ(rows.size(), 6u);
  EXPECT_EQ(chain.tokens, (std::vector<int32_t>{36}));
  chain.tokens = {39};
  EXPECT_THROW(append_masks(chain, {}, 40, rows), Error);
  EXPECT_THROW(accept_token(chain, 3), Error);
}

}  // namespace
}  // namespace fourfold::engine
