// The depth of drafts on a simulated clock: never much slower than none, and close to the best fixed depth where drafts
// pay.
#include "engine/draft_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/random.h"

namespace fourfold::engine {
namespace {

// Seconds of a step.
struct Machine {
  const char* name;
  double (*rows)(double rows);   // of the trunk
  double (*pass)(double lanes);  // a drafting pass
  double (*feed)(double rows);   // keeping the drafter's caches up to date
};

// A card that reads its weights once for up to 64 rows; the same in buckets; a processor that computes.
double flat(double n) { return 1.0 + 0.002 * n; }
double bucketed(double n) { return 1.0 + 0.01 * std::exp2(std::ceil(std::log2(n))); }
double experts(double n) { return 0.4 + 0.6 * std::pow(n, 0.6); }  // each row reads experts of its own
double linear(double n) { return 0.3 + 0.7 * n; }
double computes(double n) { return 0.6 + 0.4 * n; }
double rising(double n) { return 0.8 + 0.08 * n; }
template <double (*F)(double), int kPercent>
double part(double n) {
  return kPercent / 100.0 * F(n);
}
double nothing(double) { return 0; }

const Machine kMachines[] = {
    {"flat", flat, part<flat, 10>, part<flat, 2>},
    {"flat, dear drafts", flat, part<flat, 60>, part<flat, 5>},
    {"buckets", bucketed, part<bucketed, 8>, part<bucketed, 3>},
    {"experts", experts, part<experts, 12>, part<experts, 3>},
    {"linear", linear, part<linear, 10>, part<linear, 4>},
    {"linear, free drafts", linear, nothing, nothing},
    {"drafts as dear as steps", experts, part<experts, 100>, part<experts, 10>},
};

struct Result {
  double tokens_per_second = 0;
  double drafts = 0;  // a lane and step
};

// What happens to a clock on a machine that is busy: the first steps of a kind are slow, and some are interrupted.
struct Disturbed {
  double first = 1;         // times as slow the first two steps with so many rows and passes are
  double interrupted = 0;   // of the steps
  double interruption = 0;  // plain steps, at most
  bool told = false;        // of slow first steps: they are not measured (ops::StepOutcome::prepared)
};

// Lanes that answer `length` tokens each, one after the other, as many steps as `steps`. `acceptance(lane)` is constant
// by position. A step's drafts are verified by the next, which is planned before the step is settled.
Result simulate(DraftPolicy& policy, const Machine& machine, int64_t lanes,
                const std::function<double(int64_t)>& acceptance, int64_t steps, double noise = 0.03,
                int64_t length = 400, const Disturbed& disturbed = {}) {
  Random random(11);
  struct Lane {
    Acceptance acceptance;
    bool feeds = true;
    int64_t left = 0;
    int32_t drafts = 0;  // made by the step before
  };
  std::vector<Lane> all(static_cast<size_t>(lanes));
  std::vector<DraftPolicy::Choice> choices;
  std::vector<size_t> chosen;
  double seconds = 0, tokens = 0, drafts = 0;
  struct Settled {
    DraftPolicy::Step step;
    double seconds;
    std::vector<std::array<int64_t, 3>> verified;  // lane, verified, accepted
    bool measured = true;
  };
  std::vector<Settled> under_way;
  std::map<std::pair<int64_t, size_t>, int> kinds;
  for (int64_t s = 0; s < steps; ++s) {
    choices.clear();
    chosen.clear();
    int64_t others = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      Lane& lane = all[i];
      if (lane.left <= 0) {
        lane.left = s == 0 ? 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(length))) : length;
        lane.acceptance = {};
        lane.feeds = policy.feeds(lanes);
      }
      if (lane.feeds) {
        choices.push_back({nullptr, &lane.acceptance, policy.most(), 0});
        chosen.push_back(i);
      } else {
        ++others;
      }
    }
    policy.choose(choices, others);
    Settled now;
    std::vector<int32_t> made(all.size(), 0);
    for (size_t c = 0; c < choices.size(); ++c) {
      if (policy.gives_up()) {
        all[chosen[c]].feeds = false;
      } else {
        made[chosen[c]] = choices[c].drafts;
      }
    }
    for (size_t i = 0; i < all.size(); ++i) {
      Lane& lane = all[i];
      int64_t accepted = 0;
      while (accepted < lane.drafts && random.uniform() < acceptance(static_cast<int64_t>(i))) ++accepted;
      now.step.rows += 1 + lane.drafts;
      now.step.tokens += 1 + accepted;
      now.step.feeds = now.step.feeds || lane.feeds;
      drafts += lane.drafts;
      lane.left -= 1 + accepted;
      if (lane.drafts > 0) now.verified.push_back({static_cast<int64_t>(i), lane.drafts, accepted});
      for (int32_t d = 0; d < made[i]; ++d) ++now.step.passes[static_cast<size_t>(d)];
      lane.drafts = made[i];
    }
    now.step.lanes = lanes;
    now.seconds = machine.rows(static_cast<double>(now.step.rows));
    if (now.step.feeds) now.seconds += machine.feed(static_cast<double>(now.step.rows));
    for (const int64_t n : now.step.passes) now.seconds += n > 0 ? machine.pass(static_cast<double>(n)) : 0;
    now.seconds *= 1 + noise * random.normal();
    seconds += now.seconds;
    const auto passes = std::count_if(now.step.passes.begin(), now.step.passes.end(), [](int64_t n) { return n > 0; });
    if (kinds[{now.step.rows, static_cast<size_t>(passes)}]++ < 2) {
      now.seconds *= disturbed.first;
      now.measured = !disturbed.told;
    }
    if (random.uniform() < disturbed.interrupted) {
      now.seconds += disturbed.interruption * random.uniform() * machine.rows(static_cast<double>(lanes));
    }
    tokens += static_cast<double>(now.step.tokens);
    under_way.push_back(std::move(now));
    if (under_way.size() < 2) continue;
    const Settled& oldest = under_way.front();
    for (const auto& [lane, verified, accepted] : oldest.verified) {
      policy.record(all[static_cast<size_t>(lane)].acceptance, verified, accepted);
    }
    if (oldest.measured) policy.measure(oldest.step, oldest.seconds);
    under_way.erase(under_way.begin());
  }
  return {tokens / seconds, drafts / static_cast<double>(steps * lanes)};
}

double plain_rate(const Machine& machine, int64_t lanes) {
  return static_cast<double>(lanes) / machine.rows(static_cast<double>(lanes));
}

constexpr double kAcceptances[] = {0, 0.2, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95};
constexpr int64_t kBatches[] = {1, 2, 4, 8, 16, 32, 64};
constexpr int64_t kSteps = 4000;

TEST(DraftPolicy, IsNeverMuchSlowerThanNoDrafts) {
  for (const Machine& machine : kMachines) {
    for (const double acceptance : kAcceptances) {
      for (const int64_t lanes : kBatches) {
        DraftPolicy policy(-1, ops::kMaxDrafts);
        const Result result = simulate(
            policy, machine, lanes, [&](int64_t) { return acceptance; }, kSteps);
        EXPECT_GE(result.tokens_per_second, 0.97 * plain_rate(machine, lanes))
            << machine.name << ", acceptance " << acceptance << ", lanes " << lanes << ": drafts " << result.drafts;
      }
    }
  }
}

TEST(DraftPolicy, IsCloseToTheBestFixedDepth) {
  for (const Machine& machine : kMachines) {
    for (const double acceptance : kAcceptances) {
      for (const int64_t lanes : kBatches) {
        double best = plain_rate(machine, lanes);
        for (int32_t depth = 1; depth <= ops::kMaxDrafts; ++depth) {
          DraftPolicy fixed(depth, ops::kMaxDrafts);
          best = std::max(best, simulate(
                                    fixed, machine, lanes, [&](int64_t) { return acceptance; }, 600, 0)
                                    .tokens_per_second);
        }
        DraftPolicy policy(-1, ops::kMaxDrafts);
        const Result result = simulate(
            policy, machine, lanes, [&](int64_t) { return acceptance; }, kSteps);
        // Where drafts pay only when all sequences make them, and a trial is dear, caution costs more.
        const double share = machine.pass(1) > 0.5 * machine.rows(1) ? 0.75 : 0.85;
        EXPECT_GE(result.tokens_per_second, share * best)
            << machine.name << ", acceptance " << acceptance << ", lanes " << lanes << ": drafts " << result.drafts;
      }
    }
  }
}

// Short answers on a machine with other work, by an undisturbed clock.
TEST(DraftPolicy, KeepsItsHeadOnABusyMachine) {
  const Machine machine = {"computes", computes, part<computes, 15>, part<computes, 6>};
  const Disturbed busy = {2, 0.02, 50};
  for (const int64_t lanes : {1, 2}) {
    for (const double acceptance : {0.1, 0.6, 0.94}) {
      double best = plain_rate(machine, lanes);
      for (int32_t depth = 1; depth <= ops::kMaxDrafts; ++depth) {
        DraftPolicy fixed(depth, ops::kMaxDrafts);
        best = std::max(best, simulate(
                                  fixed, machine, lanes, [&](int64_t) { return acceptance; }, 600, 0, 30)
                                  .tokens_per_second);
      }
      DraftPolicy policy(-1, ops::kMaxDrafts);
      const Result result = simulate(
          policy, machine, lanes, [&](int64_t) { return acceptance; }, kSteps, 0.03, 30, busy);
      EXPECT_GE(result.tokens_per_second, 0.97 * plain_rate(machine, lanes)) << acceptance << ", lanes " << lanes;
      EXPECT_GE(result.tokens_per_second, 0.9 * best) << acceptance << ", lanes " << lanes;
    }
  }
}

// A card that waits for tokens before it drafts, and records every kind of step: short answers of a model that is easy
// to predict. What recording takes is told, and positions that were never tried are tried.
TEST(DraftPolicy, FindsDeepDraftsOnACardInAFewAnswers) {
  const auto rows = [](double n) { return 0.95 + 0.05 * n; };
  const auto pass = [](double) { return 0.28; };
  for (const auto feed : {+[](double) { return 0.05; }, +[](double) { return 0.45; }}) {
    const Machine card = {"card", rows, pass, feed};
    const auto acceptance = [](int64_t) { return 0.96; };
    double best = 0;
    for (int32_t depth = 1; depth <= ops::kMaxDrafts; ++depth) {
      DraftPolicy fixed(depth, ops::kMaxDrafts);
      best = std::max(best, simulate(fixed, card, 1, acceptance, 600, 0, 45).tokens_per_second);
    }
    DraftPolicy policy(-1, ops::kMaxDrafts);
    const Result result = simulate(policy, card, 1, acceptance, 600, 0.03, 45, {12, 0, 0, true});
    EXPECT_GE(result.tokens_per_second, 0.95 * best) << "drafts " << result.drafts;
  }
}

// Half of the sequences are predictable: they draft, the others do not.
TEST(DraftPolicy, EachSequenceHasItsOwnDepth) {
  const Machine machine = {"rows cost", rising, part<rising, 5>, part<rising, 1>};
  const auto acceptance = [](int64_t lane) { return lane % 2 == 0 ? 0.95 : 0.05; };
  DraftPolicy policy(-1, ops::kMaxDrafts);
  const double mixed = simulate(policy, machine, 8, acceptance, kSteps).tokens_per_second;
  for (int32_t depth = 0; depth <= ops::kMaxDrafts; ++depth) {
    DraftPolicy fixed(depth, ops::kMaxDrafts);
    EXPECT_GT(mixed, 1.1 * simulate(fixed, machine, 8, acceptance, 600, 0).tokens_per_second) << depth;
  }
}

TEST(DraftPolicy, AFixedDepthIsKept) {
  DraftPolicy policy(3, 3);
  EXPECT_TRUE(policy.feeds(1));
  Acceptance acceptance;
  DraftPolicy::Choice choices[] = {{nullptr, &acceptance, 3, 0}, {nullptr, &acceptance, 1, 0}};
  policy.choose(choices, 5);
  EXPECT_EQ(choices[0].drafts, 3);
  EXPECT_EQ(choices[1].drafts, 1);  // no more than the sequence may still use
  EXPECT_FALSE(policy.gives_up());
  DraftPolicy none(0, 0);
  EXPECT_FALSE(none.feeds(1));
}

TEST(DraftPolicy, AcceptanceIsConditionalOnThePositionsBefore) {
  Acceptance acceptance;
  acceptance.add(3, 1, 1.0);
  acceptance.add(3, 3, 1.0);
  acceptance.add(2, 0, 1.0);
  EXPECT_EQ(acceptance.tried[0], 3);
  EXPECT_EQ(acceptance.accepted[0], 2);
  EXPECT_EQ(acceptance.tried[1], 2);
  EXPECT_EQ(acceptance.accepted[1], 1);
  EXPECT_EQ(acceptance.tried[2], 1);
  EXPECT_EQ(acceptance.accepted[2], 1);
  EXPECT_EQ(acceptance.tried[3], 0);
}

TEST(CostCurve, InterpolatesBetweenWhatWasMeasured) {
  CostCurve curve;
  EXPECT_EQ(curve.at(4), 0);
  curve.learn(4, 2.0);
  EXPECT_EQ(curve.at(4), 2.0);
  EXPECT_EQ(curve.at(1), 2.0);
  EXPECT_GT(curve.at(8), 2.0);
  EXPECT_LT(curve.at(8), 4.0);
  EXPECT_FALSE(curve.knows(4));
  curve.learn(4, 2.0);
  EXPECT_TRUE(curve.knows(4));
  curve.learn(4, 2.0);
  for (int i = 0; i < 3; ++i) curve.learn(8, 4.0);
  EXPECT_EQ(curve.at(6), 3.0);
}

// The first steps of a kind are slow, and some are disturbed: neither is taken for what such steps take.
TEST(CostCurve, TellsDisturbancesFromWhatStepsTake) {
  CostCurve curve;
  curve.learn(4, 50.0);
  curve.learn(4, 2.5);
  curve.learn(4, 2.6);
  EXPECT_EQ(curve.at(4), 2.5);
  curve.learn(4, 100.0);
  EXPECT_LT(curve.at(4), 2.7);
  for (int i = 0; i < 60; ++i) curve.learn(4, 5.0);
  EXPECT_NEAR(curve.at(4), 5.0, 0.1);
  for (int i = 0; i < 20; ++i) curve.forget();
  EXPECT_EQ(curve.at(4), 0);
}

}  // namespace
}  // namespace fourfold::engine
