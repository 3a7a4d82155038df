// The sampler against a slow, literal implementation of its description, and against the distribution it should draw
// from.
#include "cpu/sample/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "base/check.h"
#include "base/property.h"
#include "base/random.h"
#include "cpu/simd/exp.h"

namespace fourfold::cpu {
namespace {

using ops::SamplingParams;
using ops::TokenLogprob;

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(uint64_t seed, size_t n, double spread) {
  Random random(seed);
  std::vector<float> logits(n);
  for (float& x : logits) x = static_cast<float>(spread * random.normal());
  return logits;
}

// A choice without its history.
struct Request {
  SamplingParams sampling;
  std::vector<int32_t> banned_tokens, too_early;
  std::vector<uint32_t> mask;
  int32_t defined_tokens = 0;
};

Request request_with(const SamplingParams& params) {
  Request request;
  request.sampling = params;
  return request;
}

// Tokens of prompt and output as the sampler counts them, and as a map.
class History {
 public:
  explicit History(std::vector<int32_t> prompt) : prompt_(std::move(prompt)) {
    for (const int32_t token : prompt_) seen_.emplace(token, 0);
  }
  void add_output(int32_t token) {
    ++seen_[token];
    output_.push_back(token);
  }
  const std::map<int32_t, int32_t>& seen() const { return seen_; }
  TokenCounts counts(size_t vocabulary) const {
    TokenCounts counts;
    if (seen_.empty()) return counts;
    counts.start(static_cast<int64_t>(vocabulary));
    for (const int32_t token : prompt_) counts.add_prompt(token);
    for (const int32_t token : output_) counts.add_output(token);
    return counts;
  }

 private:
  std::vector<int32_t> prompt_, output_;
  std::map<int32_t, int32_t> seen_;
};

Chosen choose(Sampler& sampler, std::span<float> row, const Request& request, const History& history, uint64_t seed,
              int64_t index) {
  const TokenCounts counts = history.counts(row.size());
  return sampler.choose(row, {.params = request.sampling,
                              .seed = seed,
                              .index = index,
                              .defined_tokens = request.defined_tokens,
                              .banned = request.banned_tokens,
                              .too_early = request.too_early,
                              .mask = request.mask,
                              .counts = counts.counts()});
}

// The distribution of the next token in double precision, following the steps of SamplingParams literally. `border` is
// set for tokens so close to a cut that rounding may put them on either side.
std::vector<double> expected_distribution(std::vector<float> logits, const Request& request, const History& history,
                                          bool& borderline) {
  const SamplingParams& p = request.sampling;
  const size_t n = logits.size();
  std::vector<double> x(logits.begin(), logits.end());
  for (const auto& [token, bias] : p.logit_bias) x[token] += bias;
  for (const int32_t token : request.banned_tokens) x[token] = -kInf;
  for (const int32_t token : request.too_early) x[token] = -kInf;
  for (size_t token = 0; token < n && !request.mask.empty(); ++token) {
    if ((request.mask[token / 32] >> (token % 32) & 1) == 0) x[token] = -kInf;
  }
  if (request.defined_tokens > 0) std::fill(x.begin() + request.defined_tokens, x.end(), -kInf);
  for (const auto& [token, count] : history.seen()) {
    if (x[token] == -kInf) continue;
    x[token] = x[token] > 0 ? x[token] / p.repetition_penalty : x[token] * p.repetition_penalty;
    if (count > 0) x[token] -= p.presence_penalty + static_cast<double>(p.frequency_penalty) * count;
  }
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
  std::vector<double> probability(n, 0.0);
  if (p.temperature == 0) {
    probability[order[0]] = 1;
    return probability;
  }
  size_t kept = 0;
  while (kept < n && x[order[kept]] > -kInf) ++kept;
  if (p.top_k > 0) kept = std::min<size_t>(kept, static_cast<size_t>(p.top_k));
  const double largest = x[order[0]];
  std::vector<double> weight(n);
  for (size_t i = 0; i < kept; ++i) weight[i] = std::exp((x[order[i]] - largest) / p.temperature);
  double total = std::accumulate(weight.begin(), weight.begin() + static_cast<std::ptrdiff_t>(kept), 0.0);
  if (p.top_p < 1) {
    double sum = 0;
    size_t end = 0;
    while (end < kept && sum < p.top_p * total) sum += weight[end++];
    if (std::fabs(sum - p.top_p * total) < 1e-5 * total ||
        std::fabs(sum - weight[end - 1] - p.top_p * total) < 1e-5 * total) {
      borderline = true;
    }
    kept = std::max<size_t>(end, 1);
  }
  size_t end = kept;
  while (end > 1 && weight[end - 1] < p.min_p) --end;
  for (size_t i = 0; i < kept; ++i) {
    if (p.min_p > 0 && std::fabs(weight[i] - p.min_p) < 1e-5 * p.min_p) borderline = true;
  }
  kept = end;
  total = std::accumulate(weight.begin(), weight.begin() + static_cast<std::ptrdiff_t>(kept), 0.0);
  for (size_t i = 0; i < kept; ++i) probability[order[i]] = weight[i] / total;
  return probability;
}

std::map<int32_t, int64_t> draw_many(const std::vector<float>& logits, const Request& request, const History& history,
                                     int64_t draws, uint64_t seed = 7) {
  Sampler sampler(static_cast<int64_t>(logits.size()));
  std::map<int32_t, int64_t> counts;
  std::vector<float> row;
  for (int64_t i = 0; i < draws; ++i) {
    row = logits;
    ++counts[choose(sampler, row, request, history, seed, i).token];
  }
  return counts;
}

// Chi-square of the counts against the distribution; tokens with fewer than 5 expected draws are pooled. Compared with
// a quantile that a correct sampler exceeds about once in a million runs; the seeds are fixed, so the test is not
// flaky.
void expect_fits(const std::map<int32_t, int64_t>& counts, const std::vector<double>& probability, int64_t draws) {
  double chi = 0, pooled_expected = 0, pooled_found = 0;
  int freedom = -1;
  for (size_t token = 0; token < probability.size(); ++token) {
    const auto found = counts.find(static_cast<int32_t>(token));
    const double observed = found == counts.end() ? 0 : static_cast<double>(found->second);
    const double expected = probability[token] * static_cast<double>(draws);
    if (expected == 0) {
      ASSERT_EQ(observed, 0) << "token " << token << " is outside the support";
    } else if (expected < 5) {
      pooled_expected += expected;
      pooled_found += observed;
    } else {
      chi += (observed - expected) * (observed - expected) / expected;
      ++freedom;
    }
  }
  if (pooled_expected > 5) {
    chi += (pooled_found - pooled_expected) * (pooled_found - pooled_expected) / pooled_expected;
    ++freedom;
  }
  if (freedom <= 0) return;
  // Wilson-Hilferty: the cube root of chi-square / freedom is close to normal.
  const double f = freedom;
  const double z = (std::cbrt(chi / f) - (1 - 2 / (9 * f))) / std::sqrt(2 / (9 * f));
  EXPECT_LT(z, 4.75) << "chi-square " << chi << " with " << freedom << " degrees of freedom";
}

const History kNoHistory({});

TEST(Sampler, DrawsFollowTheDistribution) {
  const std::vector<float> logits = random_logits(3, 50, 1.5);
  std::vector<SamplingParams> cases(7);
  cases[1].temperature = 0.5f;
  cases[2].temperature = 3.0f;
  cases[3].top_k = 7;
  cases[4].top_p = 0.8f;
  cases[5].min_p = 0.05f;
  cases[6].temperature = 1.3f;
  cases[6].top_k = 20;
  cases[6].top_p = 0.9f;
  cases[6].min_p = 0.02f;
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const Request request = request_with(cases[i]);
    bool borderline = false;
    const auto probability = expected_distribution(logits, request, kNoHistory, borderline);
    ASSERT_FALSE(borderline);
    expect_fits(draw_many(logits, request, kNoHistory, 40000), probability, 40000);
  }
}

TEST(Sampler, BiasAndPenaltiesShapeTheDistribution) {
  const std::vector<float> logits = random_logits(4, 30, 1.0);
  History history({1, 2, 3, 3});
  for (const int32_t token : {3, 4, 4, 4, 5}) history.add_output(token);
  SamplingParams params;
  params.repetition_penalty = 1.4f;
  params.presence_penalty = 0.3f;
  params.frequency_penalty = 0.25f;
  params.logit_bias = {{4, 2.0f}, {9, -1.5f}, {10, 1.0f}};
  Request request = request_with(params);
  request.banned_tokens = {10, 11};
  request.defined_tokens = 25;
  bool borderline = false;
  const auto probability = expected_distribution(logits, request, history, borderline);
  EXPECT_EQ(probability[10], 0);
  EXPECT_EQ(probability[25], 0);
  expect_fits(draw_many(logits, request, history, 40000), probability, 40000);
}

// For random rows and parameters: whatever is drawn has probability in the literal implementation, and greedy agrees.
FOURFOLD_PROPERTY(Sampler, DrawsStayInTheSupport) {
  const size_t n = 1 + random.below(600);
  std::vector<float> logits = random_logits(random.next(), n, random.uniform(0, 6));
  if (random.below(3) == 0) {
    for (float& x : logits) x = std::round(x);  // many ties
  }
  SamplingParams params;
  params.temperature = random.below(5) == 0 ? 0.0f : static_cast<float>(random.uniform(0.05, 3));
  if (random.below(2) == 0) params.top_k = static_cast<int32_t>(random.below(n + 5));
  if (random.below(2) == 0) params.top_p = static_cast<float>(random.uniform(0.01, 1));
  if (random.below(2) == 0) params.min_p = static_cast<float>(random.uniform(0, 0.99));
  if (random.below(2) == 0) params.presence_penalty = static_cast<float>(random.uniform(-2, 2));
  if (random.below(2) == 0) params.repetition_penalty = static_cast<float>(random.uniform(0.5, 2));
  Request request = request_with(params);
  if (random.below(2) == 0) request.defined_tokens = static_cast<int32_t>(1 + random.below(n));
  History history(params.penalized() ? std::vector<int32_t>{0} : std::vector<int32_t>{});
  for (int i = 0; i < 5 && params.penalized(); ++i) history.add_output(static_cast<int32_t>(random.below(n)));
  bool borderline = false;
  const auto probability = expected_distribution(logits, request, history, borderline);
  Sampler sampler(static_cast<int64_t>(n));
  const uint64_t seed = random.next();
  std::vector<float> row = logits;
  const int32_t token = choose(sampler, row, request, history, seed, 3).token;
  ASSERT_TRUE(token >= 0 && token < static_cast<int32_t>(n));
  const bool rounding = params.penalized() && params.temperature == 0;  // fp32 against double at a tie
  ASSERT_TRUE(borderline || rounding || probability[static_cast<size_t>(token)] > 0);
  row = logits;
  ASSERT_TRUE(choose(sampler, row, request, history, seed, 3).token == token);
}

TEST(Sampler, TiesGoToTheLowerId) {
  SamplingParams params;
  params.temperature = 0;
  const std::vector<float> logits = {1, 5, 2, 5, 5};
  EXPECT_EQ(draw_many(logits, request_with(params), kNoHistory, 3), (std::map<int32_t, int64_t>{{1, 3}}));
  params.temperature = 1;
  params.top_k = 2;
  const auto counts = draw_many(logits, request_with(params), kNoHistory, 400);
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_TRUE(counts.contains(1) && counts.contains(3));
}

TEST(Sampler, TopKOfAMaskedVocabulary) {
  SamplingParams params;
  params.top_k = 4;
  Request request = request_with(params);
  request.banned_tokens = {1, 3};
  const auto counts = draw_many({1, 5, 2, 5, 1}, request, kNoHistory, 2000);
  EXPECT_EQ(counts.size(), 3u);  // the banned ones do not fill the four places with themselves
  EXPECT_FALSE(counts.contains(1));
  EXPECT_FALSE(counts.contains(3));
}

TEST(Sampler, ATokenDependsOnSeedAndIndexAlone) {
  const std::vector<float> logits = random_logits(5, 1000, 1.0);
  const Request request = request_with({});
  Sampler sampler(1000), other(1000);
  std::vector<int32_t> tokens;
  std::vector<float> row;
  for (int64_t i = 0; i < 50; ++i) {
    row = logits;
    tokens.push_back(choose(sampler, row, request, kNoHistory, 99, i).token);
  }
  for (int64_t i = 49; i >= 0; --i) {  // another sampler, another order, other work in between
    row = random_logits(static_cast<uint64_t>(i), 1000, 2.0);
    choose(other, row, request, kNoHistory, 1, 0);
    row = logits;
    EXPECT_EQ(choose(other, row, request, kNoHistory, 99, i).token, tokens[static_cast<size_t>(i)]);
  }
  row = logits;
  int same = 0;
  for (int64_t i = 0; i < 50; ++i) {
    row = logits;
    same += choose(sampler, row, request, kNoHistory, 100, i).token == tokens[static_cast<size_t>(i)] ? 1 : 0;
  }
  EXPECT_LT(same, 10);
}

TEST(Sampler, BadLogitsAreErrorsThatNameTheToken) {
  Sampler sampler(20);
  for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> logits(20, 0.5f);
    logits[17] = bad;
    try {
      choose(sampler, logits, request_with({}), kNoHistory, 1, 0);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("logit of token 17"), std::string::npos) << error.what();
    }
    // Beyond the defined tokens nobody looks.
    std::vector<float> padded(20, 0.5f);
    padded[19] = bad;
    Request request = request_with({});
    request.defined_tokens = 19;
    EXPECT_LT(choose(sampler, padded, request, kNoHistory, 1, 0).token, 19);
  }
}

TEST(Sampler, ExtremeParametersStayFinite) {
  Sampler sampler(4);
  const std::vector<float> logits = {-3e38f, 3e38f, 2.9e38f, 0};
  for (const float temperature : {1e-38f, 1e-45f, 1e-6f, 1.0f, 10.0f}) {
    SamplingParams params;
    params.temperature = temperature;
    for (const float top_p : {1.0f, 0.9999999f, 1e-30f}) {
      params.top_p = top_p;
      std::vector<float> row = logits;
      EXPECT_EQ(choose(sampler, row, request_with(params), kNoHistory, 3, 0).token, 1);
    }
  }
  SamplingParams params;
  params.repetition_penalty = 1e-38f;
  params.logit_bias = {{0, 100.0f}};
  History history({0, 1, 2, 3});
  std::vector<float> row = logits;
  const int32_t token = choose(sampler, row, request_with(params), history, 3, 0).token;
  EXPECT_TRUE(token == 1 || token == 2);
}

TEST(Sampler, LogprobsAreOfTheModelsDistribution) {
  const std::vector<float> logits = random_logits(6, 300, 2.0);
  double total = 0;
  for (const float x : logits) total += std::exp(static_cast<double>(x));
  SamplingParams params;
  params.logprobs = 5;
  params.temperature = 0;
  params.logit_bias = {{42, 100.0f}};  // what is chosen, but not what the model thinks
  Sampler sampler(300);
  std::vector<float> row = logits;
  const Chosen sampled = choose(sampler, row, request_with(params), kNoHistory, 1, 0);
  EXPECT_EQ(sampled.token, 42);
  ASSERT_EQ(sampled.logprobs.size(), 6u);
  EXPECT_EQ(sampled.logprobs[0].token, 42);
  for (const TokenLogprob& entry : sampled.logprobs) {
    EXPECT_NEAR(entry.logprob, logits[static_cast<size_t>(entry.token)] - std::log(total), 1e-5);
  }
  std::vector<float> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(logits[static_cast<size_t>(sampled.logprobs[i + 1].token)], sorted[i]);
  }
}

// With exact ties at the end of the nucleus, the lower ids are in it: 8 equal tokens, half of the probability.
TEST(Sampler, NucleusWithExactTies) {
  for (const int32_t top_k : {0, 8}) {
    SamplingParams params;
    params.top_p = 0.5f;
    params.top_k = top_k;
    const auto counts = draw_many(std::vector<float>(8, 0.25f), request_with(params), kNoHistory, 4000);
    ASSERT_EQ(counts.size(), 4u) << "top_k " << top_k;
    EXPECT_EQ(counts.rbegin()->first, 3) << "top_k " << top_k;
  }
  // What the first token has is exactly what is wanted: the next, far smaller ones stay outside.
  float half = -0.69314718f;
  for (int i = 0; i < 64 && exp_in_range(Scalar{half}).v != 0.5f; ++i) {
    half = std::nextafter(half, exp_in_range(Scalar{half}).v < 0.5f ? 0.0f : -1.0f);
  }
  ASSERT_EQ(exp_in_range(Scalar{half}).v, 0.5f);
  for (const int32_t top_k : {0, 3}) {
    SamplingParams params;
    params.top_p = 0.5f;
    params.top_k = top_k;
    EXPECT_EQ(draw_many({half, 0.0f, half}, request_with(params), kNoHistory, 400).size(), 1u) << "top_k " << top_k;
  }
  // More equal tokens than are sorted at once, after a larger one.
  std::vector<float> logits(200, 0.0f);
  logits[150] = 1.0f;
  SamplingParams params;
  params.top_p = 0.25f;
  bool borderline = false;
  const auto wanted = expected_distribution(logits, request_with(params), kNoHistory, borderline);
  ASSERT_FALSE(borderline);
  const auto counts = draw_many(logits, request_with(params), kNoHistory, 20000);
  for (const auto& [token, count] : counts) EXPECT_GT(wanted[static_cast<size_t>(token)], 0) << token << " x " << count;
  expect_fits(counts, wanted, 20000);
}

// Streams of neighbouring seeds are no shifted copies of each other: neither (seed 1, token 1) = (seed 2, token 0) nor
// the like further away.
TEST(Sampler, SeedsAreNotShiftedByAnIndex) {
  std::map<double, std::pair<uint64_t, int64_t>> seen;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    for (int64_t index = 0; index < 256; ++index) {
      const auto [at, fresh] = seen.emplace(ops::draw_at(seed, index), std::pair(seed, index));
      EXPECT_TRUE(fresh) << "seed " << seed << " token " << index << " = seed " << at->second.first << " token "
                         << at->second.second;
    }
  }
  for (const uint64_t step : {uint64_t{1}, uint64_t{0x9e3779b97f4a7c15ull}}) {
    for (int64_t index = 0; index < 100; ++index) {
      EXPECT_NE(ops::draw_at(1 + step, index), ops::draw_at(1, index + 1));
    }
  }
  // Nor does the sampler make such copies of what it is given.
  const std::vector<float> logits = random_logits(6, 1000, 1.0);
  Sampler sampler(1000);
  std::vector<float> row;
  int same = 0;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    row = logits;
    const int32_t token = choose(sampler, row, request_with({}), kNoHistory, seed, 1).token;
    row = logits;
    same += choose(sampler, row, request_with({}), kNoHistory, seed + 1, 0).token == token ? 1 : 0;
  }
  EXPECT_LT(same, 10);
}

TEST(Sampler, MasksShapeTheDistribution) {
  const std::vector<float> logits = random_logits(9, 70, 1.0);
  Request request = request_with({});
  request.mask = {0xf0f0f0f1u, 0x00000000u, 0xffffffffu};
  request.too_early = {0, 5};
  request.defined_tokens = 68;
  bool borderline = false;
  const auto wanted = expected_distribution(logits, request, kNoHistory, borderline);
  EXPECT_EQ(wanted[40], 0);
  expect_fits(draw_many(logits, request, kNoHistory, 40000), wanted, 40000);
  request.mask.assign(3, 0);
  Sampler sampler(70);
  std::vector<float> row = logits;
  EXPECT_THROW(choose(sampler, row, request, kNoHistory, 1, 0), Error);
}

TEST(Sampler, LogprobsOfAGivenTokenLeaveTheLogitsAlone) {
  const std::vector<float> logits = random_logits(10, 50, 2.0);
  double total = 0;
  for (size_t i = 0; i < 48; ++i) total += std::exp(static_cast<double>(logits[i]));
  Sampler sampler(50);
  const auto found = sampler.logprobs(logits, 48, 7, 3);
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].token, 7);
  for (const TokenLogprob& entry : found) {
    EXPECT_LT(entry.token, 48);
    EXPECT_NEAR(entry.logprob, logits[static_cast<size_t>(entry.token)] - std::log(total), 1e-5);
  }
  EXPECT_GE(found[1].logprob, found[2].logprob);
}

// The largest vocabulary of the model family: choosing must not show beside a model step. Generous limits (the machine
// may be busy); printed, so that the figures can be read.
TEST(Sampler, IsFastOnALargeVocabulary) {
  constexpr size_t kVocabulary = 248320;
  const std::vector<float> logits = random_logits(8, kVocabulary, 2.5);
  Sampler sampler(kVocabulary);
  std::vector<SamplingParams> cases(5);
  cases[0].temperature = 0;
  cases[2].top_k = 20;
  cases[2].top_p = 0.95f;
  cases[3].top_p = 0.95f;
  cases[4].top_p = 0.95f;
  cases[4].logprobs = 5;
  const char* names[] = {"greedy", "plain", "top_k 20, top_p 0.95", "top_p 0.95", "top_p 0.95, logprobs"};
  for (size_t i = 0; i < cases.size(); ++i) {
    double best = 1e9;
    for (int64_t repeat = 0; repeat < 10; ++repeat) {
      std::vector<float> row = logits;
      const auto begin = std::chrono::steady_clock::now();
      choose(sampler, row, request_with(cases[i]), kNoHistory, 1, repeat);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    std::printf("%-24s %.3f ms\n", names[i], 1e3 * best);
    RecordProperty(names[i], std::to_string(1e3 * best));
    EXPECT_LT(best, 0.2) << names[i];
  }
}

}  // namespace
}  // namespace fourfold::cpu
