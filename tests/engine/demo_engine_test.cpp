// The demo model through the engine: a request gets the same tokens alone, batched, in chunks, from the prefix cache,
// after a preemption and with drafts. On the reference backend bit by bit, log-probabilities included, and the tokens
// of a plain loop of forward() and argmax. On fast backends what remains is measured.
//
// FOURFOLD_DEMO_ANSWERS=2000 demo_engine_test --gtest_filter='Fast*' prints the figures of docs/engine.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "base/math.h"
#include "chat/chat_text.h"
#include "chat/model_directory.h"
#include "cpu/backend.h"
#include "engine/engine.h"
#include "model/config.h"
#include "model/model.h"

namespace fourfold::engine {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLongestPrompt = 1400;
constexpr int32_t kAlternatives = 20;

fs::path demo_directory() { return fs::path(FOURFOLD_SOURCE_DIR) / "models" / "demo"; }

// ---- what is asked

// Conversations of the demo model's tasks, each cut behind each of its user's messages, with and without thinking;
// those whose prompts have `shortest` to `longest` tokens.
std::vector<Request> make_requests(size_t count, int64_t shortest, int64_t longest, int64_t max_tokens) {
  const chat::ChatText text(demo_directory(), model::read_config(demo_directory()));
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(demo_directory() / "eval")) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Request> all;
  for (const fs::path& file : files) {
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);) {
      const Json task = parse_json(line, file.string());
      Json messages = Json::array();
      for (const Json& message : task["messages"]) {
        messages.push_back(message);
        const std::string role = message["role"].get<std::string>();
        if (role != "user" && role != "tool") continue;
        for (const bool thinking : {false, true}) {
          chat::Conversation conversation;
          conversation.messages = messages;
          if (task.contains("tools")) conversation.tools = task["tools"];
          conversation.variables["enable_thinking"] = thinking;
          chat::Prompt prompt = text.prompt(conversation);
          std::vector<int64_t> boundaries;
          if (!prompt.turns.empty()) boundaries = {prompt.turns.front(), prompt.turns.back()};
          const auto length = static_cast<int64_t>(prompt.tokens.size());
          if (length < shortest || length > longest) continue;
          Request request = text.request(std::move(prompt));
          request.cache.boundaries = std::move(boundaries);
          all.push_back(std::move(request));
        }
      }
    }
  }
  if (all.size() < count) fail("{} conversations in {}, wanted {}", all.size(), demo_directory().string(), count);
  std::vector<Request> chosen;
  for (size_t i = 0; i < count; ++i) {
    Request request = all[i * all.size() / count];
    request.max_tokens = max_tokens;
    request.sampling = SamplingParams{};
    request.sampling.temperature = 0;
    request.sampling.logprobs = kAlternatives;
    chosen.push_back(std::move(request));
  }
  return chosen;
}

// ---- ways to answer

struct Way {
  std::string name;
  EngineOptions options;
  bool one_by_one = false;  // the next request is submitted when the one before has ended
  bool displaced = false;   // once the first are being answered, the others come and go before them
  int64_t copies = 1;       // answers of one request, of which the last counts: it begins from what the first computed
};

// Context for the longest of the requests.
int64_t context_of(const std::vector<Request>& requests) {
  int64_t context = 0;
  for (const Request& request : requests) {
    context = std::max(context, static_cast<int64_t>(request.prompt.size()) + request.max_tokens);
  }
  return context;
}

EngineOptions options_of(int64_t context, int64_t sequences, int64_t step_tokens) {
  EngineOptions options;
  options.max_context = context;
  options.max_sequences = sequences;
  options.max_step_tokens = step_tokens;
  options.cache_tokens = context * sequences;
  options.page_size = 16;
  options.max_queued = 1 << 16;
  options.prefix_cache = false;
  return options;
}

Way alone(int64_t context) { return {"alone", options_of(context, 1, 512), true}; }

std::vector<Way> ways(const std::vector<Request>& requests, std::initializer_list<int32_t> depths) {
  const int64_t context = context_of(requests);
  std::vector<Way> all;
  for (const int64_t sequences : {3, 16}) {
    all.push_back({fmt::format("{} at once", sequences), options_of(context, sequences, 512)});
  }
  all.push_back({"in chunks of 24, 4 at once", options_of(context, 4, 24)});
  Way hits = {"from the prefix cache", options_of(context, 1, 512), true, false, 2};
  hits.options.prefix_cache = true;
  hits.options.cache_tokens = 2 * context;
  all.push_back(hits);
  Way preempted = {"preempted, 1 at once", options_of(context, 1, 512)};
  preempted.displaced = true;
  all.push_back(preempted);
  for (const int32_t drafts : depths) {
    Way drafted = {fmt::format("{} drafts", drafts), options_of(context, 1, 512), true};
    drafted.options.drafts = drafts;
    all.push_back(drafted);
  }
  Way drafted = {"drafts auto, 8 at once", options_of(context, 8, 512)};
  drafted.options.drafts = kAutoDrafts;
  all.push_back(drafted);
  Way everything = {"all of it, 8 at once", options_of(context, 8, 64), false, false, 2};
  everything.options.cache_tokens = 4 * context;
  everything.options.prefix_cache = true;
  everything.options.cached_states = 16;
  everything.options.drafts = 3;
  everything.options.draft_tokens = 1024;
  all.push_back(everything);
  return all;
}

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;
  int64_t cached_tokens = 0;
};

struct Answers {
  std::vector<Answer> answers;
  EngineStats stats;
};

std::unique_ptr<model::Model> load(cpu::Isa isa, int64_t step_tokens, int64_t logit_rows, bool mtp, int64_t ranks = 1) {
  model::ModelOptions options;
  options.max_step_tokens = step_tokens;
  options.max_logit_rows = logit_rows;
  options.mtp = mtp;
  const auto backend = [&](const chat::BackendRequest& request) {
    cpu::CpuOptions cpu_options;
    cpu_options.isa = isa;
    cpu_options.threads = ranks == 1 ? 2 : 1;
    cpu_options.member = request.member;
    return cpu::make_backend(cpu_options);
  };
  return chat::load_model(demo_directory(), backend, options, {.ranks = ranks}).model;
}

Answers answer_once(const Way& way, cpu::Isa isa, const std::vector<Request>& requests, int64_t ranks) {
  EngineOptions options = way.options;
  if (ranks > 1) options.draft_tokens = 0;  // lists are for one
  const int64_t drafts = options.drafts == kAutoDrafts ? ops::kMaxDrafts : options.drafts;
  const auto engine =
      make_engine(load(isa, options.max_step_tokens, options.max_sequences * (1 + drafts), drafts > 0, ranks), options);
  Answers result;
  std::vector<std::vector<std::unique_ptr<EventStream>>> streams;
  if (way.displaced) {
    for (size_t i = 0; i < std::min<size_t>(requests.size(), static_cast<size_t>(options.max_sequences)); ++i) {
      Request first = requests[i];
      first.priority = 1;
      streams.push_back(engine->submit(std::move(first), way.copies));
    }
    while (engine->stats().decode_tokens == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    while (streams.size() < (way.one_by_one ? i + 1 : requests.size())) {
      streams.push_back(engine->submit(requests[streams.size()], way.copies));
    }
    Answer taken;
    while (auto event = streams[i].back()->next(std::chrono::minutes(5))) {
      if (event->kind == Event::Kind::kFinished) {
        if (!event->error.empty()) fail("{}, request {}: {}", way.name, i, event->error);
        taken.cached_tokens = event->cached_tokens;
        break;
      }
      taken.tokens.push_back(event->token);
      taken.logprobs.push_back(std::move(event->logprobs));
    }
    result.answers.push_back(std::move(taken));
  }
  engine->drain();
  result.stats = engine->stats();
  return result;
}

// Whether somebody comes in time to displace an answer is a matter of processors: until it was so, a few times.
Answers answer(const Way& way, cpu::Isa isa, const std::vector<Request>& requests, int64_t ranks = 1) {
  constexpr int kAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    Answers found = answer_once(way, isa, requests, ranks);
    if (!way.displaced || found.stats.preemptions > 0 || attempt == kAttempts) return found;
  }
}

// That the way does what its name says.
void expect_as_named(const Way& way, const Answers& found, const std::vector<Request>& requests) {
  const EngineStats& stats = found.stats;
  if (way.options.prefix_cache) {
    EXPECT_GT(stats.prefix.hit_tokens, stats.prefix.prompt_tokens / 4) << way.name;
    EXPECT_GT(stats.prefix.pages, 0) << way.name;
  } else {
    EXPECT_EQ(stats.prefix.hit_tokens, 0) << way.name;
  }
  if (way.name == "from the prefix cache") {
    // All of it but the last token, which must be fed.
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(found.answers[i].cached_tokens, static_cast<int64_t>(requests[i].prompt.size()) - 1)
          << way.name << ", request " << i;
    }
  }
  if (way.name.starts_with("preempted")) {
    EXPECT_GT(stats.preemptions, 0) << way.name;
  }
  if (way.options.drafts > 0) {
    EXPECT_GT(stats.drafts.drafted[way.options.drafts - 1], 0) << way.name;
    EXPECT_GT(stats.drafts.accepted[0], 0) << way.name;
  }
}

// ---- the truth: a loop without engine, step and sampler

std::vector<int32_t> plain_loop(model::Model& model, const Request& request, int64_t context) {
  constexpr int64_t kPageSize = 64;
  model::Caches caches = model.make_caches(ceil_div(context, kPageSize), kPageSize, 1);
  std::vector<int32_t> pages(static_cast<size_t>(ceil_div(context, kPageSize)));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<float> row(static_cast<size_t>(model.config().vocabulary));
  std::vector<int32_t> tokens = request.prompt, output;
  size_t done = 0;
  while (static_cast<int64_t>(output.size()) < request.max_tokens) {
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(tokens.size() - done);
    sequence.position = static_cast<int32_t>(done);
    sequence.pages = pages;
    const int32_t last = sequence.count - 1;
    model.forward({std::span(tokens).subspan(done), std::span(&sequence, 1), std::span(&last, 1)}, caches);
    model.backend().read(model.logits(), row);
    for (const int32_t token : request.banned_tokens) row[static_cast<size_t>(token)] = -INFINITY;
    const auto end = request.defined_tokens > 0 ? row.begin() + request.defined_tokens : row.end();
    const auto best = static_cast<int32_t>(std::max_element(row.begin(), end) - row.begin());
    done = tokens.size();
    tokens.push_back(best);
    output.push_back(best);
    const auto& stops = request.stop_tokens;
    if (std::find(stops.begin(), stops.end(), best) != stops.end()) break;
  }
  return output;
}

// ---- comparison

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

bool same_bits(const std::vector<TokenLogprob>& a, const std::vector<TokenLogprob>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TokenLogprob& x, const TokenLogprob& y) {
    return x.token == y.token && same_bits(x.logprob, y.logprob);
  });
}

struct Difference {
  int64_t answers = 0;
  int64_t tokens = 0;  // of the answers that differ in tokens, and of answers
  int64_t bits = 0;    // answers some of whose log-probabilities differ
  double largest = 0;  // of a log-probability of one of the most probable tokens, where all tokens before agree
};

Difference compare(const std::vector<Answer>& wanted, const std::vector<Answer>& found) {
  Difference result;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Answer& a = wanted[i];
    const Answer& b = found[i];
    ++result.answers;
    result.tokens += a.tokens != b.tokens ? 1 : 0;
    bool bits = a.tokens != b.tokens;
    for (size_t t = 0; t < std::min(a.tokens.size(), b.tokens.size()); ++t) {
      bits = bits || !same_bits(a.logprobs[t], b.logprobs[t]);
      for (const TokenLogprob& x : a.logprobs[t]) {
        for (const TokenLogprob& y : b.logprobs[t]) {
          if (x.token != y.token) continue;
          result.largest = std::max(result.largest, std::abs(static_cast<double>(x.logprob) - y.logprob));
        }
      }
      if (a.tokens[t] != b.tokens[t]) break;  // from here on they answer different things
    }
    result.bits += bits ? 1 : 0;
  }
  return result;
}

// Few and short: the reference takes milliseconds for a token.
TEST(ReferenceEngine, EveryWayGivesTheSameBits) {
  const std::vector<Request> requests = make_requests(4, 30, 60, 10);
  const int64_t context = context_of(requests);
  const Answers truth = answer(alone(context), cpu::Isa::kReference, requests);
  const auto model = load(cpu::Isa::kReference, context, 1, false);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(truth.answers[i].tokens, plain_loop(*model, requests[i], context)) << "request " << i;
  }
  for (const Way& way : ways(requests, {1, 3, 5})) {
    const Answers found = answer(way, cpu::Isa::kReference, requests);
    expect_as_named(way, found, requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(found.answers[i].tokens, truth.answers[i].tokens) << way.name << ", request " << i;
      ASSERT_EQ(found.answers[i].logprobs.size(), truth.answers[i].logprobs.size());
      for (size_t t = 0; t < truth.answers[i].logprobs.size(); ++t) {
        EXPECT_TRUE(same_bits(found.answers[i].logprobs[t], truth.answers[i].logprobs[t]))
            << way.name << ", request " << i << ", token " << t;
      }
    }
  }
}

std::vector<cpu::Isa> fast_isas() {
  std::vector<cpu::Isa> isas;
  for (const cpu::Isa isa : cpu::supported_isas()) {
    if (isa != cpu::Isa::kReference) isas.push_back(isa);
  }
  return isas;
}

// How answers compare with `truth`: few other tokens, probabilities nearby. With `print` a line of figures.
void expect_hardly_any_differs(const Way& way, cpu::Isa isa, const std::vector<Request>& requests, int64_t ranks,
                               const Answers& truth, bool print) {
  const auto begin = std::chrono::steady_clock::now();
  const Answers found = answer(way, isa, requests, ranks);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  expect_as_named(way, found, requests);
  const Difference difference = compare(truth.answers, found.answers);
  const double share = static_cast<double>(difference.tokens) / static_cast<double>(difference.answers);
  if (print) {
    fmt::print(
        "{:12} {} {:28} {:5} answers, {:4} differ ({:5.2f} %), {:5} in some bit; largest difference {:.3g}; {:.0f} s\n",
        cpu::isa_name(isa), ranks == 1 ? "one rank" : fmt::format("{} ranks", ranks), way.name, difference.answers,
        difference.tokens, 100 * share, difference.bits, difference.largest, seconds);
    std::fflush(stdout);
  }
  EXPECT_LE(share, 0.05) << way.name;
  EXPECT_LE(difference.largest, 0.5) << way.name;
}

// FOURFOLD_DEMO_ANSWERS, or few.
size_t answers_asked(bool& print) {
  const char* asked = std::getenv("FOURFOLD_DEMO_ANSWERS");
  print = asked != nullptr;
  return asked != nullptr ? std::strtoull(asked, nullptr, 10) : 8;
}

// Several ranks, in every way, against one: what the order of sums in fp32 makes, and no more.
TEST(RankedEngine, HardlyAnyAnswerDiffersFromOneRank) {
  bool print = false;
  const std::vector<Request> requests = make_requests(answers_asked(print), 1, kLongestPrompt, 24);
  const int64_t context = context_of(requests);
  const cpu::Isa isa = cpu::best_isa();
  const Answers truth = answer(alone(context), isa, requests);
  for (const int64_t ranks : {2, 4}) {
    expect_hardly_any_differs(alone(context), isa, requests, ranks, truth, print);
    if (ranks == 4) continue;
    for (const Way& way : ways(requests, {3})) {
      // Whether somebody comes in time to displace an answer is a matter of processors, of which ranks take several.
      if (!way.displaced) expect_hardly_any_differs(way, isa, requests, ranks, truth, print);
    }
  }
}

class FastEngine : public testing::TestWithParam<cpu::Isa> {};

std::string isa_of(const testing::TestParamInfo<cpu::Isa>& which) { return cpu::isa_name(which.param); }

INSTANTIATE_TEST_SUITE_P(Isa, FastEngine, testing::ValuesIn(fast_isas()), isa_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FastEngine);

TEST_P(FastEngine, HardlyAnyAnswerDiffers) {
  bool print = false;
  const std::vector<Request> requests = make_requests(answers_asked(print), 1, kLongestPrompt, 24);
  const Answers truth = answer(alone(context_of(requests)), GetParam(), requests);
  for (const Way& way : ways(requests, {3})) expect_hardly_any_differs(way, GetParam(), requests, 1, truth, print);
}

}  // namespace
}  // namespace fourfold::engine
