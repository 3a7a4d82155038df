// The engine with a model whose output depends on every token of the history: whatever is submitted, cancelled, chunked
// and preempted around it, a request's tokens are those it gets alone.
#include "engine/engine.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "engine/sampler.h"
#include "fake_model.h"

namespace fourfold::engine {
namespace {

using namespace std::chrono_literals;

struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;
  Event end;
  bool operator==(const Outcome& other) const { return tokens == other.tokens && end.reason == other.end.reason; }
};

// Reads a stream to its end; a stream that stays silent for 20 s is a failure.
Outcome collect(EventStream& stream, int64_t cancel_after = -1) {
  Outcome outcome;
  if (cancel_after == 0) stream.cancel();
  for (;;) {
    std::optional<Event> event = stream.next(20s);
    if (!event) throw std::runtime_error("no event within 20 s");
    if (event->kind == Event::Kind::kFinished) {
      outcome.end = *event;
      if (stream.next(0ms)) throw std::runtime_error("an event after the last");
      return outcome;
    }
    outcome.tokens.push_back(event->token);
    outcome.logprobs.push_back(event->logprobs);
    if (static_cast<int64_t>(outcome.tokens.size()) == cancel_after) stream.cancel();
  }
}

// The tokens of a request, computed without engine and caches.
Outcome alone(const Request& request, int64_t vocabulary, int64_t max_context) {
  Outcome outcome;
  Sampler sampler(vocabulary);
  TokenHistory history(request.prompt, TokenHistory::needed_by(request.sampling));
  std::vector<int32_t> tokens = request.prompt;
  std::vector<float> logits(static_cast<size_t>(vocabulary));
  const int64_t limit = std::min(request.max_tokens, max_context - static_cast<int64_t>(request.prompt.size()));
  for (int64_t i = 0; i < limit; ++i) {
    fake_logits(FakeModel::expected_hash(tokens), logits);
    const Sampled sampled = sampler.sample(logits, request, history, *request.sampling.seed, i);
    history.add_output(sampled.token);
    tokens.push_back(sampled.token);
    outcome.tokens.push_back(sampled.token);
    for (const int32_t stop : request.stop_tokens) {
      if (stop == sampled.token) {
        outcome.end.reason = FinishReason::kStop;
        return outcome;
      }
    }
  }
  outcome.end.reason = FinishReason::kLength;
  return outcome;
}

std::unique_ptr<Engine> fake_engine(const EngineOptions& options, FakeOptions fake = {}) {
  return make_engine(std::make_unique<FakeModel>(std::move(fake)), options);
}

EngineOptions small_options() {
  EngineOptions options;
  options.max_context = 64;
  options.max_sequences = 4;
  options.max_step_tokens = 16;
  options.page_size = 4;
  return options;
}

Request simple_request(std::vector<int32_t> prompt, int64_t max_tokens, uint64_t seed = 1) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  return request;
}

Request random_request(Random& random, int64_t vocabulary, int64_t max_context) {
  Request request;
  const int64_t length = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(max_context - 1)));
  const bool common = random.below(2) == 0;  // a prefix that other prompts share
  for (int64_t i = 0; i < length; ++i) {
    request.prompt.push_back(common && i < 6 ? static_cast<int32_t>(i)
                                             : static_cast<int32_t>(random.below(vocabulary)));
  }
  request.max_tokens = 1 + static_cast<int64_t>(random.below(40));
  request.sampling.seed = random.next();
  request.sampling.temperature = random.below(4) == 0 ? 0.0f : static_cast<float>(random.uniform(0.2, 2.0));
  if (random.below(2) == 0) request.sampling.top_k = static_cast<int32_t>(random.below(10));
  if (random.below(2) == 0) request.sampling.top_p = static_cast<float>(random.uniform(0.3, 1.0));
  if (random.below(3) == 0) request.sampling.presence_penalty = 1.5f;
  if (random.below(3) == 0) request.sampling.repetition_penalty = 1.2f;
  if (random.below(2) == 0) request.stop_tokens = {static_cast<int32_t>(random.below(vocabulary))};
  return request;
}

void expect_idle(const Engine& engine) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.pages_free, stats.pages_total);
  EXPECT_EQ(stats.slots_free, stats.slots_total);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
}

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

// The main property: any schedule gives every request the tokens it gets alone.
RC_GTEST_PROP(Engine, AnyScheduleEqualsAlone, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
  EngineOptions options;
  options.max_context = 4 + static_cast<int64_t>(random.below(60));
  options.max_sequences = 1 + static_cast<int64_t>(random.below(6));
  options.max_step_tokens = options.max_sequences + static_cast<int64_t>(random.below(24));
  options.page_size = 1 + static_cast<int64_t>(random.below(9));
  options.cache_tokens = options.max_context + static_cast<int64_t>(random.below(3)) * options.max_context / 2;
  std::promise<void> gate;
  FakeOptions fake;
  fake.before_step = [future = gate.get_future().share()](const ops::Batch&) { future.wait(); };
  const auto engine = fake_engine(options, fake);
  const size_t count = 1 + random.below(12);
  const size_t open_at = random.below(count);  // those before it queue up, the rest meet a running engine
  std::vector<Request> requests;
  std::vector<std::unique_ptr<EventStream>> streams;
  std::vector<int64_t> cancel_after;
  for (size_t i = 0; i < count; ++i) {
    if (i == open_at) gate.set_value();
    requests.push_back(random_request(random, 40, options.max_context));
    streams.push_back(engine->submit(requests.back()));
    cancel_after.push_back(random.below(4) == 0 ? static_cast<int64_t>(random.below(10)) : -1);
    if (random.below(8) == 0) streams.back().reset();  // dropped at once
    if (i >= open_at && random.below(3) == 0) {        // lets some steps pass
      const auto pace = engine->submit(simple_request({0}, 1));
      collect(*pace);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (!streams[i]) continue;
    if (random.below(10) == 0) {  // dropped half way
      streams[i]->next(1ms);
      streams[i].reset();
      continue;
    }
    const Outcome expected = alone(requests[i], 40, options.max_context);
    const Outcome outcome = collect(*streams[i], cancel_after[i]);
    RC_ASSERT(outcome.end.error == "");
    if (outcome.end.reason == FinishReason::kCancelled) {
      RC_ASSERT(cancel_after[i] >= 0);
      RC_ASSERT(outcome.tokens.size() <= expected.tokens.size());
      RC_ASSERT(std::equal(outcome.tokens.begin(), outcome.tokens.end(), expected.tokens.begin()));
    } else {
      RC_ASSERT(outcome.tokens == expected.tokens);
      RC_ASSERT(outcome.end.reason == expected.end.reason);
    }
  }
  engine->drain();
  const EngineStats stats = engine->stats();
  RC_ASSERT(stats.pages_free == stats.pages_total);
  RC_ASSERT(stats.slots_free == stats.slots_total);
  RC_ASSERT(stats.waiting == 0 && stats.running == 0);
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
  EXPECT_EQ(collect(*c).end.error, "request 3, token 1: no token may be sampled: all 3 defined tokens are banned");
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

TEST(Engine, ManyThreadsSubmitAndCancel) {
  EngineOptions options = small_options();
  options.cache_tokens = 96;
  const auto engine = fake_engine(options);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      for (int i = 0; i < 15; ++i) {
        const Request request = random_request(random, 40, 64);
        const auto stream = engine->submit(request);
        if (random.below(4) == 0) continue;  // dropped
        const Outcome expected = alone(request, 40, 64);
        const Outcome outcome = collect(*stream, random.below(4) == 0 ? 3 : -1);
        if (outcome.end.reason == FinishReason::kCancelled) continue;
        if (!(outcome == expected)) ++wrong;
        engine->stats();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  engine->drain();
  EXPECT_EQ(wrong, 0);
  expect_idle(*engine);
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

}  // namespace
}  // namespace fourfold::engine
