#include "engine/draft_lists.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "base/random.h"
#include "engine/engine.h"

namespace fourfold::engine {
namespace {

constexpr int64_t kVocabulary = 248320;

// Tokens of which these shares are in the second quarter and the second half of the vocabulary.
std::vector<int32_t> text_of(int64_t count, double second_quarter, double second_half, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    const double at = random.uniform();
    const int64_t quarter = at < second_half ? 2 : at < second_half + second_quarter ? 1 : 0;
    tokens.push_back(
        static_cast<int32_t>((quarter * kVocabulary + static_cast<int64_t>(random.below(kVocabulary))) / 4));
  }
  return tokens;
}

class Lists : public testing::Test {
 protected:
  int32_t choice(const std::vector<std::vector<int32_t>>& tokens) const {
    std::vector<ListedText> texts(tokens.size());
    std::vector<const ListedText*> seen;
    for (size_t i = 0; i < tokens.size(); ++i) {
      lists_.count(texts[i], tokens[i]);
      seen.push_back(&texts[i]);
    }
    return lists_.choose(seen);
  }
  const DraftLists lists_{DraftLists::of(kAutoDraftTokens, kVocabulary), kVocabulary, false};
};

TEST_F(Lists, AreHalfAndQuarterOfALargeVocabulary) {
  using Sizes = std::array<int64_t, ops::kDraftLists>;
  EXPECT_EQ(DraftLists::of(kAutoDraftTokens, kVocabulary), (Sizes{124160, 62080}));
  EXPECT_EQ(DraftLists::of(kAutoDraftTokens, 2048), Sizes{});
  EXPECT_EQ(DraftLists::of(0, kVocabulary), Sizes{});
  EXPECT_EQ(DraftLists::of(131000, kVocabulary), (Sizes{131072, 0}));
  EXPECT_EQ(DraftLists::of(300000, kVocabulary), Sizes{});
  EXPECT_EQ(DraftLists::of(1, 2048), (Sizes{128, 0}));
}

TEST_F(Lists, GoByTheText) {
  EXPECT_EQ(choice({text_of(2000, 0.3, 0, 1)}), 1);
  EXPECT_EQ(choice({text_of(2000, 0, 0, 1)}), 2);
  EXPECT_EQ(choice({text_of(2000, 0.1, 0.1, 1)}), 0);
  EXPECT_EQ(choice({text_of(20, 0, 0, 1)}), 0) << "little is known yet";
  EXPECT_EQ(choice({}), 0);
}

TEST_F(Lists, GoByAllSequencesOfAStep) {
  const std::vector<int32_t> latin = text_of(2000, 0.3, 0, 1), other = text_of(2000, 0.1, 0.2, 2);
  EXPECT_EQ(choice({latin, latin, latin}), 1);
  EXPECT_EQ(choice({latin, other, latin}), 0);
}

TEST_F(Lists, GoByTheLatestTokens) {
  ListedText text;
  const ListedText* const one = &text;
  std::vector<int32_t> tokens = text_of(3000, 0.3, 0, 1);
  lists_.count(text, tokens);
  EXPECT_EQ(lists_.choose({&one, 1}), 1);
  for (const int32_t token : text_of(100, 0.1, 0.5, 2)) {
    tokens.push_back(token);
    lists_.count(text, tokens);
  }
  EXPECT_EQ(text.counted, 3100);
  EXPECT_EQ(lists_.choose({&one, 1}), 0);
  for (const int32_t token : text_of(1200, 0.3, 0, 3)) {
    tokens.push_back(token);
    lists_.count(text, tokens);
  }
  EXPECT_EQ(lists_.choose({&one, 1}), 1);
  // The same however they come.
  ListedText at_once;
  lists_.count(at_once, text_of(700, 0.3, 0.01, 4));
  ListedText by_one;
  const std::vector<int32_t> all = text_of(700, 0.3, 0.01, 4);
  for (size_t i = 1; i <= all.size(); ++i) lists_.count(by_one, std::span(all).first(i));
  EXPECT_EQ(at_once.behind, by_one.behind);
}

TEST_F(Lists, AreTakenWithoutTextWhereAsked) {
  const DraftLists fixed(DraftLists::of(1000, kVocabulary), kVocabulary, true);
  EXPECT_EQ(fixed.choose({}), 1);
}

}  // namespace
}  // namespace fourfold::engine
