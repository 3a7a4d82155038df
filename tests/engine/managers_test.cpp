// The small managers on their own: pages, slots, and the scheduler's policy without a model.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>

#include "base/random.h"
#include "engine/pages.h"
#include "engine/scheduler.h"
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

RC_GTEST_PROP(Pages, NoPageIsHandedOutTwice, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
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
      RC_ASSERT(grown == (needed <= free));
      RC_ASSERT(owner.size() == before + static_cast<size_t>(grown ? needed : 0));
    }
    std::set<int32_t> seen;
    size_t held = 0;
    for (const auto& o : owners) {
      seen.insert(o.begin(), o.end());
      held += o.size();
    }
    RC_ASSERT(seen.size() == held);
    RC_ASSERT(pages.used() == static_cast<int64_t>(held));
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

std::unique_ptr<Active> make_active(uint64_t id, int64_t prompt, int64_t max_tokens, int64_t max_context) {
  Request request;
  request.prompt.assign(static_cast<size_t>(prompt), 1);
  request.max_tokens = max_tokens;
  return std::make_unique<Active>(id, std::move(request), max_context, std::make_shared<Channel>(nullptr));
}

// Plays the engine's part: advances the work, "samples", removes what is done.
void run_step(Scheduler& scheduler) {
  std::vector<Active*> done;
  for (const auto& [request, count] : scheduler.plan()) {
    const bool samples = count == request->pending();
    request->cached += count;
    if (!samples) continue;
    request->tokens.push_back(2);
    if (request->output_tokens() >= request->max_output) done.push_back(request);
  }
  for (Active* request : done) scheduler.remove(request);
}

TEST(Scheduler, DecodingComesBeforePrompts) {
  PageAllocator pages(64, 4);
  SlotAllocator slots(4);
  Scheduler scheduler({4, 8}, pages, slots);
  scheduler.add(make_active(1, 20, 50, 100));
  run_step(scheduler);
  run_step(scheduler);
  scheduler.add(make_active(2, 30, 50, 100));
  // 4 of the first prompt are left, 4 tokens remain for the second.
  const auto& work = scheduler.plan();
  ASSERT_EQ(work.size(), 2u);
  EXPECT_EQ(work[0].count, 4);
  EXPECT_EQ(work[1].count, 4);
  for (const auto& [request, count] : work) request->cached += count;
  scheduler.running()[0]->tokens.push_back(2);
  // Now the first decodes, and the second gets the rest.
  const auto& next = scheduler.plan();
  ASSERT_EQ(next.size(), 2u);
  EXPECT_EQ(next[0].count, 1);
  EXPECT_TRUE(next[0].samples());
  EXPECT_EQ(next[1].count, 7);
}

TEST(Scheduler, TheNewestIsPreemptedAndComesBackFirst) {
  PageAllocator pages(6, 4);
  SlotAllocator slots(4);
  Scheduler scheduler({4, 32}, pages, slots);
  scheduler.add(make_active(1, 6, 18, 24));
  scheduler.add(make_active(2, 6, 18, 24));
  run_step(scheduler);
  ASSERT_EQ(scheduler.running().size(), 2u);
  scheduler.add(make_active(3, 6, 1, 24));
  while (scheduler.preemptions() == 0) run_step(scheduler);
  ASSERT_EQ(scheduler.running().size(), 1u);
  EXPECT_EQ(scheduler.running()[0]->id, 1u);
  ASSERT_EQ(scheduler.waiting().size(), 2u);
  EXPECT_EQ(scheduler.waiting()[0]->id, 2u);
  EXPECT_EQ(scheduler.waiting()[0]->cached, 0);
  EXPECT_GT(scheduler.waiting()[0]->output_tokens(), 0);  // what it said already is kept
  scheduler.check();
}

RC_GTEST_PROP(Scheduler, EveryRequestIsFinishedAndInvariantsHold, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
  const int64_t max_context = 4 + static_cast<int64_t>(random.below(60));
  const int64_t sequences = 1 + static_cast<int64_t>(random.below(8));
  const int64_t step_tokens = sequences + static_cast<int64_t>(random.below(20));
  const int64_t page_size = 1 + static_cast<int64_t>(random.below(9));
  PageAllocator pages((max_context + page_size - 1) / page_size + static_cast<int64_t>(random.below(20)), page_size);
  SlotAllocator slots(sequences);
  Scheduler scheduler({sequences, step_tokens}, pages, slots);
  const uint64_t count = 1 + random.below(20);
  uint64_t added = 0;
  int64_t steps = 0, work = 0;
  while (added < count || !scheduler.idle()) {
    while (added < count && random.below(3) == 0) {
      const int64_t prompt = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(max_context - 1)));
      const int64_t output = 1 + static_cast<int64_t>(random.below(40));
      scheduler.add(make_active(++added, prompt, output, max_context));
      work += prompt + output;
    }
    if (random.below(30) == 0 && !scheduler.running().empty()) {
      scheduler.remove(scheduler.running()[random.below(scheduler.running().size())].get());
    }
    if (random.below(30) == 0 && !scheduler.waiting().empty()) scheduler.remove(scheduler.waiting().back().get());
    const Active* oldest = nullptr;
    if (!scheduler.running().empty()) oldest = scheduler.running().front().get();
    if (!scheduler.idle()) {
      int64_t tokens = 0;
      bool oldest_runs = oldest == nullptr;
      for (const auto& item : scheduler.plan()) {
        RC_ASSERT(item.count >= 1 && item.count <= item.request->pending());
        RC_ASSERT(static_cast<int64_t>(item.request->pages.size()) * page_size >= item.request->cached + item.count);
        tokens += item.count;
        oldest_runs = oldest_runs || item.request == oldest;
      }
      RC_ASSERT(tokens > 0 && tokens <= step_tokens);
      RC_ASSERT(oldest_runs);
    }
    run_step(scheduler);
    scheduler.check();
    RC_ASSERT(++steps < 100 + 50 * work);  // terminates
  }
  RC_ASSERT(pages.used() == 0 && slots.used() == 0);
}

}  // namespace
}  // namespace fourfold::engine
