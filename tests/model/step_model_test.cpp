// Steps of a real model against its plain forward pass: chunks, drafts of its MTP head, padding and several lanes at
// once choose the tokens that a loop of forward() and an argmax chooses.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "cpu/backend.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "model/ranked.h"
#include "small_config.h"

namespace fourfold::model {
namespace {

constexpr int64_t kPageSize = 8;
constexpr int64_t kLanePages = 16;
constexpr int64_t kLanes = 3;
constexpr int64_t kSlots = 6;  // of a lane
constexpr int64_t kOutput = 24;

struct Case {
  cpu::Isa isa;
  bool dense;
  int64_t row_bucket;
  int64_t ranks = 1;
};

class Steps : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Model> load(int64_t vocabulary = 97) {
    const auto backend = [](const std::shared_ptr<ranks::Member>& member) {
      cpu::CpuOptions options;
      options.isa = GetParam().isa;
      options.threads = GetParam().ranks == 1 ? 2 : 1;
      options.row_bucket = GetParam().row_bucket;
      options.member = member;
      return cpu::make_backend(options);
    };
    ModelConfig config = small_config(GetParam().dense);
    config.vocabulary = vocabulary;
    const auto source = make_random_weights(config, 5);
    ModelOptions model_options;
    model_options.max_step_tokens = 64;
    model_options.max_logit_rows = 64;
    model_options.mtp = true;
    return load_model(*source, backend, {.ranks = GetParam().ranks}, model_options);
  }
};

// What a cache is said to take is what it takes, but for padding: nothing here needs any.
TEST_P(Steps, CacheBytesAreThoseOfTheCaches) {
  const std::unique_ptr<Model> model = load();
  const Caches caches = model->make_caches(5, kPageSize, 3);
  EXPECT_EQ(caches.kv->bytes(), 5 * kPageSize * model->cache_bytes_per_token());
  EXPECT_EQ(caches.states->bytes(), 3 * model->state_bytes_per_slot());
}

std::vector<int32_t> greedy(Model& model, const std::vector<int32_t>& prompt, int64_t chunk) {
  Caches caches = model.make_caches(kLanePages, kPageSize, 1);
  std::vector<int32_t> pages(kLanePages), tokens = prompt;
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<float> row(static_cast<size_t>(model.config().vocabulary));
  int64_t done = 0;
  while (static_cast<int64_t>(tokens.size() - prompt.size()) < kOutput) {
    const auto count = std::min(static_cast<int64_t>(tokens.size()) - done, chunk);
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(count);
    sequence.position = static_cast<int32_t>(done);
    sequence.pages = pages;
    const auto last = static_cast<int32_t>(count - 1);
    model.forward({std::span(tokens).subspan(static_cast<size_t>(done), static_cast<size_t>(count)),
                   std::span(&sequence, 1), std::span(&last, 1)},
                  caches);
    done += count;
    if (done < static_cast<int64_t>(tokens.size())) continue;
    model.backend().read(model.logits(), row);
    tokens.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

struct Lane {
  std::vector<int32_t> prompt, pages, slots, output;
  int64_t fed = 0;
  int32_t asked_drafts = 0;
  bool ended = false;
};

struct Counts {
  int64_t verified = 0, accepted = 0;
  std::vector<int32_t> drafts;
};

enum class Drafted { kAllTokens, kFirstList, kAnyList };

// All lanes, in random chunks of at most `chunk` and random depths, two steps under way.
Counts run_steps(Model& model, std::vector<Lane>& lanes, int64_t drafts, int64_t chunk, uint64_t seed,
                 Drafted from = Drafted::kAllTokens) {
  Caches caches = model.make_caches(kLanes * kLanePages + 1, kPageSize, kLanes * kSlots);
  ops::StepLimits limits;
  limits.lanes = kLanes;
  limits.rows = limits.logit_rows = 64;
  limits.drafts = drafts;
  limits.context = kLanePages * kPageSize;
  limits.page_size = kPageSize;
  limits.vocabulary = model.config().vocabulary;
  if (from != Drafted::kAllTokens) limits.draft_lists = {128, 256};
  const auto stepper = model.make_stepper(limits, caches);
  Random random(seed);
  Counts counts;
  std::deque<ops::Ticket> under_way;
  for (int turn = 0; turn < 1000; ++turn) {
    std::vector<ops::LaneWork> work;
    std::vector<ops::LaneStart> starts(lanes.size());
    for (const bool prompts : {false, true}) {
      for (size_t i = 0; i < lanes.size(); ++i) {
        Lane& lane = lanes[i];
        const auto length = static_cast<int64_t>(lane.prompt.size());
        const bool seen = std::any_of(work.begin(), work.end(), [&](const auto& w) { return w.lane == int32_t(i); });
        if (lane.ended || seen || (lane.fed < length) != prompts || random.below(4) == 0) continue;
        ops::LaneWork w;
        w.lane = static_cast<int32_t>(i);
        if (prompts) {
          const auto most = static_cast<uint64_t>(std::min(length - lane.fed, chunk));
          const auto count = static_cast<int64_t>(1 + random.below(most));
          w.tokens = std::span(lane.prompt).subspan(static_cast<size_t>(lane.fed), static_cast<size_t>(count));
          w.position = static_cast<int32_t>(lane.fed);
          lane.fed += count;
          w.next = lane.fed < length ? lane.prompt[static_cast<size_t>(lane.fed)] : -1;
          w.state_out = std::span(lane.slots).first(1);
          if (w.position == 0) {
            starts[i].sampling.temperature = 0;
            starts[i].max_output = kOutput;
            w.start = &starts[i];
            w.pages = lane.pages;
          }
        } else {
          w.drafts = static_cast<int32_t>(random.below(static_cast<uint64_t>(lane.asked_drafts) + 1));
          w.state_out = std::span(lane.slots).first(w.drafts > 0 ? static_cast<size_t>(w.drafts) + 1 : 1);
        }
        w.feed_drafter = drafts > 0;
        w.new_drafts = w.next < 0 ? static_cast<int32_t>(random.below(static_cast<uint64_t>(drafts) + 1)) : 0;
        lane.asked_drafts = w.new_drafts;
        work.push_back(w);
      }
    }
    const bool over = std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.ended; });
    const auto list = from == Drafted::kAnyList ? static_cast<int32_t>(random.below(3)) : 1;
    if (!over) under_way.push_back(stepper->launch({{}, work, from == Drafted::kAllTokens ? 0 : list}));
    if (under_way.empty()) break;
    if (!over && under_way.size() < static_cast<size_t>(ops::kInFlight)) continue;
    const ops::StepOutcome& outcome = stepper->wait(under_way.front());
    under_way.pop_front();
    EXPECT_EQ(outcome.error, "");
    for (const ops::LaneOutcome& of : outcome.lanes) {
      Lane& lane = lanes[static_cast<size_t>(of.lane)];
      lane.output.insert(lane.output.end(), of.tokens.begin(), of.tokens.end());
      lane.ended = of.ended;
      counts.verified += of.verified;
      counts.accepted += of.accepted;
      counts.drafts.insert(counts.drafts.end(), of.drafts.begin(), of.drafts.end());
    }
  }
  return counts;
}

std::vector<Lane> make_lanes(uint64_t seed) {
  Random random(seed);
  std::vector<Lane> lanes(kLanes);
  for (size_t i = 0; i < lanes.size(); ++i) {
    lanes[i].prompt.resize(1 + random.below(40));
    for (int32_t& token : lanes[i].prompt) token = static_cast<int32_t>(random.below(97));
    for (int64_t p = 0; p < kLanePages; ++p)
      lanes[i].pages.push_back(static_cast<int32_t>(1 + int64_t(i) * kLanePages + p));
    for (int64_t s = 0; s < kSlots; ++s) lanes[i].slots.push_back(static_cast<int32_t>(int64_t(i) * kSlots + s));
  }
  return lanes;
}

TEST_P(Steps, AnyScheduleChoosesTheTokensOfTheForwardPass) {
  const auto model = load();
  // The fast backends promise the same bits for pieces of up to 16 tokens.
  const int64_t chunk = GetParam().isa == cpu::Isa::kReference ? 30 : 16;
  Counts counts;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::vector<Lane> lanes = make_lanes(seed);
    const Counts more = run_steps(*model, lanes, static_cast<int64_t>(seed % 6), chunk, seed);
    counts.verified += more.verified;
    counts.accepted += more.accepted;
    for (const Lane& lane : lanes) EXPECT_EQ(lane.output, greedy(*model, lane.prompt, chunk)) << "seed " << seed;
  }
  EXPECT_GT(counts.verified, 50);
  EXPECT_LE(counts.accepted, counts.verified);
}

TEST_P(Steps, AListIsAllThatIsDrafted) {
  if (GetParam().ranks > 1) GTEST_SKIP() << "lists are for one rank";
  const auto model = load(400);
  const auto beyond = [&](Drafted from) {
    std::vector<Lane> lanes = make_lanes(3);
    const Counts counts = run_steps(*model, lanes, 3, 16, 3, from);
    EXPECT_GT(counts.drafts.size(), 20U);
    for (const Lane& lane : lanes) EXPECT_EQ(lane.output, greedy(*model, lane.prompt, 16));
    return std::count_if(counts.drafts.begin(), counts.drafts.end(), [](int32_t token) { return token >= 128; });
  };
  EXPECT_GT(beyond(Drafted::kAllTokens), 0);
  EXPECT_EQ(beyond(Drafted::kFirstList), 0);
  EXPECT_GT(beyond(Drafted::kAnyList), 0);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const cpu::Isa isa : cpu::supported_isas()) {
    all.push_back({isa, false, 1});
    all.push_back({isa, true, 8});
  }
  all.push_back({cpu::best_isa(), false, 8, 2});
  all.push_back({cpu::best_isa(), true, 1, 2});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Steps, testing::ValuesIn(cases()), [](const auto& parameter) {
  const Case& c = parameter.param;
  return fmt::format("{}{}{}{}", cpu::isa_name(c.isa), c.dense ? "Dense" : "Moe", c.row_bucket > 1 ? "Padded" : "",
                     c.ranks > 1 ? fmt::format("{}Ranks", c.ranks) : "");
});

}  // namespace
}  // namespace fourfold::model
