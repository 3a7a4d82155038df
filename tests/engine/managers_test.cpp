// The small managers on their own: pages, slots and sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/property.h"
#include "base/random.h"
#include "engine/engine.h"
#include "engine/pages.h"
#include "engine/states.h"

namespace fourfold::engine {
namespace {

TEST(Pages, GrowIsAllOrNothing) {
  PageAllocator pages(4, 8);
  std::vector<int32_t> a, b;
  EXPECT_TRUE(pages.grow(a, 17));
  EXPECT_EQ(a.size(), 3u);
  EXPECT_TRUE(pages.grow(a, 24));  // fits already
  EXPECT_EQ(a.size(), 3u);
  EXPECT_FALSE(pages.grow(b, 9));
  EXPECT_TRUE(b.empty());
  EXPECT_TRUE(pages.grow(b, 8));
  EXPECT_EQ(pages.free(), 0);
  pages.check();
  pages.release(a);
  EXPECT_TRUE(a.empty());
  EXPECT_EQ(pages.free(), 3);
  pages.check();
}

FOURFOLD_PROPERTY(Pages, NoPageIsHandedOutTwice) {
  const int64_t total = 1 + static_cast<int64_t>(random.below(40));
  const int64_t page_size = 1 + static_cast<int64_t>(random.below(8));
  PageAllocator pages(total, page_size);
  std::vector<std::vector<int32_t>> owners(5);
  for (int step = 0; step < 100; ++step) {
    auto& owner = owners[random.below(owners.size())];
    if (random.below(3) == 0) {
      pages.release(owner);
    } else {
      const int64_t positions = static_cast<int64_t>(random.below(static_cast<uint64_t>(total * page_size + 10)));
      const size_t before = owner.size();
      const int64_t free = pages.free();
      const bool grown = pages.grow(owner, positions);
      const int64_t needed = std::max<int64_t>(pages.pages_for(positions) - static_cast<int64_t>(before), 0);
      ASSERT_TRUE(grown == (needed <= free));
      ASSERT_TRUE(owner.size() == before + static_cast<size_t>(grown ? needed : 0));
    }
    std::set<int32_t> seen;
    size_t held = 0;
    for (const auto& o : owners) {
      seen.insert(o.begin(), o.end());
      held += o.size();
    }
    ASSERT_TRUE(seen.size() == held);
    ASSERT_TRUE(pages.used() == static_cast<int64_t>(held));
    pages.check();
  }
}

TEST(Slots, TakeAndRelease) {
  SlotAllocator slots(2);
  const int32_t a = slots.take(), b = slots.take();
  EXPECT_NE(a, b);
  EXPECT_EQ(slots.take(), -1);
  slots.release(a);
  EXPECT_EQ(slots.free(), 1);
  EXPECT_EQ(slots.take(), a);
  slots.release(a);
  EXPECT_THROW(slots.release(a), std::logic_error);  // given back twice
  slots.check();
}

TEST(StepTokens, AreNoMoreThanThereArePositions) {
  EXPECT_EQ(step_tokens({.max_context = 100, .max_sequences = 3, .max_step_tokens = 8192}), 300);
  EXPECT_EQ(step_tokens({.max_context = int64_t{1} << 62, .max_sequences = 64, .max_step_tokens = 8192}), 8192);
  EXPECT_EQ(step_tokens({.max_context = 2, .max_sequences = 3, .max_step_tokens = 1}), 3);
}

// A row for each sequence and each of its drafts; and some beside them, as far as a step goes.
TEST(LogitRows, AreEnoughForSequencesAndDrafts) {
  const auto rows = [](int64_t sequences, int32_t drafts, int64_t step_tokens) {
    EngineOptions options;
    options.max_sequences = sequences;
    options.drafts = drafts;
    options.max_step_tokens = step_tokens;
    return logit_rows(options);
  };
  EXPECT_EQ(rows(1, 0, 512), 129);
  EXPECT_EQ(rows(1, kAutoDrafts, 512), 134);
  EXPECT_EQ(rows(300, 0, 512), 428);
  EXPECT_EQ(rows(64, 4, 512), 448);
  EXPECT_EQ(rows(1, 5, 16), 16);
  EXPECT_EQ(rows(64, 5, 256), 256);
  EXPECT_EQ(logit_rows({.max_sequences = 3, .spare_logit_rows = 0}), 3);
}

}  // namespace
}  // namespace fourfold::engine
