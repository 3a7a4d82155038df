// The host's stepper around a model whose logits are a pure function of all tokens so far, computed from what it finds
// in pages and state slots: what any mix of chunks, drafts, steps under way and padding chooses must be what a loop
// over the sampler chooses.
#include "cpu/step/host_stepper.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <thread>

#include "base/check.h"
#include "base/random.h"
#include "cpu/sample/sampler.h"
#include "deferred_choices.h"

namespace fourfold::cpu {
namespace {

using ops::SamplingParams;

constexpr int32_t kVocabulary = 37;
constexpr int32_t kPageSize = 4;

uint64_t mix(uint64_t hash, int32_t token) { return Random(hash ^ (static_cast<uint64_t>(token) + 77)).next(); }

void fill_logits(uint64_t hash, std::span<float> out) {
  Random random(hash);
  for (float& x : out) x = static_cast<float>(2.0 * random.normal());
}

// Pages of tokens, slots of hashes. The drafter is right with probability `hit`.
class World {
 public:
  World(int32_t pages, int32_t slots, double hit)
      : hit_(hit), tokens_(static_cast<size_t>(pages * kPageSize), -1), slots_(static_cast<size_t>(slots), 0xdead) {}

  // `later`: tokens are chosen where the logits are, and known later. `lanes`: that moves lanes on itself.
  HostStepParts parts(ThreadPool& pool, int64_t bucket, DeferredChoices* later = nullptr, bool lanes = false) {
    HostStepParts parts;
    parts.bind = [this](const ops::Batch& batch, StepPart, std::span<const CarriedRow>) { batch_ = batch; };
    later_ = later;
    if (later != nullptr)
      later->serve(
          parts, [this](const ops::Batch& batch) { batch_ = batch; }, lanes);
    parts.copy_page = [this](int32_t from, int32_t to) {
      for (int32_t i = 0; i < kPageSize; ++i) token(to, i) = token(from, i);
    };
    parts.body = [this](const ops::StepShape& shape, ops::StepScope& scope) { body(shape, scope); };
    parts.pool = &pool;
    parts.row_bucket = bucket;
    return parts;
  }

  std::function<void()> before_step;
  std::set<int32_t> poison;                  // tokens after which logits are not finite
  int64_t bodies = 0, rows = 0, passes = 0;  // passes that drafted
  std::vector<int64_t> rows_of_bodies, reported_at_once;

 private:
  int32_t& token(int32_t page, int32_t offset) { return tokens_.at(static_cast<size_t>(page * kPageSize + offset)); }
  int32_t& at(const ops::Sequence& sequence, int32_t position) {
    return token(sequence.pages[static_cast<size_t>(position / kPageSize)], position % kPageSize);
  }

  void body(const ops::StepShape& shape, ops::StepScope& scope) {
    if (before_step) before_step();
    ++bodies;
    scope.begin_trunk();
    ASSERT_EQ(batch_.size(), shape.rows);
    rows += batch_.rows();
    rows_of_bodies.push_back(batch_.rows());
    std::vector<uint64_t> hash(static_cast<size_t>(shape.rows), 1);
    std::vector<int32_t> last(hash.size(), -1);
    std::vector<std::pair<int32_t, uint64_t>> writes;
    for (const ops::Sequence& sequence : batch_.sequences) {
      if (later_ != nullptr && later_->gone(sequence.first)) continue;
      uint64_t state = sequence.position == 0 ? 0 : slots_.at(static_cast<size_t>(sequence.state_in));
      ASSERT_TRUE(sequence.state_out.size() == 1 || sequence.state_out.size() == static_cast<size_t>(sequence.count));
      for (int32_t i = 0; i < sequence.count; ++i) {
        const auto row = static_cast<size_t>(sequence.first + i);
        at(sequence, sequence.position + i) = batch_.tokens[row];
        state = mix(state, batch_.tokens[row]);
        uint64_t attended = 0;
        for (int32_t p = 0; p <= sequence.position + i; ++p) attended = mix(attended, at(sequence, p));
        hash[row] = state ^ (attended << 1);
        last[row] = batch_.tokens[row];
        if (sequence.state_out.size() > 1) writes.emplace_back(sequence.state_out[static_cast<size_t>(i)], state);
      }
      if (sequence.state_out.size() == 1) writes.emplace_back(sequence.state_out[0], state);
    }
    std::set<int32_t> written;
    for (const auto& [slot, state] : writes) {
      EXPECT_TRUE(written.insert(slot).second) << "slot " << slot << " is written twice";
      slots_.at(static_cast<size_t>(slot)) = state;
    }
    // Rows are gathered by their numbers.
    std::vector<float> numbers(hash.size()), gathered, logits;
    std::iota(numbers.begin(), numbers.end(), 0.0f);
    const ops::Tensor all = {numbers.data(), ops::DType::kF32, shape.rows, 1, 1};
    const auto gather_to = [&](int64_t count) {
      gathered.resize(static_cast<size_t>(count));
      return ops::Tensor{gathered.data(), ops::DType::kF32, count, 1, 1};
    };
    const auto score = [&] {
      logits.resize(gathered.size() * kVocabulary);
      for (size_t i = 0; i < gathered.size(); ++i) {
        const auto row = static_cast<size_t>(gathered[i]);
        const std::span out = std::span(logits).subspan(i * kVocabulary, kVocabulary);
        fill_logits(hash[row], out);
        if (poison.contains(last[row])) out[5] = std::numeric_limits<float>::quiet_NaN();
      }
      const auto count = static_cast<int64_t>(gathered.size());
      return ops::Tensor{logits.data(), ops::DType::kF32, count, kVocabulary, kVocabulary};
    };
    while (const int64_t reported = scope.begin_report()) {
      reported_at_once.push_back(reported);
      scope.gather_reported(all, gather_to(reported));
      scope.report(score());
    }
    scope.gather_logit_rows(all, gather_to(shape.logit_rows));
    scope.choose(score());
    if (!shape.feed_drafter) return;
    scope.begin_feed();
    ASSERT_EQ(batch_.size(), shape.rows);
    int64_t before = shape.lanes;
    for (int64_t pass = 0; pass < shape.drafts; ++pass) {
      const int64_t count = scope.begin_draft(pass);
      if (count == 0) return;
      EXPECT_LE(count, before);
      before = count;
      draft(scope, pass, count);
    }
  }

  // The right draft follows from the tokens in the pages (the trunk's own are there up to the lane's position) and this
  // pass's token.
  void draft(ops::StepScope& scope, int64_t pass, int64_t count) {
    ++passes;
    std::vector<float> logits(static_cast<size_t>(count * kVocabulary), 0.0f);
    for (size_t i = 0; i < batch_.sequences.size(); ++i) {
      const ops::Sequence& sequence = batch_.sequences[i];
      ASSERT_EQ(sequence.count, 1);
      if (later_ != nullptr && later_->gone(sequence.first)) continue;
      if (pass == 0) drafted_[i].clear();
      drafted_[i].push_back(batch_.tokens[i]);
      const int32_t known = sequence.position - static_cast<int32_t>(pass);
      uint64_t state = 0;
      for (int32_t p = 0; p <= known; ++p) state = mix(state, at(sequence, p));
      for (const int32_t t : drafted_[i]) state = mix(state, t);
      const std::span out = std::span(logits).subspan(i * kVocabulary, kVocabulary);
      fill_logits(state ^ (state << 1), out);
      if (Random(state).uniform() >= hit_) std::reverse(out.begin(), out.end());
    }
    scope.draft(pass, {logits.data(), ops::DType::kF32, count, kVocabulary, kVocabulary});
  }

  const double hit_;
  DeferredChoices* later_ = nullptr;
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> slots_;
  ops::Batch batch_;
  std::map<size_t, std::vector<int32_t>> drafted_;
};

struct Asked {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  uint64_t seed = 1;
  int64_t max_output = 20, min_output = 0;
  std::vector<int32_t> stop;
};

// The same answer without steps.
std::vector<int32_t> expected(const Asked& asked) {
  Sampler sampler(kVocabulary);
  TokenCounts counts;
  if (asked.sampling.penalized()) {
    counts.start(kVocabulary);
    for (const int32_t token : asked.prompt) counts.add_prompt(token);
  }
  uint64_t hash = 0;
  for (const int32_t token : asked.prompt) hash = mix(hash, token);
  std::vector<int32_t> output;
  while (static_cast<int64_t>(output.size()) < asked.max_output) {
    std::vector<float> logits(kVocabulary);
    fill_logits(hash ^ (hash << 1), logits);
    const auto index = static_cast<int64_t>(output.size());
    const int32_t token =
        sampler
            .choose(logits, {.params = asked.sampling,
                             .seed = asked.seed,
                             .index = index,
                             .too_early = index < asked.min_output ? asked.stop : std::vector<int32_t>{},
                             .counts = counts.counts()})
            .token;
    output.push_back(token);
    if (counts.active()) counts.add_output(token);
    hash = mix(hash, token);
    if (std::find(asked.stop.begin(), asked.stop.end(), token) != asked.stop.end()) break;
  }
  return output;
}

// Drives lanes with two steps under way, each request in a lane of its own, in random chunks and depths.
class Driver {
 public:
  // `ranks`: 2: another stepper gets the same plans, and its tokens are known at other times.
  Driver(std::vector<Asked> asked, int64_t drafts, double hit, int64_t bucket, uint64_t seed, bool tokens_later = false,
         int ranks = 1, bool keeps_lanes = false)
      : later(kVocabulary, seed),
        asked_(std::move(asked)),
        drafts_(drafts),
        random_(seed),
        pool_(2),
        world_(static_cast<int32_t>(asked_.size()) * kPages, static_cast<int32_t>(asked_.size()) * 6, hit),
        other_pool_(1),
        other_world_(world_),
        other_later_(kVocabulary, seed + 1000) {
    ops::StepLimits limits;
    limits.lanes = static_cast<int64_t>(asked_.size());
    limits.rows = 64;
    limits.logit_rows = 64;
    limits.drafts = drafts;
    limits.context = kPages * kPageSize;
    limits.page_size = kPageSize;
    limits.vocabulary = kVocabulary;
    HostStepParts parts = world_.parts(pool_, bucket, tokens_later ? &later : nullptr, keeps_lanes);
    if (ranks == 2) {
      HostStepParts other = other_world_.parts(other_pool_, bucket, &other_later_);
      other.order = parts.order = std::make_shared<StepOrder>();
      other.first = false;
      other_ = make_host_stepper(limits, std::move(other));
    }
    stepper_ = make_host_stepper(limits, std::move(parts));
    lanes_.resize(asked_.size());
    for (size_t i = 0; i < lanes_.size(); ++i) {
      for (int32_t p = 0; p < kPages; ++p) lanes_[i].pages.push_back(static_cast<int32_t>(i) * kPages + p);
      for (int32_t s = 0; s < 6; ++s) lanes_[i].slots.push_back(static_cast<int32_t>(i) * 6 + s);
    }
  }

  World& world() { return world_; }
  const World& other_world() const { return other_world_; }

  std::vector<std::vector<int32_t>> finish() {
    std::deque<ops::Ticket> under_way;
    for (int turn = 0; turn < 2000; ++turn) {
      if (const auto ticket = launch()) {
        under_way.push_back(*ticket);
        if (under_way.size() < static_cast<size_t>(ops::kInFlight)) continue;
      }
      if (under_way.empty()) break;
      const ops::StepOutcome& outcome = stepper_->wait(under_way.front());
      if (other_ != nullptr) {
        const ops::StepOutcome& theirs = other_->wait(under_way.front());
        EXPECT_EQ(theirs.error, "");
        EXPECT_EQ(theirs.lanes.size(), outcome.lanes.size());
        for (size_t i = 0; i < std::min(theirs.lanes.size(), outcome.lanes.size()); ++i) {
          EXPECT_EQ(theirs.lanes[i].tokens, outcome.lanes[i].tokens);
        }
      }
      under_way.pop_front();
      EXPECT_EQ(outcome.error, "");
      for (const ops::LaneOutcome& lane : outcome.lanes) {
        Lane& mine = lanes_[static_cast<size_t>(lane.lane)];
        EXPECT_LE(lane.accepted, lane.verified);
        if (!lane.tokens.empty()) {
          EXPECT_LE(static_cast<size_t>(lane.accepted), lane.tokens.size());
        }
        mine.output.insert(mine.output.end(), lane.tokens.begin(), lane.tokens.end());
        mine.ended = lane.ended;
        mine.error += lane.error;
        accepted += lane.accepted;
        verified += lane.verified;
      }
    }
    std::vector<std::vector<int32_t>> outputs;
    for (const Lane& lane : lanes_) {
      EXPECT_TRUE(lane.ended);
      outputs.push_back(lane.output);
    }
    return outputs;
  }

  DeferredChoices later;
  int64_t accepted = 0, verified = 0;
  const std::string& error(size_t lane) const { return lanes_[lane].error; }

 private:
  static constexpr int32_t kPages = 24;
  struct Lane {
    std::vector<int32_t> pages, slots, output;
    int64_t fed = 0;
    int32_t asked_drafts = 0;  // of the step before
    bool ended = false;
    std::string error;
  };

  std::optional<ops::Ticket> launch() {
    std::vector<ops::LaneWork> work;
    std::vector<ops::LaneStart> starts(lanes_.size());
    int64_t rows = 0;
    for (const bool prompts : {false, true}) {
      for (size_t i = 0; i < lanes_.size(); ++i) {
        Lane& lane = lanes_[i];
        const Asked& asked = asked_[i];
        const auto length = static_cast<int64_t>(asked.prompt.size());
        if (lane.ended || (lane.fed < length) != prompts || rows > 40 || random_.below(5) == 0) continue;
        if (std::any_of(work.begin(), work.end(), [&](const auto& w) { return w.lane == static_cast<int32_t>(i); }))
          continue;
        ops::LaneWork w;
        w.lane = static_cast<int32_t>(i);
        if (prompts) {
          const auto count =
              static_cast<int64_t>(1 + random_.below(static_cast<uint64_t>(std::min<int64_t>(length - lane.fed, 12))));
          w.tokens = std::span(asked.prompt).subspan(static_cast<size_t>(lane.fed), static_cast<size_t>(count));
          w.position = static_cast<int32_t>(lane.fed);
          lane.fed += count;
          w.next = lane.fed < length ? asked.prompt[static_cast<size_t>(lane.fed)] : -1;
          w.state_out = std::span(lane.slots).first(1);
          if (w.position == 0) {
            starts[i].sampling = asked.sampling;
            starts[i].seed = asked.seed;
            starts[i].prompt = asked.prompt;
            starts[i].max_output = asked.max_output;
            starts[i].min_output = asked.min_output;
            starts[i].stop_tokens = asked.stop;
            w.start = &starts[i];
            w.pages = lane.pages;
          }
          rows += count;
        } else {
          w.drafts = static_cast<int32_t>(random_.below(static_cast<uint64_t>(lane.asked_drafts) + 1));
          w.state_out = std::span(lane.slots).first(w.drafts > 0 ? static_cast<size_t>(w.drafts) + 1 : 1);
          rows += 1 + w.drafts;
        }
        w.feed_drafter = drafts_ > 0;
        w.new_drafts = w.next < 0 ? static_cast<int32_t>(random_.below(static_cast<uint64_t>(drafts_) + 1)) : 0;
        lane.asked_drafts = w.new_drafts;
        work.push_back(w);
      }
    }
    if (work.empty()) {
      for (const Lane& lane : lanes_) {
        if (!lane.ended) return launch({});  // chance left everybody out
      }
      return std::nullopt;
    }
    return launch({{}, work});
  }
  ops::Ticket launch(const ops::StepPlan& plan) {
    if (other_ != nullptr) other_->launch(plan);
    return stepper_->launch(plan);
  }

  std::vector<Asked> asked_;
  int64_t drafts_;
  Random random_;
  ThreadPool pool_;
  World world_;
  ThreadPool other_pool_;
  World other_world_;
  DeferredChoices other_later_;
  std::vector<Lane> lanes_;
  std::unique_ptr<ops::Stepper> other_, stepper_;  // last: they stop before what they use goes
};

std::vector<Asked> random_requests(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<Asked> all(count);
  for (Asked& asked : all) {
    asked.prompt.resize(1 + random.below(30));
    for (int32_t& token : asked.prompt) token = static_cast<int32_t>(random.below(kVocabulary));
    asked.seed = random.next();
    asked.max_output = static_cast<int64_t>(1 + random.below(40));
    asked.sampling.temperature = random.below(2) == 0 ? 0.0f : 0.7f;
    if (random.below(3) == 0) asked.sampling.frequency_penalty = 0.5f;
    if (random.below(3) == 0) asked.sampling.repetition_penalty = 1.3f;
    if (random.below(2) == 0) asked.stop = {static_cast<int32_t>(random.below(kVocabulary)), 3};
    if (random.below(3) == 0) asked.min_output = std::min<int64_t>(asked.max_output, 5);
  }
  return all;
}

TEST(HostStepper, AnyScheduleGivesTheTokensOfALoop) {
  int64_t accepted = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Asked> asked = random_requests(seed, 1 + seed % 5);
    Driver run(asked, static_cast<int64_t>(seed % 6), 0.25 * static_cast<double>(seed % 5), seed % 3 == 0 ? 8 : 1,
               seed);
    const auto outputs = run.finish();
    for (size_t i = 0; i < asked.size(); ++i) EXPECT_EQ(outputs[i], expected(asked[i])) << "request " << i;
    if (HasFailure()) return;
    accepted += run.accepted;
  }
  EXPECT_GT(accepted, 500);
}

// Steps that begin before the tokens of those before them are known choose no others.
TEST(HostStepper, TokensMayBeKnownLater) {
  int64_t carried = 0, counted = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Asked> asked = random_requests(seed, 1 + seed % 5);
    Driver run(asked, seed % 2 == 0 ? 0 : static_cast<int64_t>(seed % 6), 0.25 * static_cast<double>(seed % 5),
               seed % 3 == 0 ? 8 : 1, seed, true);
    const auto outputs = run.finish();
    for (size_t i = 0; i < asked.size(); ++i) EXPECT_EQ(outputs[i], expected(asked[i])) << "request " << i;
    if (HasFailure()) return;
    carried += run.later.carried();
    counted += run.later.counted_unknown();
  }
  EXPECT_GT(carried, 1000);
  EXPECT_GT(counted, 500);
}

// Nor do rounds of drafts that do, where the backend moves lanes on itself.
TEST(HostStepper, RoundsMayBeginBeforeTokensAreKnown) {
  int64_t carried = 0, accepted = 0, counted = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    std::vector<Asked> asked = random_requests(seed, 1 + seed % 5);
    if (seed % 4 != 0) {
      for (Asked& one : asked) one.sampling.frequency_penalty = 0, one.sampling.repetition_penalty = 1;
    }
    Driver run(asked, static_cast<int64_t>(seed % 6), 0.25 * static_cast<double>(seed % 5), seed % 3 == 0 ? 8 : 1, seed,
               true, 1, true);
    const auto outputs = run.finish();
    for (size_t i = 0; i < asked.size(); ++i) EXPECT_EQ(outputs[i], expected(asked[i])) << "request " << i;
    EXPECT_EQ(run.later.in_vain(), 0);
    if (HasFailure()) return;
    carried += run.later.carried();
    counted += run.later.counted_unknown();
    accepted += run.accepted;
  }
  EXPECT_GT(carried, 1500);
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(counted, 500);
}

// Ranks of a model have the same rows in every step, whenever each gets to know its tokens.
TEST(HostStepper, RanksBeginTheSameSteps) {
  int64_t carried = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Asked> asked = random_requests(seed, 1 + seed % 5);
    Driver run(asked, seed % 4 == 0 ? 2 : 0, 0.5, 1, seed, true, 2);
    const auto outputs = run.finish();
    for (size_t i = 0; i < asked.size(); ++i) EXPECT_EQ(outputs[i], expected(asked[i])) << "request " << i;
    EXPECT_EQ(run.world().rows_of_bodies, run.other_world().rows_of_bodies);
    if (HasFailure()) return;
    carried += run.later.carried();
  }
  EXPECT_GT(carried, 500);
}

// A drafter that is always right is always accepted, greedily: every lane gains one token a row.
TEST(HostStepper, RightDraftsAreAccepted) {
  std::vector<Asked> asked = random_requests(5, 3);
  for (Asked& one : asked) {
    one.sampling = {};
    one.sampling.temperature = 0;
    one.stop.clear();
    one.max_output = 40;
  }
  Driver run(asked, 3, 1.0, 1, 9);
  run.finish();
  EXPECT_GT(run.verified, 30);
  EXPECT_EQ(run.accepted, run.verified);
}

ops::StepLimits small_limits() {
  ops::StepLimits limits;
  limits.lanes = 2;
  limits.rows = limits.logit_rows = 16;
  limits.drafts = 2;
  limits.context = 64;
  limits.page_size = kPageSize;
  limits.vocabulary = kVocabulary;
  return limits;
}

TEST(HostStepper, LanesThatEndedCostNothing) {
  ThreadPool pool(1);
  World world(16, 4, 0);
  const auto stepper = make_host_stepper(small_limits(), world.parts(pool, 1));
  const std::vector<int32_t> prompt{1, 2, 3}, pages{0, 1, 2, 3, 4, 5, 6, 7}, slot{0};
  ops::LaneStart start;
  start.sampling.temperature = 0;
  start.prompt = prompt;
  start.max_output = 2;
  ops::LaneWork first;
  first.lane = 1;
  first.start = &start;
  first.tokens = prompt;
  first.pages = pages;
  first.state_out = slot;
  ops::LaneWork again;
  again.lane = 1;
  again.state_out = slot;
  std::vector<ops::Ticket> tickets{stepper->launch({{}, std::span(&first, 1)}),
                                   stepper->launch({{}, std::span(&again, 1)})};
  EXPECT_EQ(stepper->wait(tickets[0]).lanes[0].tokens.size(), 1u);
  tickets.push_back(stepper->launch({{}, std::span(&again, 1)}));
  const ops::LaneOutcome second = stepper->wait(tickets[1]).lanes[0];
  EXPECT_EQ(second.tokens.size(), 1u);
  EXPECT_TRUE(second.ended);
  EXPECT_EQ(second.position, 4);
  const ops::LaneOutcome third = stepper->wait(tickets[2]).lanes[0];
  EXPECT_TRUE(third.tokens.empty());
  EXPECT_TRUE(third.ended);
  EXPECT_EQ(third.position, 4);
  EXPECT_EQ(world.bodies, 2);
}

// A greedy lane whose prompt and whose next step make and verify two drafts.
struct DraftingLane {
  DraftingLane() {
    start.sampling.temperature = 0;
    start.max_output = 10;
    work.start = &start;
    work.lane = next.lane = 0;
    work.tokens = prompt;
    work.pages = pages;
    work.state_out = std::span(slots).first(1);
    work.feed_drafter = true;
    work.new_drafts = next.drafts = 2;
    next.state_out = slots;
  }
  const std::vector<int32_t> prompt{4, 5}, pages{0, 1, 2, 3, 4, 5}, slots{0, 1, 2};
  ops::LaneStart start;
  ops::LaneWork work, next;
};

// A right drafter that comes to a token which ends the answer: that one is no draft, and nothing is drafted behind it.
TEST(HostStepper, DraftsEndWhereTheAnswerDoes) {
  ThreadPool pool(1);
  std::vector<int32_t> whole;
  for (const size_t stop_at : {size_t{0}, size_t{1}, size_t{2}}) {  // 0: nowhere, so that the tokens are known
    World world(32, 8, 1.0);
    HostStepParts parts = world.parts(pool, 1);
    parts.prepared = [&world] { return world.bodies == 1; };
    const auto stepper = make_host_stepper(small_limits(), std::move(parts));
    std::vector<int32_t> stop;
    if (stop_at > 0) stop = {whole[stop_at]};
    DraftingLane lane;
    lane.start.stop_tokens = stop;
    const ops::StepOutcome* outcome = &stepper->wait(stepper->launch({{}, std::span(&lane.work, 1)}));
    EXPECT_TRUE(outcome->prepared);
    const ops::LaneOutcome first = outcome->lanes[0];
    EXPECT_EQ(first.drafts.size(), stop_at == 0 ? 2u : stop_at - 1);
    EXPECT_EQ(world.passes, stop_at == 1 ? 1 : 2);
    EXPECT_EQ(first.passes, world.passes);
    outcome = &stepper->wait(stepper->launch({{}, std::span(&lane.next, 1)}));
    EXPECT_FALSE(outcome->prepared);
    const ops::LaneOutcome second = outcome->lanes[0];
    EXPECT_EQ(second.passes, 0);
    EXPECT_EQ(second.ended, stop_at > 0);
    EXPECT_EQ(second.verified, stop_at == 0 ? 2 : static_cast<int32_t>(stop_at) - 1);
    if (stop_at == 0) {
      whole = {first.tokens[0], second.tokens[0], second.tokens[1]};
      ASSERT_EQ(std::set<int32_t>(whole.begin(), whole.end()).size(), 3u);
    } else {
      EXPECT_EQ(second.tokens,
                std::vector<int32_t>(whole.begin() + 1, whole.begin() + 1 + static_cast<int64_t>(stop_at)));
    }
  }
}

// Masks may come while the step runs; the lane stops where there are no more; none at all ends it.
TEST(HostStepper, MasksComeWhileTheStepRuns) {
  ThreadPool pool(2);
  World world(32, 8, 1.0);
  const auto stepper = make_host_stepper(small_limits(), world.parts(pool, 1));
  DraftingLane lane;
  lane.start.constrained = true;
  const ops::Ticket a = stepper->launch({{}, std::span(&lane.work, 1)});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::vector<uint32_t> only_nine{1u << 9, 0};
  stepper->supply_masks(a, 0, only_nine);
  const ops::LaneOutcome outcome = stepper->wait(a).lanes[0];
  EXPECT_EQ(outcome.tokens, std::vector<int32_t>{9});
  ASSERT_EQ(outcome.drafts.size(), 2u);

  const ops::Ticket b = stepper->launch({{}, std::span(&lane.next, 1)});
  std::vector<uint32_t> rows(4, 0);  // rows for the token and the first draft only
  rows[0] = ~0u, rows[1] = ~0u;
  rows[2] = ~0u, rows[3] = ~0u;
  stepper->supply_masks(b, 0, rows);
  EXPECT_EQ(stepper->wait(b).lanes[0].tokens.size(), 2u);

  lane.next.drafts = 0;
  lane.next.state_out = std::span(lane.slots).first(1);
  const ops::Ticket c = stepper->launch({{}, std::span(&lane.next, 1)});
  stepper->supply_masks(c, 0, {});
  const ops::LaneOutcome& end = stepper->wait(c).lanes[0];
  EXPECT_TRUE(end.tokens.empty());
  EXPECT_TRUE(end.ended);
  EXPECT_EQ(end.error, "");
}

TEST(HostStepper, BadLogitsEndTheirLaneAlone) {
  std::vector<Asked> asked = random_requests(11, 3);
  for (Asked& one : asked) {
    one.max_output = 10;
    one.stop.clear();
    for (int32_t& token : one.prompt) token = token == 7 ? 8 : token;
  }
  asked[1].prompt.back() = 7;
  Driver run(asked, 0, 0, 1, 3);
  run.world().poison = {7};
  const auto outputs = run.finish();
  EXPECT_TRUE(outputs[1].empty());
  EXPECT_NE(run.error(1).find("logit of token 5"), std::string::npos) << run.error(1);
}

TEST(HostStepper, PromptLogprobsAreOfTheTokensThatFollow) {
  for (const bool tokens_later : {false, true}) {
    ThreadPool pool(2);
    World world(16, 4, 0);
    DeferredChoices later(kVocabulary, 1);
    ops::StepLimits limits = small_limits();
    limits.logit_rows = 2;  // fewer than a step reports
    const auto stepper = make_host_stepper(limits, world.parts(pool, 1, tokens_later ? &later : nullptr));
    const std::vector<int32_t> prompt{1, 2, 3, 4, 5}, pages{0, 1, 2, 3}, slot{0};
    ops::LaneStart start;
    start.sampling.temperature = 0;
    start.max_output = 2;
    ops::LaneWork work;
    work.lane = 0;
    work.start = &start;
    work.pages = pages;
    work.state_out = slot;
    work.prompt_logprobs = 2;
    work.tokens = std::span(prompt).first(3);
    work.next = prompt[3];
    const ops::LaneOutcome first = stepper->wait(stepper->launch({{}, std::span(&work, 1)})).lanes[0];
    work.start = nullptr;
    work.pages = {};
    work.tokens = std::span(prompt).subspan(3);
    work.position = 3;
    work.next = -1;
    const ops::LaneOutcome second = stepper->wait(stepper->launch({{}, std::span(&work, 1)})).lanes[0];
    ASSERT_EQ(first.prompt_logprobs.size(), 3u);
    ASSERT_EQ(second.prompt_logprobs.size(), 1u);
    ASSERT_EQ(second.tokens.size(), 1u);
    EXPECT_EQ(world.reported_at_once, (std::vector<int64_t>{2, 1, 1}));
    std::vector<std::vector<ops::TokenLogprob>> all = first.prompt_logprobs;
    all.push_back(second.prompt_logprobs[0]);
    Sampler sampler(kVocabulary);
    uint64_t hash = 0;
    for (size_t i = 0; i < 4; ++i) {
      hash = mix(hash, prompt[i]);
      std::vector<float> logits(kVocabulary);
      fill_logits(hash ^ (hash << 1), logits);
      const auto wanted = sampler.logprobs(logits, 0, prompt[i + 1], 2);
      ASSERT_EQ(all[i].size(), 3u);
      for (size_t j = 0; j < 3; ++j) {
        EXPECT_EQ(all[i][j].token, wanted[j].token);
        EXPECT_EQ(all[i][j].logprob, wanted[j].logprob);
      }
    }
  }
}

TEST(HostStepper, AFailingStepSaysWhy) {
  ThreadPool pool(1);
  World world(16, 4, 0);
  world.before_step = [] { fail("the weights are gone"); };
  const auto stepper = make_host_stepper(small_limits(), world.parts(pool, 1));
  const std::vector<int32_t> prompt{1}, pages{0}, slot{0};
  ops::LaneStart start;
  start.max_output = 1;
  ops::LaneWork work;
  work.lane = 0;
  work.start = &start;
  work.tokens = prompt;
  work.pages = pages;
  work.state_out = slot;
  EXPECT_EQ(stepper->wait(stepper->launch({{}, std::span(&work, 1)})).error, "the weights are gone");
}

}  // namespace
}  // namespace fourfold::cpu
