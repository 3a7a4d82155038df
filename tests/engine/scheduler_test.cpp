// The scheduler without a model: what runs in which step, and that its books are right after every one. Steps are
// planned one ahead, and settled by a stand-in that knows where each lane is.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "base/property.h"
#include "base/random.h"

namespace fourfold::engine {
namespace {

struct Bench {
  explicit Bench(const SchedulerLimits& limits, int64_t page_count, int64_t page_size, int64_t cached_states = 4,
                 int32_t drafts = 0)
      : pages(page_count, page_size),
        slots(limits.lanes * (1 + drafts) + cached_states),
        prefixes({true, cached_states, 1, 1}, pages, slots),
        policy(drafts, drafts),
        lists({}, 1, false),
        scheduler(limits, pages, slots, &prefixes, policy, lists),
        random(1) {}

  Active* add(uint64_t id, int64_t prompt, int64_t max_tokens, int64_t max_context = 1000, int32_t first = 1,
              std::vector<int64_t> boundaries = {}, int32_t priority = 0) {
    Request request;
    request.prompt.assign(static_cast<size_t>(prompt), first);
    request.max_tokens = max_tokens;
    request.cache.boundaries = std::move(boundaries);
    request.priority = priority;
    auto active = std::make_unique<Active>(id, std::move(request), id, max_context, std::make_shared<Channel>(nullptr));
    Active* result = active.get();
    scheduler.add(std::move(active));
    return result;
  }

  // Plans a step and puts it under way.
  bool launch() {
    Flight flight;
    if (!scheduler.plan(flight)) return false;
    UnderWay step;
    for (const Work& work : flight.work) step.slots.push_back(work.request->lane.slots);
    step.flight = std::move(flight);
    under_way.push_back(std::move(step));
    return true;
  }
  const std::vector<Work>& last() const { return under_way.back().flight.work; }

  // The oldest step: each draft is accepted with some probability, an answer stops early with some.
  void settle(double acceptance = 0.5, uint64_t stop_one_in = 0) {
    UnderWay step = std::move(under_way.front());
    under_way.pop_front();
    std::vector<ops::LaneOutcome> outcomes;
    std::vector<Active*> done;
    for (size_t i = 0; i < step.flight.work.size(); ++i) {
      const Work& work = step.flight.work[i];
      Active& request = *work.request;
      Backend& lane = lanes[request.id];
      ops::LaneOutcome outcome;
      if (work.starts) lane = {};
      if (!lane.ended) {
        if (work.tokens > 0) {
          lane.position = work.first + work.tokens;
          lane.state = step.slots[i].front();
        }
        int64_t rows = work.chooses ? 1 : 0;
        while (rows > 0 && rows <= work.drafts && random.uniform() < acceptance) ++rows;
        rows = std::min(rows, request.max_output - request.output_tokens());
        for (int64_t row = 0; row < rows && !lane.ended; ++row) {
          outcome.tokens.push_back(static_cast<int32_t>(2 + random.below(3)));
          if (work.tokens == 0) {
            ++lane.position;
            lane.state = step.slots[i][static_cast<size_t>(row)];
          }
          lane.ended = stop_one_in > 0 && random.below(stop_one_in) == 0;
        }
      }
      request.tokens.insert(request.tokens.end(), outcome.tokens.begin(), outcome.tokens.end());
      lane.ended = lane.ended || request.output_tokens() >= request.max_output;
      outcome.position = static_cast<int32_t>(lane.position);
      outcome.state = lane.state;
      outcome.ended = lane.ended;
      if (lane.ended && !request.over) done.push_back(&request);
      outcomes.push_back(std::move(outcome));
    }
    for (Active* request : done) scheduler.end(request);
    for (size_t i = 0; i < outcomes.size(); ++i) scheduler.record(step.flight.work[i], outcomes[i]);
    scheduler.land(step.flight);
    gone += scheduler.sweep();
  }
  // One step, to its end.
  void step() {
    ASSERT_TRUE(launch());
    settle();
  }

  struct Backend {
    int64_t position = 0;
    int32_t state = -1;
    bool ended = false;
  };
  struct UnderWay {
    Flight flight;
    std::vector<std::vector<int32_t>> slots;  // of each work, when it was planned
  };
  std::map<uint64_t, Backend> lanes;  // by request
  PageAllocator pages;
  SlotAllocator slots;
  PrefixCache prefixes;
  DraftPolicy policy;
  DraftLists lists;
  Scheduler scheduler;
  Random random;
  std::deque<UnderWay> under_way;
  int64_t gone = 0;
};

TEST(Scheduler, DecodingComesBeforePrompts) {
  Bench bench({4, 8, 8}, 64, 4);
  Active* first = bench.add(1, 20, 50);
  bench.step();
  bench.step();
  Active* second = bench.add(2, 30, 50, 1000, 9);
  // 4 of the first prompt are left, 4 rows remain for the second.
  ASSERT_TRUE(bench.launch());
  ASSERT_EQ(bench.last().size(), 2u);
  EXPECT_EQ(bench.last()[0].tokens, 4);
  EXPECT_TRUE(bench.last()[0].chooses);
  EXPECT_EQ(bench.last()[1].tokens, 4);
  EXPECT_FALSE(bench.last()[1].chooses);
  // The next one, planned before that is settled: the first goes on with a token that nobody knows yet.
  ASSERT_TRUE(bench.launch());
  ASSERT_EQ(bench.last().size(), 2u);
  EXPECT_EQ(bench.last()[0].request, first);
  EXPECT_EQ(bench.last()[0].tokens, 0);
  EXPECT_EQ(bench.last()[1].request, second);
  EXPECT_EQ(bench.last()[1].first, 4);
  EXPECT_EQ(bench.last()[1].tokens, 7);
}

TEST(Scheduler, AnEndByLengthIsKnownBeforehand) {
  Bench bench({2, 8, 8}, 64, 4);
  bench.add(1, 4, 2);
  ASSERT_TRUE(bench.launch());
  ASSERT_TRUE(bench.launch());
  EXPECT_FALSE(bench.launch());  // both tokens are under way
  bench.settle();
  EXPECT_FALSE(bench.launch());
  bench.settle();
  EXPECT_TRUE(bench.scheduler.idle());
  EXPECT_EQ(bench.gone, 1);
}

TEST(Scheduler, ChunksEndWhereAStateIsKept) {
  Bench bench({2, 64, 8}, 64, 4);
  bench.add(1, 150, 5, 1000, 1, {40, 110});
  std::vector<int64_t> chunks;
  std::set<int32_t> slots;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(bench.launch());
    chunks.push_back(bench.last().front().tokens);
    slots.insert(bench.last().front().boundary_slot);
    bench.settle();
  }
  EXPECT_EQ(chunks, (std::vector<int64_t>{40, 64, 6, 40}));
  EXPECT_EQ(slots.size(), 3u);  // the two kept ones, and -1: never in place
  EXPECT_EQ(bench.prefixes.stats().states, 2);
  const std::vector<int32_t> prompt(120, 1);
  EXPECT_EQ(bench.prefixes.match("", prompt).tokens, 110);
}

TEST(Scheduler, AStateIsKeptForRequestsThatComeLater) {
  Bench bench({2, 64, 8}, 64, 4);
  bench.add(1, 200, 5);
  ASSERT_TRUE(bench.launch());
  ASSERT_TRUE(bench.launch());
  Active* second = bench.add(2, 180, 5);  // the same, but for its end
  second->tokens.back() = 9;
  EXPECT_EQ(second->length(), 180);
  std::vector<int64_t> chunks;
  while (bench.scheduler.running().size() < 2) {
    bench.settle();
    ASSERT_TRUE(bench.launch());
    chunks.push_back(bench.last().front().tokens);
  }
  EXPECT_EQ(chunks, (std::vector<int64_t>{51, 21, 0}));  // 128 before it came, then up to where they part
  EXPECT_EQ(second->cached_tokens, 179);
}

TEST(Scheduler, DraftsLeaveRowsToPrompts) {
  Bench bench({4, 12, 12}, 200, 4, 4, 5);
  for (uint64_t id = 1; id <= 3; ++id) bench.add(id, 2, 90, 1000, static_cast<int32_t>(id));
  bench.step();
  bench.step();
  ASSERT_TRUE(bench.launch());
  int64_t rows = 0;
  for (const Work& work : bench.last()) rows += work.rows();
  EXPECT_EQ(rows, 12);  // 3 and 9 drafts: as many as there is room for
  bench.settle();
  bench.add(4, 90, 5, 1000, 7);
  ASSERT_TRUE(bench.launch());
  ASSERT_EQ(bench.last().size(), 4u);
  EXPECT_EQ(bench.last()[3].tokens, 5);  // 9 rows beside those of the others, half of them
}

// A row whose token would be beyond the last one is not computed.
TEST(Scheduler, DraftsEndBeforeTheLastToken) {
  for (int64_t tokens = 2; tokens < 20; ++tokens) {
    Bench bench({1, 12, 12}, 200, 4, 4, 5);
    Active* request = bench.add(1, 4, tokens);
    for (int step = 0; bench.gone == 0; ++step) {
      ASSERT_LT(step, 30);
      const int64_t known = request->output_tokens();
      ASSERT_TRUE(bench.launch());
      EXPECT_LE(known + 1 + bench.last().front().drafts, tokens);
      bench.settle(1.0);
    }
  }
}

TEST(Scheduler, TheNewestIsPreemptedAndComesBackFirst) {
  Bench bench({4, 32, 8}, 6, 4);
  Active* first = bench.add(1, 6, 18, 24, 1);
  Active* second = bench.add(2, 6, 18, 24, 9);
  bench.step();
  ASSERT_EQ(bench.scheduler.running().size(), 2u);
  Active* third = bench.add(3, 6, 1, 24, 5);
  while (bench.scheduler.preemptions() == 0) bench.step();
  ASSERT_EQ(bench.scheduler.running().size(), 1u);
  EXPECT_EQ(bench.scheduler.running()[0], first);
  ASSERT_EQ(bench.scheduler.waiting().size(), 2u);
  EXPECT_EQ(bench.scheduler.waiting()[0], second);
  EXPECT_EQ(bench.scheduler.waiting()[1], third);
  EXPECT_GT(second->output_tokens(), 0);  // what it said already is kept
  bench.scheduler.check();
}

TEST(Scheduler, AHigherPriorityDisplacesALowerOne) {
  Bench bench({1, 32, 8}, 64, 4);
  Active* low = bench.add(1, 6, 50, 100, 1, {}, 3);
  bench.step();
  Active* high = bench.add(2, 6, 3, 100, 9, {}, -3);
  ASSERT_TRUE(bench.launch());  // planned with the low one, which leaves then
  EXPECT_EQ(bench.last().front().request, low);
  EXPECT_EQ(bench.scheduler.preemptions(), 1);
  bench.settle();
  ASSERT_TRUE(bench.launch());
  ASSERT_EQ(bench.last().size(), 1u);
  EXPECT_EQ(bench.last().front().request, high);
  EXPECT_EQ(bench.scheduler.waiting().front(), low);
}

FOURFOLD_PROPERTY(Scheduler, EveryRequestIsFinishedAndTheBooksAreRight) {
  const int64_t max_context = 4 + static_cast<int64_t>(random.below(60));
  const int64_t lanes = 1 + static_cast<int64_t>(random.below(8));
  const int64_t rows = lanes + static_cast<int64_t>(random.below(20));
  const int64_t page_size = 1 + static_cast<int64_t>(random.below(9));
  const auto drafts = static_cast<int32_t>(random.below(6));
  Bench bench({lanes, rows, rows}, (max_context + page_size - 1) / page_size + static_cast<int64_t>(random.below(20)),
              page_size, 1 + static_cast<int64_t>(random.below(6)), drafts);
  bench.random = random;
  const uint64_t count = 1 + random.below(20);
  uint64_t added = 0;
  int64_t steps = 0, work = 0, cancelled = 0;
  while (added < count || !bench.scheduler.idle()) {
    while (added < count && random.below(3) == 0) {
      const int64_t prompt = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(max_context - 1)));
      const int64_t output = 1 + static_cast<int64_t>(random.below(40));
      std::vector<int64_t> boundaries;
      if (random.below(2) == 0) boundaries.push_back(static_cast<int64_t>(random.below(static_cast<uint64_t>(prompt))));
      bench.add(++added, prompt, output, max_context, static_cast<int32_t>(1 + random.below(2)), boundaries,
                static_cast<int32_t>(random.below(3)));
      work += prompt + output;
    }
    for (const auto* list : {"running", "waiting"}) {
      const auto requests = *list == 'r' ? bench.scheduler.running() : bench.scheduler.waiting();
      if (random.below(30) != 0 || requests.empty()) continue;
      bench.scheduler.end(requests[random.below(requests.size())]);
      ++cancelled;
    }
    bench.gone += bench.scheduler.sweep();
    const Active* first = bench.scheduler.running().empty() ? nullptr : bench.scheduler.running().front();
    if (bench.launch()) {
      int64_t used = 0;
      std::set<int32_t> named;
      bool before = true;
      for (const Work& item : bench.last()) {
        ASSERT_TRUE(item.rows() >= 1);
        ASSERT_TRUE(named.insert(item.lane).second);
        ASSERT_TRUE(before || item.tokens > 0);  // those that go on first
        before = item.tokens == 0;
        used += item.rows();
      }
      ASSERT_TRUE(used <= rows);
    } else {
      ASSERT_TRUE(!bench.under_way.empty() || bench.scheduler.idle());
      ASSERT_TRUE(first == nullptr || !bench.under_way.empty());
    }
    bench.scheduler.check();
    if (bench.under_way.size() == 2 || (!bench.under_way.empty() && random.below(2) == 0)) {
      bench.settle(random.uniform(), random.below(2) == 0 ? 10 : 0);
    }
    bench.scheduler.check();
    ASSERT_TRUE(++steps < 200 + 60 * work);  // terminates
  }
  while (!bench.under_way.empty()) bench.settle();
  bench.prefixes.check();
  bench.prefixes.clear();
  ASSERT_TRUE(bench.gone == static_cast<int64_t>(count));
  ASSERT_TRUE(bench.pages.used() == 0 && bench.slots.used() == 0);
}

}  // namespace
}  // namespace fourfold::engine
