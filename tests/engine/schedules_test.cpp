// Random schedules: whatever is submitted, cancelled, chunked, preempted, drafted, shared and refused around it, a
// request gets the tokens that a loop without an engine gives. FOURFOLD_SCHEDULES sets how many there are (10,000).
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <thread>

#include "base/random.h"
#include "engine/engine.h"
#include "harness.h"
#include "test_constraint.h"

namespace fourfold::engine {
namespace {

// The latter more than a list of drafts has.
constexpr int64_t kVocabulary = 40, kLargeVocabulary = 150;
constexpr int kParts = 20;

int64_t schedules() {
  const char* text = std::getenv("FOURFOLD_SCHEDULES");
  return text == nullptr ? 10000 : std::atoll(text);
}

int64_t between(Random& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random.below(static_cast<uint64_t>(high - low + 1)));
}
bool one_in(Random& random, uint64_t n) { return random.below(n) == 0; }

// What happened in all schedules together: each thing that is tested must have happened.
struct Seen {
  int64_t preemptions = 0, hits = 0, accepted = 0, drafted = 0, cancelled = 0, deadlines = 0, errors = 0, forks = 0;
  int64_t stops = 0, lengths = 0, prompt_logprobs = 0, constrained = 0;
  std::atomic<int64_t> made_states = 0;
};

struct Submitted {
  Request request;  // without the constraint
  std::shared_ptr<TestConstraint> copy;
  bool may_fail_early = false;
  std::unique_ptr<EventStream> stream;
  int64_t cancel_after = -1;
};

SamplingParams random_sampling(Random& random) {
  SamplingParams sampling;
  sampling.seed = random.next();
  sampling.temperature = one_in(random, 2) ? 0.0f : static_cast<float>(random.uniform(0.2, 2.0));
  if (one_in(random, 3)) sampling.top_k = static_cast<int32_t>(random.below(10));
  if (one_in(random, 3)) sampling.top_p = static_cast<float>(random.uniform(0.3, 1.0));
  if (one_in(random, 5)) sampling.presence_penalty = 1.5f;
  if (one_in(random, 5)) sampling.repetition_penalty = 1.2f;
  if (one_in(random, 8)) sampling.logprobs = static_cast<int32_t>(random.below(3));
  return sampling;
}

class Schedule {
 public:
  Schedule(uint64_t seed, Seen& seen) : random_(seed), seen_(seen) {}

  // Empty when all is right.
  std::string run() {
    const std::string wrong = run_requests();
    if (!open_) gate_.set_value();
    return wrong;
  }

 private:
  std::string run_requests() {
    choose_engine();
    const int64_t count = between(random_, 1, 12);
    const int64_t open_at = between(random_, 0, count - 1);  // those before it queue up, the rest meet a running engine
    for (int64_t i = 0; i < count; ++i) {
      if (i == open_at) {
        gate_.set_value();
        open_ = true;
      }
      submit();
      if (i >= open_at && one_in(random_, 3)) {  // lets some steps pass
        const auto pace = engine_->submit(simple_request({0}, 1));
        collect(*pace);
      }
    }
    for (Submitted& submitted : all_) {
      const std::string wrong = check(submitted);
      if (!wrong.empty()) return wrong;
    }
    engine_->drain();
    const EngineStats stats = engine_->stats();
    seen_.preemptions += stats.preemptions;
    if (stats.pages_free != stats.pages_total) return "pages are held";
    if (stats.slots_free + stats.prefix.states != stats.slots_total) return "slots are held";
    if (stats.waiting != 0 || stats.running != 0 || stats.waiting_tokens != 0) return "requests are left";
    return "";
  }

  void choose_engine() {
    options_.max_context = between(random_, 4, one_in(random_, 4) ? 160 : 64);
    options_.max_sequences = between(random_, 1, 6);
    options_.max_step_tokens = options_.max_sequences + between(random_, 0, one_in(random_, 3) ? 100 : 24);
    options_.page_size = between(random_, 1, 9);
    options_.cache_tokens = options_.max_context + between(random_, 0, 4) * options_.max_context / 2;
    options_.prefix_cache = !one_in(random_, 5);
    options_.cached_states = between(random_, 1, 8);
    FakeOptions fake;
    fake.recurrent = !one_in(random_, 6);
    fake.mtp = one_in(random_, 2);
    if (fake.mtp) options_.drafts = static_cast<int32_t>(between(random_, -1, 5));
    if (fake.mtp && one_in(random_, 4)) {
      options_.draft_tokens = 100;
      vocabulary_ = kLargeVocabulary;
    }
    options_.spare_logit_rows = one_in(random_, 2) ? between(random_, 0, 3) : 4096;
    fake.max_logit_rows = logit_rows(options_);
    fake.vocabulary = vocabulary_;
    fake.draft_accuracy = one_in(random_, 3) ? 1.0 : random_.uniform();
    fake.row_bucket = one_in(random_, 3) ? between(random_, 2, 8) : 1;
    fake.tokens_later = one_in(random_, 2);
    fake.rounds_ahead = fake.tokens_later && one_in(random_, 2);
    fake.put_off_rows = one_in(random_, 2) ? between(random_, 2, 6) : 0;
    fake.made_states = &seen_.made_states;
    fake.before_step = [future = gate_.get_future().share()](const ops::Batch&) { future.wait(); };
    drafts_ = fake.mtp && options_.drafts != 0;
    engine_ = fake_engine(options_, std::move(fake));
    for (int i = 0; i < 3; ++i) {
      for (int64_t j = 0; j < options_.max_context; ++j) {
        texts_[i].push_back(static_cast<int32_t>(random_.below(static_cast<uint64_t>(vocabulary_))));
      }
    }
  }

  std::vector<int32_t> random_prompt() {
    std::vector<int32_t> prompt;
    const int64_t most = options_.max_context - 1;
    if (!all_.empty() && one_in(random_, 3)) {
      // What was asked before: the same, or the answer and what comes next.
      const Request& before = all_[random_.below(all_.size())].request;
      prompt = before.prompt;
      if (one_in(random_, 2)) {
        Request plain = before;
        const Outcome answer = alone(plain, vocabulary_, options_.max_context);
        prompt.insert(prompt.end(), answer.tokens.begin(), answer.tokens.end());
      }
    } else {
      const std::vector<int32_t>& text = texts_[random_.below(3)];
      prompt.assign(text.begin(), text.begin() + between(random_, 0, most));
    }
    for (int64_t i = between(random_, 0, 12); i > 0; --i)
      prompt.push_back(static_cast<int32_t>(random_.below(static_cast<uint64_t>(vocabulary_))));
    if (static_cast<int64_t>(prompt.size()) > most) prompt.resize(static_cast<size_t>(most));
    if (prompt.empty()) prompt.push_back(7);
    return prompt;
  }

  void submit() {
    Request request;
    request.prompt = random_prompt();
    request.max_tokens = between(random_, 1, 40);
    request.sampling = random_sampling(random_);
    if (one_in(random_, 2))
      request.stop_tokens = {static_cast<int32_t>(random_.below(static_cast<uint64_t>(vocabulary_)))};
    if (one_in(random_, 4)) request.min_tokens = between(random_, 0, request.max_tokens);
    if (one_in(random_, 8)) request.ignore_eos = true;
    if (one_in(random_, 8)) request.defined_tokens = 30;
    if (one_in(random_, 3)) request.priority = static_cast<int32_t>(between(random_, -1, 1));
    if (one_in(random_, 8)) request.cache.salt = "another";
    if (one_in(random_, 8)) request.prompt_logprobs = static_cast<int32_t>(random_.below(3));
    if (one_in(random_, 12))
      request.deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(random_.below(3000));
    if (drafts_ && one_in(random_, 4)) request.drafts = static_cast<int32_t>(random_.below(2));
    for (int64_t at = 0; one_in(random_, 2) && at < static_cast<int64_t>(request.prompt.size());) {
      at = between(random_, at, static_cast<int64_t>(request.prompt.size()));
      request.cache.boundaries.push_back(at);
    }
    const int64_t count = one_in(random_, 6) ? between(random_, 2, 4) : 1;
    Submitted one;
    one.request = request;
    if (count == 1 && one_in(random_, 5)) {
      const auto fault = static_cast<TestConstraint::Fault>(random_.below(4));
      const TestConstraint constraint(random_.next(), fault, 12);
      one.copy = std::make_shared<TestConstraint>(constraint);
      one.may_fail_early = drafts_ && fault == TestConstraint::Fault::kThrows;
      request.constraint = std::make_shared<TestConstraint>(constraint);
      ++seen_.constrained;
    }
    if (one_in(random_, 20)) {
      request.notify = [] { throw std::runtime_error("nobody listens"); };
      one.request.notify = request.notify;
    }
    auto streams = engine_->submit(request, count);
    seen_.forks += count > 1 ? 1 : 0;
    for (int64_t i = 0; i < count; ++i) {
      Submitted next;
      next.request = one.request;
      *next.request.sampling.seed += static_cast<uint64_t>(i);
      next.copy = one.copy;
      next.may_fail_early = one.may_fail_early;
      next.stream = std::move(streams[static_cast<size_t>(i)]);
      next.cancel_after = one_in(random_, 5) ? between(random_, 0, 9) : -1;
      if (one_in(random_, 10)) next.stream.reset();  // dropped at once
      all_.push_back(std::move(next));
    }
  }

  std::string check(Submitted& submitted) {
    if (!submitted.stream) return "";
    if (one_in(random_, 12)) {  // dropped half way
      submitted.stream->next(1ms);
      submitted.stream.reset();
      return "";
    }
    const Request& request = submitted.request;
    const Outcome expected = alone(request, vocabulary_, options_.max_context, submitted.copy.get());
    const Outcome outcome = collect(*submitted.stream, submitted.cancel_after);
    const auto is_prefix = [&] {
      return outcome.tokens.size() <= expected.tokens.size() &&
             std::equal(outcome.tokens.begin(), outcome.tokens.end(), expected.tokens.begin());
    };
    seen_.hits += outcome.end.cached_tokens;
    seen_.accepted += outcome.end.accepted;
    seen_.drafted += outcome.end.drafted;
    if (outcome.end.output_tokens != static_cast<int64_t>(outcome.tokens.size())) return "output_tokens is wrong";
    if (outcome.end.cached_tokens >= static_cast<int64_t>(request.prompt.size())) return "cached_tokens is wrong";
    switch (outcome.end.reason) {
      case FinishReason::kCancelled:
        ++seen_.cancelled;
        if (submitted.cancel_after < 0) return "cancelled";
        if (!is_prefix()) return "wrong tokens before it was cancelled: " + describe(outcome, expected);
        return "";
      case FinishReason::kDeadline:
        ++seen_.deadlines;
        if (!request.deadline) return "a deadline that was not set";
        if (!is_prefix()) return "wrong tokens before the deadline: " + describe(outcome, expected);
        return "";
      case FinishReason::kError:
        ++seen_.errors;
        if (request.notify) return is_prefix() && outcome.tokens.size() <= 1 ? "" : "notify threw, and it went on";
        if (submitted.may_fail_early && is_prefix()) return "";
        if (expected.end.reason != FinishReason::kError) return "failed: " + outcome.end.error;
        break;
      case FinishReason::kStop:
        ++seen_.stops;
        break;
      case FinishReason::kLength:
        ++seen_.lengths;
        break;
    }
    if (!(outcome == expected)) return "wrong tokens: " + describe(outcome, expected);
    return check_logprobs(request, outcome);
  }

  std::string check_logprobs(const Request& request, const Outcome& outcome) {
    cpu::Sampler sampler(vocabulary_);
    std::vector<float> logits(static_cast<size_t>(vocabulary_));
    const auto equal = [](const std::vector<TokenLogprob>& a, const std::vector<TokenLogprob>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TokenLogprob& x, const TokenLogprob& y) {
        return x.token == y.token && x.logprob == y.logprob;
      });
    };
    if (request.prompt_logprobs >= 0 && !outcome.tokens.empty()) {
      ++seen_.prompt_logprobs;
      if (outcome.prompt_logprobs.size() + 1 != request.prompt.size()) return "prompt_logprobs of another length";
      for (size_t i = 0; i + 1 < request.prompt.size(); ++i) {
        fake_logits(FakeModel::expected_hash(std::span(request.prompt).first(i + 1)), logits);
        if (!equal(outcome.prompt_logprobs[i],
                   sampler.logprobs(logits, request.defined_tokens, request.prompt[i + 1], request.prompt_logprobs))) {
          return "wrong prompt_logprobs";
        }
      }
    }
    std::vector<int32_t> tokens = request.prompt;
    for (size_t i = 0; i < outcome.tokens.size(); ++i) {
      if (request.sampling.logprobs < 0) break;
      fake_logits(FakeModel::expected_hash(tokens), logits);
      if (!equal(outcome.logprobs[i],
                 sampler.logprobs(logits, request.defined_tokens, outcome.tokens[i], request.sampling.logprobs))) {
        return "wrong logprobs";
      }
      tokens.push_back(outcome.tokens[i]);
    }
    return "";
  }

  static std::string describe(const Outcome& outcome, const Outcome& expected) {
    return "got " + testing::PrintToString(outcome) + ", wanted " + testing::PrintToString(expected);
  }

  Random random_;
  Seen& seen_;
  EngineOptions options_;
  bool drafts_ = false;
  int64_t vocabulary_ = kVocabulary;
  std::promise<void> gate_;
  bool open_ = false;
  std::vector<int32_t> texts_[3];
  std::unique_ptr<Engine> engine_;
  std::vector<Submitted> all_;
};

class Schedules : public testing::TestWithParam<int> {};

TEST_P(Schedules, EachRequestGetsItsTokens) {
  const int64_t count = schedules() / kParts;
  Seen seen;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t seed = static_cast<uint64_t>(GetParam()) * 1000003 + static_cast<uint64_t>(i);
    std::string wrong;
    try {
      wrong = Schedule(seed, seen).run();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    ASSERT_EQ(wrong, "") << "schedule " << seed;
  }
  if (count < 100) return;
  EXPECT_GT(seen.preemptions, 0);
  EXPECT_GT(seen.hits, 0);
  EXPECT_GT(seen.accepted, 0);
  EXPECT_LT(seen.accepted, seen.drafted);
  EXPECT_GT(seen.cancelled, 0);
  EXPECT_GT(seen.deadlines, 0);
  EXPECT_GT(seen.errors, 0);
  EXPECT_GT(seen.forks, 0);
  EXPECT_GT(seen.stops, 0);
  EXPECT_GT(seen.lengths, 0);
  EXPECT_GT(seen.prompt_logprobs, 0);
  EXPECT_GT(seen.constrained, 0);
  EXPECT_GT(seen.made_states, 0);
}

INSTANTIATE_TEST_SUITE_P(All, Schedules, testing::Range(0, kParts));

TEST(Schedules, ManyThreadsSubmitAndCancel) {
  EngineOptions options = small_options();
  options.cache_tokens = 96;
  options.drafts = 3;
  FakeOptions fake;
  fake.mtp = true;
  const auto engine = fake_engine(options, fake);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      for (int i = 0; i < 15; ++i) {
        Request request;
        for (int64_t j = between(random, 1, 63); j > 0; --j) request.prompt.push_back(static_cast<int32_t>(j % 3));
        request.max_tokens = between(random, 1, 40);
        request.sampling = random_sampling(random);
        const auto stream = engine->submit(request);
        if (one_in(random, 4)) continue;  // dropped
        const Outcome expected = alone(request, 40, 64);
        const Outcome outcome = collect(*stream, one_in(random, 4) ? 3 : -1);
        if (outcome.end.reason == FinishReason::kCancelled) continue;
        if (!(outcome == expected)) ++wrong;
        engine->stats();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  expect_idle(*engine);
}

}  // namespace
}  // namespace fourfold::engine
