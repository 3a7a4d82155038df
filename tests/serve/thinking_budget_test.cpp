// A budget of thinking, and the drafts that are taken back.
#include "serve/thinking_budget.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace fourfold::serve {
namespace {

constexpr int32_t kOpen = 40, kClose = 41, kNewline = 7;

ThinkingTokens tokens() { return {kOpen, kClose, {kNewline, kClose, kNewline}}; }

// The one token that may come next; -1: any.
int32_t forced(ThinkingBudget& budget) {
  std::array<uint32_t, 2> bits{};
  if (!budget.mask(bits)) return -1;
  int32_t found = -1;
  for (int32_t token = 0; token < 64; ++token) {
    if ((bits[static_cast<size_t>(token) / 32] >> (token % 32) & 1) == 0) continue;
    EXPECT_EQ(found, -1) << "two tokens are allowed";
    found = token;
  }
  return found;
}

TEST(ThinkingBudget, ClosesTheReasoning) {
  ThinkingBudget budget(tokens(), 2, true);
  for (const int32_t token : {1, 2}) {
    EXPECT_EQ(forced(budget), -1);
    EXPECT_TRUE(budget.accept(token));
  }
  for (const int32_t token : {kNewline, kClose, kNewline}) {
    EXPECT_EQ(forced(budget), token);
    EXPECT_FALSE(budget.accept(3));
    EXPECT_TRUE(budget.accept(token));
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(forced(budget), -1);
    EXPECT_TRUE(budget.accept(3));
  }
}

TEST(ThinkingBudget, LeavesReasoningAloneThatEndsInTime) {
  ThinkingBudget budget(tokens(), 3, true);
  for (const int32_t token : {1, kClose, 1, 2, 3, 4, 5}) {
    EXPECT_TRUE(budget.accept(token));
    EXPECT_EQ(forced(budget), -1);
  }
}

TEST(ThinkingBudget, CountsOnlyReasoningThatTheModelOpens) {
  ThinkingBudget none(tokens(), 1, false);
  for (const int32_t token : {1, kOpen, 2, 3}) EXPECT_TRUE(none.accept(token));
  EXPECT_EQ(forced(none), -1);
  ThinkingBudget opened(tokens(), 1, false);
  EXPECT_TRUE(opened.accept(kOpen));
  EXPECT_EQ(forced(opened), -1);
  EXPECT_TRUE(opened.accept(1));
  EXPECT_EQ(forced(opened), kNewline);
}

TEST(ThinkingBudget, TakesTokensBack) {
  ThinkingBudget budget(tokens(), 1, true);
  EXPECT_TRUE(budget.accept(1));
  EXPECT_TRUE(budget.accept(kNewline));
  EXPECT_TRUE(budget.accept(kClose));
  budget.roll_back(2);
  EXPECT_EQ(forced(budget), kNewline);
  budget.roll_back(1);
  EXPECT_EQ(forced(budget), -1);
  EXPECT_TRUE(budget.accept(kClose));
  EXPECT_EQ(forced(budget), -1);
}

TEST(ThinkingBudget, ClosesAtOnceWhenThereIsNone) {
  ThinkingBudget budget(tokens(), 0, true);
  EXPECT_EQ(forced(budget), kNewline);
}

}  // namespace
}  // namespace fourfold::serve
