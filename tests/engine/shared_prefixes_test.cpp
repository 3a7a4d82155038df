// What requests take from each other through the engine: each line of the traffic that prefix caches of recurrent
// models are known to fail on. Possible are, for each prompt, the tokens it shares with anything computed before under
// the same salt; at least nine of ten must be hit.
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <thread>

#include "base/random.h"
#include "engine/engine.h"
#include "harness.h"

namespace fourfold::engine {
namespace {

constexpr int64_t kVocabulary = 64;
// A turn is kOpen, a role, its text, kClose; a model answers behind kOpen, kModel and, when it does not think, an empty
// think block, which the history lacks later.
constexpr int32_t kOpen = 1, kClose = 2, kUser = 3, kModel = 4, kTool = 5, kThink = 6, kThought = 7;

using Tokens = std::vector<int32_t>;

void append(Tokens& to, const Tokens& more) { to.insert(to.end(), more.begin(), more.end()); }

struct Setting {
  const char* name;
  int32_t drafts;
  bool thinking;  // answers stay in the history as they were
};

class SharedPrefixes : public testing::TestWithParam<Setting> {
 protected:
  void start(int64_t cache_tokens = 0, int64_t sequences = 4, std::function<void(const ops::Batch&)> before_step = {}) {
    EngineOptions options;
    options.max_context = 8192;
    options.max_sequences = sequences;
    options.max_step_tokens = 256;
    options.page_size = 16;
    options.cache_tokens = cache_tokens;
    options.cached_states = 16;
    options.drafts = GetParam().drafts;
    FakeOptions fake;
    fake.vocabulary = kVocabulary;
    fake.max_positions = 8192;
    fake.mtp = true;
    fake.before_step = std::move(before_step);
    engine_ = fake_engine(options, fake);
  }

  Tokens text(int64_t count) {
    Tokens tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = 8 + static_cast<int32_t>(random_.below(kVocabulary - 8));
    return tokens;
  }
  Tokens turn(int32_t role, const Tokens& content) {
    Tokens tokens = {kOpen, role};
    append(tokens, content);
    tokens.push_back(kClose);
    return tokens;
  }

  Request request_of(Tokens prompt, std::vector<int64_t> boundaries, const std::string& salt, int64_t max_tokens) {
    Request request = simple_request(std::move(prompt), max_tokens, random_.next());
    request.sampling.temperature = 0;
    request.defined_tokens = static_cast<int32_t>(kVocabulary);
    for (int32_t token = 1; token < 8; ++token) request.banned_tokens.push_back(token);
    request.cache.boundaries = std::move(boundaries);
    request.cache.salt = salt;
    return request;
  }

  // What is to be had, before the request is submitted.
  void expect_from_cache(const Request& request) {
    int64_t best = 0;
    for (const Tokens& before : computed_[request.cache.salt]) {
      const size_t n = std::min(before.size(), request.prompt.size() - 1);
      best = std::max<int64_t>(
          best,
          std::mismatch(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(n), request.prompt.begin()).first -
              before.begin());
    }
    possible_ += best;
  }

  Outcome finish(const Request& request, EventStream& stream) {
    const Outcome outcome = collect(stream);
    EXPECT_EQ(outcome, alone(request, kVocabulary, 8192));
    hit_ += outcome.end.cached_tokens;
    Tokens all = request.prompt;
    append(all, outcome.tokens);
    all.pop_back();  // the last token is never fed
    computed_[request.cache.salt].push_back(std::move(all));
    return outcome;
  }
  Outcome ask(const Request& request) {
    expect_from_cache(request);
    const auto stream = engine_->submit(request);
    return finish(request, *stream);
  }

  struct Conversation {
    Tokens history;
    std::string salt;
    int64_t system = 0;
  };
  Conversation begin(int64_t system, const std::string& salt = "") {
    Conversation conversation;
    conversation.history = turn(kUser, text(system - 3));
    conversation.salt = salt;
    conversation.system = system;
    return conversation;
  }
  Request next(Conversation& conversation, int32_t role, int64_t length, int64_t max_tokens = 20) {
    append(conversation.history, turn(role, text(length)));
    Tokens prompt = conversation.history;
    const auto before = static_cast<int64_t>(prompt.size());
    append(prompt, {kOpen, kModel});
    if (!GetParam().thinking) append(prompt, {kThink, kThought});
    return request_of(std::move(prompt), {conversation.system, before}, conversation.salt, max_tokens);
  }
  void answered(Conversation& conversation, const Outcome& outcome) {
    append(conversation.history, {kOpen, kModel});
    append(conversation.history, outcome.tokens);
    conversation.history.push_back(kClose);
  }
  void say(Conversation& conversation, int32_t role, int64_t length) {
    answered(conversation, ask(next(conversation, role, length)));
  }

  void expect_hits() {
    EXPECT_GT(possible_, 0);
    EXPECT_GE(static_cast<double>(hit_), 0.9 * static_cast<double>(possible_)) << hit_ << " of " << possible_;
    const EngineStats stats = engine_->stats();
    EXPECT_EQ(stats.prefix.hit_tokens, hit_);
    expect_idle(*engine_);
  }

  Random random_{7};
  std::unique_ptr<Engine> engine_;
  std::map<std::string, std::vector<Tokens>> computed_;
  int64_t possible_ = 0, hit_ = 0;
};

TEST_P(SharedPrefixes, ConversationsInTurns) {
  start();
  Conversation a = begin(300), b = begin(500);
  for (int i = 0; i < 10; ++i) {
    say(a, kUser, 60);
    say(b, kUser, 90);
  }
  expect_hits();
}

TEST_P(SharedPrefixes, ASideRequestBetweenTwoTurns) {
  start();
  Conversation chat = begin(300);
  for (int i = 0; i < 12; ++i) {
    say(chat, kUser, 100);
    Conversation title = begin(80);  // another system prompt, the same talk
    append(title.history, chat.history);
    ask(next(title, kUser, 10));
  }
  expect_hits();
}

TEST_P(SharedPrefixes, FiftyToolCalls) {
  start();
  Conversation other = begin(700);
  say(other, kUser, 200);
  Conversation agent = begin(900);
  say(agent, kUser, 40);
  for (int i = 0; i < 50; ++i) say(agent, kTool, 30);
  say(other, kUser, 30);  // still there
  expect_hits();
}

TEST_P(SharedPrefixes, SuffixesOfManyLengths) {
  start();
  for (const int64_t suffix : {40, 400, 1300}) {
    Conversation base = begin(1000);
    const Tokens front = base.history;
    for (int i = 0; i < 4; ++i) {
      base.history = front;
      say(base, kUser, suffix);
    }
  }
  expect_hits();
}

// Nobody says where the common part ends: the second request finds out, the third has it.
TEST_P(SharedPrefixes, SuffixesWithoutHints) {
  start();
  const Tokens front = text(2000);
  for (int i = 0; i < 14; ++i) {
    Tokens prompt = front;
    append(prompt, text(40 + 90 * i));
    ask(request_of(prompt, {}, "", 5));
  }
  expect_hits();
}

TEST_P(SharedPrefixes, SaltsShareNothing) {
  start();
  const Tokens prompt = text(600);
  for (const char* salt : {"", "a", "b"}) {
    EXPECT_EQ(ask(request_of(prompt, {300}, salt, 5)).end.cached_tokens, 0);
    EXPECT_GE(ask(request_of(prompt, {300}, salt, 5)).end.cached_tokens, 300);
  }
}

TEST_P(SharedPrefixes, AnswersOfOnePromptComputeItOnce) {
  start();
  const Request request = request_of(text(700), {}, "", 12);
  auto streams = engine_->submit(request, 6);
  Request one = request;
  for (auto& stream : streams) {
    finish(one, *stream);
    ++*one.sampling.seed;
  }
  EXPECT_GE(hit_, 5 * 690);
  EXPECT_LT(engine_->stats().prefill_tokens, 700 + 5 * 10);
  expect_idle(*engine_);
}

TEST_P(SharedPrefixes, RequestsThatComeTogetherWaitForWhatTheyShare) {
  std::promise<void> gate;
  start(0, 4, [future = gate.get_future().share()](const ops::Batch&) { future.wait(); });
  const Tokens front = text(900);
  std::vector<Request> requests;
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int i = 0; i < 6; ++i) {
    Tokens prompt = front;
    append(prompt, text(30 + 20 * i));
    requests.push_back(request_of(prompt, {}, "", 12));
    streams.push_back(engine_->submit(requests.back()));
  }
  gate.set_value();
  for (size_t i = 0; i < requests.size(); ++i) finish(requests[i], *streams[i]);
  EXPECT_GE(hit_, 9 * 5 * 900 / 10);
  expect_idle(*engine_);
}

// Preempted requests begin again with what they had computed.
TEST_P(SharedPrefixes, PreemptedRequestsResumeFromTheCache) {
  start(0, 1, [](const ops::Batch&) { std::this_thread::sleep_for(100us); });
  Request low = request_of(text(1900), {}, "", 300), high = request_of(text(100), {}, "", 20);
  low.priority = 1;
  const auto first = engine_->submit(low);
  ASSERT_TRUE(first->next(10s));  // it runs
  const auto second = engine_->submit(high);
  finish(high, *second);
  Outcome outcome = collect(*first);
  const Outcome expected = alone(low, kVocabulary, 8192);
  outcome.tokens.insert(outcome.tokens.begin(), expected.tokens.front());
  EXPECT_EQ(outcome, expected);
  const EngineStats stats = engine_->stats();
  EXPECT_EQ(stats.preemptions, 1);
  EXPECT_LE(stats.prefill_tokens, 1900 + 100 + 20);  // nothing twice, but the token that was chosen last
  EXPECT_EQ(stats.prefix.hit_tokens, 0);             // nobody else's work was saved
  expect_idle(*engine_);
}

TEST_P(SharedPrefixes, RequestsThatDisplaceEachOtherEndAllTheSame) {
  start(8192);
  std::vector<Request> requests;
  std::vector<std::unique_ptr<EventStream>> streams;
  for (int i = 0; i < 4; ++i) requests.push_back(request_of(text(1900), {}, "", 400));
  for (const Request& request : requests) streams.push_back(engine_->submit(request));
  for (size_t i = 0; i < requests.size(); ++i) finish(requests[i], *streams[i]);
  EXPECT_GT(engine_->stats().preemptions, 0);
  expect_idle(*engine_);
}

INSTANTIATE_TEST_SUITE_P(All, SharedPrefixes,
                         testing::Values(Setting{"Plain", 0, true}, Setting{"ThinkingOff", 0, false},
                                         Setting{"Drafts", 3, true}, Setting{"DraftsThinkingOff", 5, false},
                                         Setting{"AutoDrafts", kAutoDrafts, true}),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace fourfold::engine
