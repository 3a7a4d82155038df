// The engine with a model whose output depends on every token of the history: whatever is submitted, cancelled, chunked
// and preempted around it, a request's tokens are those it gets alone.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "base/check.h"
#include "harness.h"

namespace fourfold::engine {
namespace {

TEST(Engine, OneRequest) {
  const auto engine = fake_engine(small_options());
  const Request request = simple_request({1, 2, 3, 4, 5}, 30);
  const auto stream = engine->submit(request);
  const Outcome outcome = collect(*stream);
  EXPECT_EQ(outcome, alone(request, 40, 64));
  EXPECT_EQ(outcome.end.prompt_tokens, 5);
  EXPECT_EQ(outcome.end.output_tokens, 30);
  EXPECT_GE(outcome.end.prefill_seconds, 0);
  expect_idle(*engine);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.prefill_tokens, 5);
  EXPECT_EQ(stats.decode_tokens, 29);  // the last one is never fed
  EXPECT_EQ(stats.steps, 30);
}

TEST(Engine, LongPromptsAreChunked) {
  std::vector<int64_t> sizes;
  FakeOptions fake;
  fake.before_step = [&](const ops::Batch& batch) { sizes.push_back(batch.size()); };
  const auto engine = fake_engine(small_options(), fake);
  Request request = simple_request({}, 2);
  for (int32_t i = 0; i < 40; ++i) request.prompt.push_back(i);
  const auto stream = engine->submit(request);
  EXPECT_EQ(collect(*stream), alone(request, 40, 64));
  engine->drain();
  EXPECT_EQ(sizes, (std::vector<int64_t>{16, 16, 8, 1}));
}

TEST(Engine, PreemptedRequestsResumeWithoutLoss) {
  EngineOptions options = small_options();
  options.cache_tokens = options.max_context;  // four requests of up to 60 positions in room for one
  FakeOptions fake;
  std::promise<void> gate;
  fake.before_step = [future = gate.get_future().share()](const ops::Batch&) { future.wait(); };
  const auto engine = fake_engine(options, fake);
  std::vector<Request> requests;
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int32_t i = 0; i < 6; ++i) {
    requests.push_back(simple_request({i, i + 1, i + 2}, 50, static_cast<uint64_t>(i)));
    requests.back().sampling.presence_penalty = 0.5f;
    streams.push_back(engine->submit(requests.back()));
  }
  gate.set_value();
  for (size_t i = 0; i < streams.size(); ++i) EXPECT_EQ(collect(*streams[i]), alone(requests[i], 40, 64)) << i;
  EXPECT_GT(engine->stats().preemptions, 0);
  expect_idle(*engine);
}

TEST(Engine, BatchesDecodeAndPrefillInOneStep) {
  int64_t largest = 0, mixed = 0;
  FakeOptions fake;
  std::promise<void> gate;
  fake.before_step = [&, future = gate.get_future().share()](const ops::Batch& batch) {
    future.wait();
    largest = std::max<int64_t>(largest, static_cast<int64_t>(batch.sequences.size()));
    bool decode = false, prefill = false;
    for (const ops::Sequence& sequence : batch.sequences) {
      (sequence.position > 0 && sequence.count == 1 ? decode : prefill) = true;
    }
    mixed += decode && prefill ? 1 : 0;
  };
  const auto engine = fake_engine(small_options(), fake);
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int32_t i = 0; i < 4; ++i) streams.push_back(engine->submit(simple_request({i, 1, 2, 3, 4, 5, 6, 7, 8}, 20)));
  gate.set_value();
  for (auto& stream : streams) collect(*stream);
  engine->drain();
  EXPECT_EQ(largest, 4);
  EXPECT_GT(mixed, 0);
}

TEST(Engine, CancelWhileRunningAndWhileWaiting) {
  EngineOptions options = small_options();
  options.max_sequences = 1;
  FakeOptions fake;
  std::atomic<bool> slow{true};
  fake.before_step = [&](const ops::Batch&) {
    if (slow) std::this_thread::sleep_for(2ms);
  };
  const auto engine = fake_engine(options, fake);
  const auto running = engine->submit(simple_request({1}, 60));
  const auto waiting = engine->submit(simple_request({2}, 60));
  ASSERT_TRUE(running->next(5s));
  waiting->cancel();
  const Outcome cancelled = collect(*waiting);
  EXPECT_EQ(cancelled.end.reason, FinishReason::kCancelled);
  EXPECT_TRUE(cancelled.tokens.empty());
  running->cancel();
  running->cancel();  // twice is fine
  EXPECT_EQ(collect(*running).end.reason, FinishReason::kCancelled);
  slow = false;
  const Request last = simple_request({3}, 5);
  const auto stream = engine->submit(last);
  EXPECT_EQ(collect(*stream), alone(last, 40, 64));
  expect_idle(*engine);
}

TEST(Engine, DroppingTheStreamCancels) {
  FakeOptions fake;
  fake.before_step = [](const ops::Batch&) { std::this_thread::sleep_for(1ms); };
  const auto engine = fake_engine(small_options(), fake);
  { const auto stream = engine->submit(simple_request({1}, 63)); }
  engine->drain();
  EXPECT_LT(engine->stats().decode_tokens, 60);
  expect_idle(*engine);
}

TEST(Engine, ABadRowEndsOnlyItsRequest) {
  FakeOptions fake;
  fake.poison = {39};
  const auto engine = fake_engine(small_options(), fake);
  Request good = simple_request({1, 2, 3}, 40);
  good.banned_tokens = {39};
  const Request bad = simple_request({1, 39}, 40);
  const auto a = engine->submit(good);
  const auto b = engine->submit(bad);
  const Outcome outcome = collect(*b);
  EXPECT_EQ(outcome.end.reason, FinishReason::kError);
  EXPECT_EQ(outcome.end.error, "request 2, token 2: the model's logit of token 20 is nan, wanted finite numbers");
  EXPECT_EQ(collect(*a), alone(good, 40, 64));
  Request nothing = simple_request({1}, 4);
  nothing.defined_tokens = 3;
  nothing.banned_tokens = {0, 1, 2};
  const auto c = engine->submit(nothing);
  EXPECT_EQ(collect(*c).end.error, "request 3, token 1: no token may be chosen: all 3 defined tokens are masked");
  expect_idle(*engine);
}

TEST(Engine, AFailedStepEndsEveryRequestAndRefusesNewOnes) {
  FakeOptions fake;
  std::atomic<int> steps{0};
  fake.before_step = [&](const ops::Batch&) {
    if (++steps == 3) throw std::runtime_error("the card fell off the bus");
    std::this_thread::sleep_for(2ms);
  };
  EngineOptions options = small_options();
  options.max_sequences = 2;
  const auto engine = fake_engine(options, fake);
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int32_t i = 0; i < 5; ++i) streams.push_back(engine->submit(simple_request({i}, 60)));
  for (auto& stream : streams) {
    const Outcome outcome = collect(*stream);
    EXPECT_EQ(outcome.end.reason, FinishReason::kError);
    EXPECT_EQ(outcome.end.error, "the card fell off the bus");
  }
  try {
    engine->submit(simple_request({1}, 1));
    FAIL() << "accepted a request after a failure";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "engine: stopped by an earlier error: the card fell off the bus");
  }
  engine->drain();  // returns at once
}

TEST(Engine, TheContextCutsTheOutput) {
  EngineOptions options = small_options();
  options.max_context = 8;
  const auto engine = fake_engine(options);
  const Request request = simple_request({1, 2, 3, 4, 5}, 1000);
  const auto stream = engine->submit(request);
  const Outcome outcome = collect(*stream);
  EXPECT_EQ(outcome.tokens.size(), 3u);
  EXPECT_EQ(outcome, alone(request, 40, 8));
  EXPECT_EQ(outcome.end.reason, FinishReason::kLength);
}

TEST(Engine, EveryFieldIsChecked) {
  const auto engine = fake_engine(small_options());
  const auto error_of = [&](auto&& change) -> std::string {
    Request request = simple_request({1, 2}, 4);
    change(request);
    try {
      engine->submit(request);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::pair<std::string, std::string>> cases = {
      {error_of([](Request& r) { r.prompt.clear(); }), "request: prompt is empty, wanted at least one token"},
      {error_of([](Request& r) { r.prompt.assign(64, 1); }),
       "request: prompt has 64 tokens, wanted at most 63 (a context of 64 and at least one token of output)"},
      {error_of([](Request& r) { r.prompt[1] = 40; }), "request: prompt[1] is 40, wanted a token id in [0, 40)"},
      {error_of([](Request& r) { r.prompt[0] = -1; }), "request: prompt[0] is -1, wanted a token id in [0, 40)"},
      {error_of([](Request& r) { r.max_tokens = 0; }), "request: max_tokens is 0, wanted at least 1"},
      {error_of([](Request& r) { r.stop_tokens = {41}; }),
       "request: stop_tokens[0] is 41, wanted a token id in [0, 40)"},
      {error_of([](Request& r) { r.stop_tokens.assign(257, 1); }),
       "request: stop_tokens has 257 entries, wanted at most 256"},
      {error_of([](Request& r) { r.banned_tokens = {-2}; }),
       "request: banned_tokens[0] is -2, wanted a token id in [0, 40)"},
      {error_of([](Request& r) { r.banned_tokens.assign(41, 1); }),
       "request: banned_tokens has 41 entries, wanted at most 40"},
      {error_of([](Request& r) { r.defined_tokens = 41; }), "request: defined_tokens is 41, wanted [0, 40]"},
      {error_of([](Request& r) { r.sampling.temperature = -0.1f; }), "request: temperature is -0.1, wanted [0, 10]"},
      {error_of([&](Request& r) { r.sampling.temperature = nan; }), "request: temperature is nan, wanted [0, 10]"},
      {error_of([](Request& r) { r.sampling.top_k = -1; }), "request: top_k is -1, wanted 0 (off) or more"},
      {error_of([](Request& r) { r.sampling.top_p = 0; }), "request: top_p is 0, wanted (0, 1]"},
      {error_of([](Request& r) { r.sampling.top_p = 1.5f; }), "request: top_p is 1.5, wanted (0, 1]"},
      {error_of([](Request& r) { r.sampling.min_p = 1; }), "request: min_p is 1, wanted [0, 1)"},
      {error_of([](Request& r) { r.sampling.repetition_penalty = 0; }),
       "request: repetition_penalty is 0, wanted (0, 10]"},
      {error_of([](Request& r) { r.sampling.presence_penalty = 11; }),
       "request: presence_penalty is 11, wanted [-10, 10]"},
      {error_of([&](Request& r) { r.sampling.frequency_penalty = nan; }),
       "request: frequency_penalty is nan, wanted [-10, 10]"},
      {error_of([](Request& r) {
         r.sampling.logit_bias = {{3, 101.0f}};
       }),
       "request: logit_bias is 101, wanted [-100, 100]"},
      {error_of([](Request& r) {
         r.sampling.logit_bias = {{40, 1.0f}};
       }),
       "request: logit_bias has token 40, wanted a token id in [0, 40)"},
      {error_of([](Request& r) { r.sampling.logprobs = 21; }), "request: logprobs is 21, wanted -1 (off) to 20"},
      {error_of([](Request&) {}), "accepted"},
  };
  for (const auto& [found, wanted] : cases) EXPECT_EQ(found, wanted);
}

TEST(Engine, OptionsAreChecked) {
  const auto error_of = [&](auto&& change, FakeOptions fake = {}) -> std::string {
    EngineOptions options = small_options();
    change(options);
    try {
      fake_engine(options, std::move(fake));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  FakeOptions narrow;
  narrow.max_positions = 32;
  narrow.max_step_tokens = 8;
  EXPECT_EQ(error_of([](EngineOptions&) {}, narrow), "engine: max_context is 64, wanted 2 to 32");
  EXPECT_EQ(error_of([](EngineOptions& o) { o.max_context = 32; }, narrow),
            "engine: max_step_tokens is 16, wanted 4 to 8");
  EXPECT_EQ(error_of([](EngineOptions& o) { o.max_sequences = 17; }),
            "engine: max_step_tokens is 16, wanted 17 to 4096");
  EXPECT_EQ(error_of([](EngineOptions& o) { o.max_sequences = 0; }), "engine: max_sequences is 0, wanted 1 to 4096");
  EXPECT_EQ(error_of([](EngineOptions& o) { o.cache_tokens = 63; }),
            "engine: cache_tokens is 63, wanted 64 to 1073741824");
  EXPECT_EQ(error_of([](EngineOptions& o) { o.page_size = 0; }), "engine: page_size is 0, wanted 1 to 65536");
  EXPECT_EQ(error_of([](EngineOptions& o) { o.max_queued = 0; }), "engine: max_queued is 0, wanted 1 to 1048576");
}

TEST(Engine, TheQueueIsBounded) {
  EngineOptions options = small_options();
  options.max_sequences = 1;
  options.max_queued = 2;
  std::promise<void> gate;
  std::promise<void> entered;
  std::once_flag once;
  FakeOptions fake;
  fake.before_step = [&, future = gate.get_future().share()](const ops::Batch&) {
    std::call_once(once, [&] { entered.set_value(); });
    future.wait();
  };
  const auto engine = fake_engine(options, fake);
  const auto running = engine->submit(simple_request({1}, 3));
  entered.get_future().wait();  // it runs and no longer counts as waiting
  const auto second = engine->submit(simple_request({2}, 3));
  auto third = engine->submit(simple_request({3}, 3));
  EXPECT_EQ(engine->stats().waiting, 2);
  EXPECT_THROW(engine->submit(simple_request({4}, 3)), Error);
  gate.set_value();
  collect(*running);
  collect(*second);
  collect(*third);
  const Request again = simple_request({4}, 3);
  const auto fourth = engine->submit(again);
  EXPECT_EQ(collect(*fourth), alone(again, 40, 64));
}

TEST(Engine, DrainFinishesAllAndRefusesNewRequests) {
  FakeOptions fake;
  fake.before_step = [](const ops::Batch&) { std::this_thread::sleep_for(500us); };
  const auto engine = fake_engine(small_options(), fake);
  std::vector<Request> requests;
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int32_t i = 0; i < 8; ++i) {
    requests.push_back(simple_request({i, 7}, 10));
    streams.push_back(engine->submit(requests.back()));
  }
  engine->drain();
  expect_idle(*engine);
  EXPECT_THROW(engine->submit(simple_request({1}, 1)), Error);
  for (size_t i = 0; i < streams.size(); ++i) EXPECT_EQ(collect(*streams[i]), alone(requests[i], 40, 64));
}

TEST(Engine, AStreamMayOutliveItsEngine) {
  FakeOptions fake;
  fake.before_step = [](const ops::Batch&) { std::this_thread::sleep_for(1ms); };
  auto engine = fake_engine(small_options(), fake);
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int32_t i = 0; i < 6; ++i) streams.push_back(engine->submit(simple_request({i}, 63)));
  engine.reset();
  for (auto& stream : streams) {
    EXPECT_EQ(collect(*stream).end.reason, FinishReason::kCancelled);
    stream->cancel();
  }
}

TEST(Engine, NotifyAnnouncesEveryEvent) {
  const auto engine = fake_engine(small_options());
  std::atomic<int> calls{0};
  Request request = simple_request({1}, 5);
  request.notify = [&] { ++calls; };
  const auto stream = engine->submit(request);
  collect(*stream);
  engine->drain();
  EXPECT_EQ(calls, 6);
}

TEST(Engine, LogprobsComeWithTheTokens) {
  const auto engine = fake_engine(small_options());
  Request request = simple_request({1, 2}, 6);
  request.sampling.logprobs = 2;
  const auto stream = engine->submit(request);
  const Outcome outcome = collect(*stream);
  ASSERT_EQ(outcome.logprobs.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    ASSERT_EQ(outcome.logprobs[i].size(), 3u);
    EXPECT_EQ(outcome.logprobs[i][0].token, outcome.tokens[i]);
    EXPECT_GE(outcome.logprobs[i][1].logprob, outcome.logprobs[i][2].logprob);
    EXPECT_LE(outcome.logprobs[i][0].logprob, outcome.logprobs[i][1].logprob);
  }
}

TEST(Engine, RequestsWithoutASeedDiffer) {
  const auto engine = fake_engine(small_options());
  std::set<std::vector<int32_t>> outputs;
  for (int i = 0; i < 4; ++i) {
    Request request = simple_request({1}, 20);
    request.sampling.seed.reset();
    const auto stream = engine->submit(request);
    outputs.insert(collect(*stream).tokens);
  }
  EXPECT_EQ(outputs.size(), 4u);
}

// The stepper behind another's eyes.
class Watched : public ops::Stepper {
 public:
  explicit Watched(std::unique_ptr<ops::Stepper> stepper) : stepper_(std::move(stepper)) {}
  const ops::StepLimits& limits() const override { return stepper_->limits(); }
  ops::Ticket launch(const ops::StepPlan& plan) override { return stepper_->launch(plan); }
  void supply_masks(ops::Ticket ticket, int32_t lane, std::span<const uint32_t> rows) override {
    stepper_->supply_masks(ticket, lane, rows);
  }
  const ops::StepOutcome& wait(ops::Ticket ticket) override { return stepper_->wait(ticket); }
  bool ended(ops::Ticket ticket, std::chrono::milliseconds patience) override {
    return stepper_->ended(ticket, patience);
  }

 private:
  std::unique_ptr<ops::Stepper> stepper_;
};

TEST(Engine, TheNextStepIsLaunchedWhileOneRuns) {
  struct Counting final : Watched {
    Counting(std::unique_ptr<ops::Stepper> stepper, std::atomic<int>& launched)
        : Watched(std::move(stepper)), launches(launched) {}
    ops::Ticket launch(const ops::StepPlan& plan) override {
      const ops::Ticket ticket = Watched::launch(plan);
      ++launches;
      return ticket;
    }
    std::atomic<int>& launches;
  };
  std::atomic<int> launches{0};
  std::promise<void> gate;
  FakeOptions fake;
  fake.before_step = [future = gate.get_future().share()](const ops::Batch&) { future.wait(); };
  fake.wrap_stepper = [&](auto stepper) { return std::make_unique<Counting>(std::move(stepper), launches); };
  const auto engine = fake_engine(small_options(), fake);
  const Request request = simple_request({1, 2}, 12);
  const auto stream = engine->submit(request);
  for (int i = 0; i < 5000 && launches < 2; ++i) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(launches, 2);  // although the first has not ended
  gate.set_value();
  EXPECT_EQ(collect(*stream), alone(request, 40, 64));
  EXPECT_EQ(launches, 12);  // none beyond the last token: that the answer ends by length is known beforehand
}

// What a step came to contradicts the books: nobody's stream is left open.
TEST(Engine, AnInternalErrorEndsEveryStream) {
  struct Lying final : Watched {
    using Watched::Watched;
    const ops::StepOutcome& wait(ops::Ticket ticket) override {
      const ops::StepOutcome& outcome = Watched::wait(ticket);
      if (++steps < 4) return outcome;
      lanes.assign(outcome.lanes.begin(), outcome.lanes.end());
      for (ops::LaneOutcome& lane : lanes) lane.position += 1000;
      lie = outcome;
      lie.lanes = lanes;
      return lie;
    }
    int steps = 0;
    std::vector<ops::LaneOutcome> lanes;
    ops::StepOutcome lie;
  };
  FakeOptions fake;
  fake.wrap_stepper = [](auto stepper) { return std::make_unique<Lying>(std::move(stepper)); };
  const auto engine = fake_engine(small_options(), fake);
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int32_t i = 0; i < 6; ++i) {
    try {
      streams.push_back(engine->submit(simple_request({i}, 60)));
    } catch (const Refused& refused) {
      EXPECT_EQ(refused.reason(), Refusal::kFailed);
    }
  }
  ASSERT_FALSE(streams.empty());
  for (auto& stream : streams) {
    const Outcome outcome = collect(*stream);
    EXPECT_EQ(outcome.end.reason, FinishReason::kError);
    EXPECT_NE(outcome.end.error.find("internal error"), std::string::npos) << outcome.end.error;
  }
  engine->drain();
}

// The same while a request is being removed: that one has ended already, and still hears of it.
TEST(Engine, AnInternalErrorInTheLastStepOfARequestLeavesItItsEnd) {
  struct Lying final : Watched {
    using Watched::Watched;
    const ops::StepOutcome& wait(ops::Ticket ticket) override {
      const ops::StepOutcome& outcome = Watched::wait(ticket);
      if (std::none_of(outcome.lanes.begin(), outcome.lanes.end(), [](const auto& lane) { return lane.ended; })) {
        return outcome;
      }
      lanes.assign(outcome.lanes.begin(), outcome.lanes.end());
      for (ops::LaneOutcome& lane : lanes) lane.position += 1000;
      lie = outcome;
      lie.lanes = lanes;
      return lie;
    }
    std::vector<ops::LaneOutcome> lanes;
    ops::StepOutcome lie;
  };
  FakeOptions fake;
  fake.wrap_stepper = [](auto stepper) { return std::make_unique<Lying>(std::move(stepper)); };
  const auto engine = fake_engine(small_options(), fake);
  const auto stream = engine->submit(simple_request({1}, 5));
  const Outcome outcome = collect(*stream);
  EXPECT_EQ(outcome.end.kind, Event::Kind::kFinished);
  EXPECT_EQ(outcome.end.reason, FinishReason::kLength);
  EXPECT_EQ(outcome.tokens.size(), 5u);
  engine->drain();
}

TEST(Engine, ACallbackThatThrowsEndsItsOwnRequest) {
  const auto engine = fake_engine(small_options());
  const Request good = simple_request({1}, 30);
  const auto beside = engine->submit(good);
  Request bad = simple_request({2}, 30);
  int calls = 0;
  bad.notify = [&] {
    if (++calls >= 3) throw std::runtime_error("the socket is gone");
  };
  const auto stream = engine->submit(bad);
  const Outcome outcome = collect(*stream);
  EXPECT_EQ(outcome.end.reason, FinishReason::kError);
  EXPECT_EQ(outcome.end.error, "request 2: notify failed: the socket is gone");
  EXPECT_EQ(outcome.tokens.size(), 3u);
  EXPECT_EQ(collect(*beside), alone(good, 40, 64));
  expect_idle(*engine);
}

TEST(Engine, RefusalsSayWhy) {
  EngineOptions options = small_options();
  options.max_sequences = 1;
  options.max_queued = 3;
  options.max_queued_tokens = 10;
  std::promise<void> gate, entered;
  std::once_flag once;
  FakeOptions fake;
  fake.before_step = [&, future = gate.get_future().share()](const ops::Batch&) {
    std::call_once(once, [&] { entered.set_value(); });
    future.wait();
  };
  const auto engine = fake_engine(options, fake);
  const auto reason = [&](Request request, int64_t count = 1) {
    try {
      engine->submit(std::move(request), count);
    } catch (const Refused& refused) {
      return refused.reason();
    }
    ADD_FAILURE() << "accepted";
    return Refusal::kFailed;
  };
  const auto running =
      engine->submit(simple_request(std::vector<int32_t>(12, 1), 3));  // longer than the queue: alone it may
  entered.get_future().wait();
  const auto waiting = engine->submit(simple_request({1, 2, 3, 4, 5, 6}, 3));
  EXPECT_EQ(reason(simple_request({1, 2, 3, 4, 5}, 3)), Refusal::kFull);
  EXPECT_EQ(reason(simple_request({1}, 3), 3), Refusal::kFull);        // all or nothing
  EXPECT_EQ(reason(simple_request({1, 2, 3}, 3), 2), Refusal::kFull);  // the tokens of each answer count
  EXPECT_EQ(engine->stats().waiting, 1);
  EXPECT_EQ(engine->stats().waiting_tokens, 6);
  EXPECT_EQ(reason(simple_request({1}, 3), 0), Refusal::kInvalid);
  EXPECT_EQ(reason(simple_request({41}, 3)), Refusal::kInvalid);
  EXPECT_EQ(reason(simple_request(std::vector<int32_t>(64, 1), 3)), Refusal::kTooLong);
  gate.set_value();
  collect(*running);
  collect(*waiting);
  engine->drain();
  EXPECT_EQ(reason(simple_request({1}, 3)), Refusal::kDraining);
}

TEST(Engine, StopTokensAreMaskedBeforeMinTokensAndIgnoredWhenAsked) {
  const auto engine = fake_engine(small_options());
  Request request = simple_request({1, 2}, 40);
  request.sampling.temperature = 0;
  const Outcome plain = alone(request, 40, 64);
  request.stop_tokens = {plain.tokens[3]};
  const auto stopped = collect(*engine->submit(request));
  EXPECT_EQ(stopped.end.reason, FinishReason::kStop);
  EXPECT_LE(stopped.tokens.size(), 4u);
  request.min_tokens = 20;
  const auto later = collect(*engine->submit(request));
  EXPECT_EQ(later, alone(request, 40, 64));
  EXPECT_GE(later.tokens.size(), 20u);
  request.min_tokens = 0;
  request.ignore_eos = true;
  const auto through = collect(*engine->submit(request));
  EXPECT_EQ(through.tokens, plain.tokens);
  EXPECT_EQ(through.end.reason, FinishReason::kLength);
}

TEST(Engine, DeadlinesHoldWhileWaitingAndWhileRunning) {
  EngineOptions options = small_options();
  options.max_sequences = 1;
  FakeOptions fake;
  fake.before_step = [](const ops::Batch&) { std::this_thread::sleep_for(2ms); };
  const auto engine = fake_engine(options, fake);
  Request running = simple_request({1}, 60);
  running.deadline = std::chrono::steady_clock::now() + 40ms;
  Request waiting = simple_request({2}, 60);
  waiting.deadline = std::chrono::steady_clock::now() + 10ms;
  const auto a = engine->submit(running), b = engine->submit(waiting);
  const Outcome second = collect(*b);
  EXPECT_EQ(second.end.reason, FinishReason::kDeadline);
  EXPECT_TRUE(second.tokens.empty());
  const Outcome first = collect(*a);
  EXPECT_EQ(first.end.reason, FinishReason::kDeadline);
  EXPECT_FALSE(first.tokens.empty());
  EXPECT_LT(first.tokens.size(), 60u);
  Request late = simple_request({3}, 5);
  late.deadline = std::chrono::steady_clock::now() - 1ms;
  EXPECT_EQ(collect(*engine->submit(late)).end.reason, FinishReason::kDeadline);
  expect_idle(*engine);
  EXPECT_EQ(engine->stats().finished[static_cast<size_t>(FinishReason::kDeadline)], 3);
}

TEST(Engine, ThePriorityDecidesWhoRuns) {
  EngineOptions options = small_options();
  options.max_sequences = 1;
  FakeOptions fake;
  fake.before_step = [](const ops::Batch&) { std::this_thread::sleep_for(500us); };
  const auto engine = fake_engine(options, fake);
  Request low = simple_request({1, 2, 3}, 55);
  low.priority = 5;
  const auto first = engine->submit(low);
  ASSERT_TRUE(first->next(5s));  // it runs
  Request middle = simple_request({4}, 10), high = simple_request({5}, 10);
  high.priority = -1;
  const auto b = engine->submit(middle), c = engine->submit(high);
  const Outcome of_high = collect(*c), of_middle = collect(*b), of_low = collect(*first);
  EXPECT_EQ(of_high, alone(high, 40, 64));
  EXPECT_EQ(of_middle, alone(middle, 40, 64));
  EXPECT_EQ(of_low.tokens.size(), 54u);  // the first was read before
  EXPECT_GE(engine->stats().preemptions, 1);
  EXPECT_LT(of_high.end.queue_seconds, of_middle.end.queue_seconds);
  expect_idle(*engine);
}

TEST(Engine, TheHeartbeatTellsOfAStepThatHangs) {
  std::promise<void> gate;
  FakeOptions fake;
  fake.before_step = [future = gate.get_future().share()](const ops::Batch&) { future.wait(); };
  const auto engine = fake_engine(small_options(), fake);
  EXPECT_TRUE(engine->stats().idle);
  const auto stream = engine->submit(simple_request({1}, 20));
  std::this_thread::sleep_for(60ms);
  EXPECT_FALSE(engine->stats().idle);
  EXPECT_GE(engine->stats().heartbeat_seconds, 0.03);
  gate.set_value();
  collect(*stream);
  engine->drain();
  for (int i = 0; i < 5000 && !engine->stats().idle; ++i) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(engine->stats().idle);
}

TEST(Engine, GoodDraftsSaveSteps) {
  for (const double accuracy : {1.0, 0.6, 0.0}) {
    for (const int32_t drafts : {1, 3, 5}) {
      EngineOptions options = small_options();
      options.drafts = drafts;
      FakeOptions fake;
      fake.mtp = true;
      fake.draft_accuracy = accuracy;
      const auto engine = fake_engine(options, fake);
      Request request = simple_request({1, 2, 3}, 61);
      request.sampling.temperature = 0;
      const Outcome outcome = collect(*engine->submit(request));
      EXPECT_EQ(outcome, alone(request, 40, 64));
      expect_idle(*engine);
      const EngineStats stats = engine->stats();
      EXPECT_EQ(stats.decode_tokens, 60);
      EXPECT_EQ(stats.drafts.drafted[0], stats.drafts.rounds);
      if (drafts < ops::kMaxDrafts) {
        EXPECT_EQ(stats.drafts.drafted[drafts], 0);
      }
      EXPECT_GE(stats.drafts.accepted[0], stats.drafts.accepted[drafts - 1]);
      EXPECT_EQ(stats.drafts.accepted[0] + stats.drafts.accepted[1] + stats.drafts.accepted[2] +
                    stats.drafts.accepted[3] + stats.drafts.accepted[4],
                outcome.end.accepted);
      if (accuracy == 1.0) {
        EXPECT_EQ(outcome.end.accepted, outcome.end.drafted);
        EXPECT_LE(stats.steps, 1 + (60 + drafts) / (drafts + 1) + 1);
      }
      if (accuracy == 0.0) {
        EXPECT_LE(outcome.end.accepted, 6);  // by chance
      }
    }
  }
}

TEST(Engine, DraftsMayComeFromTheFirstTokensAlone) {
  for (const bool later : {false, true}) {
    EngineOptions options = small_options();
    options.drafts = 3;
    options.draft_tokens = 100;  // 128
    FakeOptions fake;
    fake.mtp = true;
    fake.draft_accuracy = 1;
    fake.vocabulary = 300;
    fake.tokens_later = fake.rounds_ahead = later;
    const auto engine = fake_engine(options, fake);
    Request request = simple_request({1, 2, 3}, 60);
    request.sampling.temperature = 0;
    const Outcome outcome = collect(*engine->submit(request));
    EXPECT_EQ(outcome, alone(request, 300, 64));
    ASSERT_FALSE(outcome.tokens.empty());
    // Every draft is the token that is chosen, unless that is behind the list.
    const auto listed =
        std::count_if(outcome.tokens.begin() + 1, outcome.tokens.end(), [](int32_t t) { return t < 128; });
    EXPECT_LT(outcome.end.accepted, outcome.end.drafted);
    EXPECT_GT(outcome.end.accepted, 0);
    EXPECT_LE(outcome.end.accepted, listed);
  }
}

TEST(Engine, DraftsNeedAHeadAndKeepToTheRequest) {
  EngineOptions options = small_options();
  options.drafts = 2;
  EXPECT_THROW(fake_engine(options), Error);
  options.drafts = kAutoDrafts;
  FakeOptions fake;
  EXPECT_EQ(collect(*fake_engine(options)->submit(simple_request({1}, 9))).end.drafted, 0);
  fake.mtp = true;
  options.drafts = 2;
  const auto engine = fake_engine(options, fake);
  Request request = simple_request({1, 2}, 30);
  request.drafts = 3;
  EXPECT_THROW(engine->submit(request), Refused);
  request.drafts = 0;
  EXPECT_EQ(collect(*engine->submit(request)).end.drafted, 0);
  request.drafts = 1;
  const Outcome outcome = collect(*engine->submit(request));
  EXPECT_EQ(outcome, alone(request, 40, 64));
  EXPECT_GT(outcome.end.drafted, 0);
  EXPECT_EQ(engine->stats().drafts.drafted[1], 0);
}

}  // namespace
}  // namespace fourfold::engine
