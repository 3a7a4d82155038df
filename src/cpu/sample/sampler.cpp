#include "cpu/sample/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "cpu/simd/exp.h"

namespace fourfold::cpu {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

constexpr float kLowestExponent = -88.0f;

// Without branches, so that the compiler vectorises loops over it (the caller clamps in a loop of its own, or GCC
// specialises the clamped case and does not): std::exp over a vocabulary of 248320 would take longer than a
// millisecond.
inline float exp_clamped(float x) { return exp_in_range(Scalar{x}).v; }

// The largest logit; `finite` becomes false when one is NaN or infinite. Eight lanes, so that the loop vectorises.
float largest_of(std::span<const float> logits, bool& finite) {
  float lane_max[8];
  int32_t lane_bad[8];
  std::fill(lane_max, lane_max + 8, kMasked);
  std::fill(lane_bad, lane_bad + 8, 0);
  const size_t whole = logits.size() / 8 * 8;
  for (size_t i = 0; i < whole; i += 8) {
    for (size_t j = 0; j < 8; ++j) {
      const float x = logits[i + j];
      lane_max[j] = x > lane_max[j] ? x : lane_max[j];
      lane_bad[j] |= (std::bit_cast<int32_t>(x) & 0x7f800000) == 0x7f800000 ? 1 : 0;
    }
  }
  for (size_t i = whole; i < logits.size(); ++i) {
    lane_max[0] = std::max(lane_max[0], logits[i]);
    lane_bad[0] |= !std::isfinite(logits[i]);
  }
  finite = std::all_of(lane_bad, lane_bad + 8, [](int32_t bad) { return bad == 0; });
  return *std::max_element(lane_max, lane_max + 8);
}

constexpr size_t kBlock = 256;

// Buckets of weights (at most 1) by the leading bits of their binary form.
constexpr int kBucketShift = 16;  // keeps the exponent and 7 bits of the fraction
constexpr size_t kBuckets = (std::bit_cast<uint32_t>(1.0f) >> kBucketShift) + 1;

// The sum of at most kBlock weights; lanes, so that the loop vectorises.
double sum_of_block(const float* weights, size_t count) {
  float lanes[16] = {};
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (size_t j = 0; j < 16; ++j) lanes[j] += weights[i + j];
  }
  double sum = 0;
  for (; i < count; ++i) sum += static_cast<double>(weights[i]);
  for (const float lane : lanes) sum += static_cast<double>(lane);
  return sum;
}

float clamp_finite(float x) {
  constexpr float kLimit = std::numeric_limits<float>::max();
  return std::clamp(x, -kLimit, kLimit);
}

void apply_penalties(std::span<float> logits, const ops::SamplingParams& params, std::span<const int32_t> counts) {
  for (size_t token = 0; token < logits.size(); ++token) {
    if (counts[token] == 0 || logits[token] == kMasked) continue;
    float logit = logits[token];
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    if (counts[token] > 1) {
      logit -= params.presence_penalty + params.frequency_penalty * static_cast<float>(counts[token] - 1);
    }
    logits[token] = clamp_finite(logit);
  }
}

void apply_mask(std::span<float> logits, std::span<const uint32_t> mask) {
  FF_ASSERT(mask.size() * 32 >= logits.size());
  for (size_t word = 0; word * 32 < logits.size(); ++word) {
    const uint32_t bits = mask[word];
    if (bits == ~uint32_t{0}) continue;
    const size_t end = std::min(word * 32 + 32, logits.size());
    for (size_t token = word * 32; token < end; ++token) {
      if ((bits >> (token % 32) & 1) == 0) logits[token] = kMasked;
    }
  }
}

template <typename T>
std::span<T> defined(std::span<T> logits, int32_t count) {
  return count > 0 ? logits.first(static_cast<size_t>(count)) : logits;
}

float finite_largest(std::span<const float> logits) {
  bool finite = true;
  const float largest = largest_of(logits, finite);
  if (!finite) {
    const auto bad = std::find_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); });
    fail("the model's logit of token {} is {}, wanted finite numbers", bad - logits.begin(), *bad);
  }
  return largest;
}

}  // namespace

Sampler::Sampler(int64_t vocabulary) : vocabulary_(vocabulary), weights_(static_cast<size_t>(vocabulary)) {
  candidates_.reserve(static_cast<size_t>(vocabulary));
  histogram_.reserve(kBuckets);
  block_sums_.reserve(weights_.size() / kBlock + 1);
}

void Sampler::add_most_probable(std::span<const float> logits, float largest, double log_total, int32_t count,
                                std::vector<ops::TokenLogprob>& out) {
  if (count == 0) return;
  select_largest(logits, std::min<int64_t>(count, static_cast<int64_t>(logits.size())), candidates_);
  std::sort(candidates_.begin(), candidates_.end(), better);
  for (const Candidate& candidate : candidates_) {
    out.push_back({candidate.token, static_cast<float>(candidate.value - largest - log_total)});
  }
}

std::vector<ops::TokenLogprob> Sampler::logprobs(std::span<const float> logits, int32_t defined_tokens, int32_t token,
                                                 int32_t count) {
  FF_ASSERT(token >= 0 && static_cast<int64_t>(token) < vocabulary_);
  const float chosen = logits[static_cast<size_t>(token)];
  logits = defined(logits, defined_tokens);
  const float largest = finite_largest(logits);
  const double log_total = std::log(exponentiate(logits, largest, 1.0f));
  std::vector<ops::TokenLogprob> result{{token, static_cast<float>(chosen - largest - log_total)}};
  add_most_probable(logits, largest, log_total, count, result);
  return result;
}

int32_t Sampler::most_probable(std::span<const float> logits, int32_t defined_tokens) {
  logits = defined(logits, defined_tokens);
  bool finite = true;
  const float largest = largest_of(logits, finite);
  const auto found = std::find(logits.begin(), logits.end(), largest);
  return found == logits.end() ? 0 : static_cast<int32_t>(found - logits.begin());
}

Chosen Sampler::choose(std::span<float> logits, const Choice& choice) {
  FF_ASSERT(static_cast<int64_t>(logits.size()) == vocabulary_);
  const ops::SamplingParams& params = choice.params;
  if (choice.given >= 0) {
    return {choice.given, logprobs(logits, choice.defined_tokens, choice.given, params.logprobs)};
  }
  logits = defined(logits, choice.defined_tokens);
  const auto n = static_cast<int64_t>(logits.size());
  float largest = finite_largest(logits);

  Chosen result;
  const float raw_largest = largest;
  double log_total = 0;
  if (params.logprobs >= 0) {
    raw_.assign(logits.begin(), logits.end());
    log_total = std::log(exponentiate(logits, largest, 1.0f));
    result.logprobs.emplace_back();  // of the chosen token, filled in by finish()
    add_most_probable(logits, largest, log_total, params.logprobs, result.logprobs);
  }
  const auto finish = [&](int32_t token) {
    result.token = token;
    if (params.logprobs >= 0) {
      result.logprobs[0] = {token, static_cast<float>(raw_[static_cast<size_t>(token)] - raw_largest - log_total)};
    }
    return std::move(result);
  };

  bool changed = false;
  for (const auto& [token, bias] : params.logit_bias) {
    if (token < n) logits[static_cast<size_t>(token)] = clamp_finite(logits[static_cast<size_t>(token)] + bias);
    changed = true;
  }
  for (const std::span<const int32_t> tokens : {choice.banned, choice.too_early}) {
    for (const int32_t token : tokens) {
      if (token < n) logits[static_cast<size_t>(token)] = kMasked;
      changed = true;
    }
  }
  if (!choice.mask.empty()) {
    apply_mask(logits, choice.mask);
    changed = true;
  }
  if (!choice.counts.empty()) {
    apply_penalties(logits, params, choice.counts);
    changed = true;
  }
  if (changed) {
    bool finite = true;
    largest = largest_of(logits, finite);
    if (largest == kMasked) fail("no token may be chosen: all {} defined tokens are masked", n);
  }

  if (params.temperature == 0.0f) {
    return finish(static_cast<int32_t>(std::find(logits.begin(), logits.end(), largest) - logits.begin()));
  }
  // A temperature below 1e-30 is as good as greedy, and its inverse stays finite.
  const float inverse_temperature = 1.0f / std::max(params.temperature, 1e-30f);
  const double uniform = ops::draw_at(choice.seed, choice.index);
  const bool has_top_k = params.top_k > 0 && params.top_k < n;
  const bool has_top_p = params.top_p < 1.0f;

  if (!has_top_k) {
    const double total = exponentiate(logits, largest, inverse_temperature);
    if (has_top_p) mask_outside_nucleus(n, static_cast<double>(params.top_p), total);
    if (params.min_p > 0) {
      for (size_t i = 0; i < logits.size(); ++i) weights_[i] = weights_[i] >= params.min_p ? weights_[i] : 0.0f;
    }
    return finish(static_cast<int32_t>(draw(logits.size(), uniform)));
  }

  select_largest(logits, params.top_k, candidates_);
  double total = 0;
  for (Candidate& candidate : candidates_) {
    candidate.value = exp_clamped(std::max((candidate.value - largest) * inverse_temperature, kLowestExponent));
    total += static_cast<double>(candidate.value);
  }
  if (has_top_p) keep_nucleus(candidates_, static_cast<double>(params.top_p) * total);
  // By id, so that the draw does not depend on how the candidates were found.
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  for (size_t i = 0; i < candidates_.size(); ++i) {
    weights_[i] = candidates_[i].value >= params.min_p ? candidates_[i].value : 0.0f;
  }
  return finish(candidates_[draw(candidates_.size(), uniform)].token);
}

// weights_[i] = exp((logits[i] - largest) x inverse_temperature); returns their sum. The differences are at most 0, so
// nothing overflows, whatever the temperature.
double Sampler::exponentiate(std::span<const float> logits, float largest, float inverse_temperature) {
  double total = 0;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const size_t count = std::min(kBlock, logits.size() - begin);
    const float* in = logits.data() + begin;
    float* out = weights_.data() + begin;
    for (size_t i = 0; i < count; ++i) {
      const float x = (in[i] - largest) * inverse_temperature;
      out[i] = x > kLowestExponent ? x : kLowestExponent;
    }
    for (size_t i = 0; i < count; ++i) out[i] = exp_clamped(out[i]);
    total += sum_of_block(out, count);
  }
  return total;
}

// The `count` best logits, in no particular order (masked ones are never among them). One pass with a rising threshold:
// a buffer of a few times `count` is cut back to the best whenever it is full.
void Sampler::select_largest(std::span<const float> logits, int64_t count, std::vector<Candidate>& out) const {
  const size_t wanted = static_cast<size_t>(count);
  const size_t capacity = std::max<size_t>(4 * wanted, 256);
  out.clear();
  float threshold = kMasked;  // only logits above it can still be among the best: ids ascend, so a tie loses
  const auto cut = [&] {
    if (out.size() <= wanted) return;
    std::nth_element(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(wanted) - 1, out.end(), better);
    out.resize(wanted);
    threshold = out.back().value;
  };
  constexpr size_t kStride = 32;
  for (size_t begin = 0; begin < logits.size(); begin += kStride) {
    const size_t end = std::min(begin + kStride, logits.size());
    int32_t above = 0;
    for (size_t i = begin; i < end; ++i) above += logits[i] > threshold ? 1 : 0;
    if (above == 0) continue;
    for (size_t i = begin; i < end; ++i) {
      if (logits[i] > threshold) out.push_back({logits[i], static_cast<int32_t>(i)});
    }
    if (out.size() >= capacity) cut();
  }
  cut();
}

// Sets weights outside the nucleus to 0: outside the shortest prefix, in descending order, that holds top_p of `total`.
// A histogram of the weights by the leading bits of their binary form, which ascend with the weight, tells where the
// prefix ends; only the bucket it ends in is looked at more closely. No sort of the vocabulary.
void Sampler::mask_outside_nucleus(int64_t n, double top_p, double total) {
  const auto bucket_of = [](float weight) { return std::bit_cast<uint32_t>(weight) >> kBucketShift; };
  histogram_.assign(kBuckets, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    histogram_[std::min<size_t>(bucket_of(weights_[i]), kBuckets - 1)] += static_cast<double>(weights_[i]);
  }
  const double target = top_p * total;
  double above = 0;
  size_t end = kBuckets - 1;  // the bucket that the prefix ends in
  while (end > 0 && above + histogram_[end] < target) above += histogram_[end--];
  candidates_.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (bucket_of(weights_[i]) == end) candidates_.push_back({weights_[i], static_cast<int32_t>(i)});
  }
  const float inside = std::bit_cast<float>(static_cast<uint32_t>(end + 1) << kBucketShift);
  for (int64_t i = 0; i < n; ++i) weights_[i] = weights_[i] >= inside ? weights_[i] : 0.0f;
  if (candidates_.empty()) return;
  keep_nucleus(candidates_, target - above);
  for (const Candidate& candidate : candidates_) weights_[candidate.token] = candidate.value;
}

// Cuts `candidates` (whose values are weights) down to the shortest prefix, in descending order, that sums to `target`
// or more; at least one is kept. By halving: what the better half sums to decides which half holds the end. Linear.
void Sampler::keep_nucleus(std::vector<Candidate>& candidates, double target) {
  const auto at = [&](size_t i) { return candidates.begin() + static_cast<std::ptrdiff_t>(i); };
  size_t low = 0, high = candidates.size();
  double before = 0;  // candidates [0, low), all better than the rest
  while (high - low > 32) {
    const size_t middle = (low + high) / 2;
    std::nth_element(at(low), at(middle), at(high), better);
    double upper = 0;
    for (size_t i = low; i < middle; ++i) upper += static_cast<double>(candidates[i].value);
    if (before + upper >= target) {
      high = middle;
    } else {
      before += upper;
      low = middle;
    }
  }
  std::sort(at(low), at(high), better);
  size_t end = low;
  while (end < high && (before < target || end == 0)) before += static_cast<double>(candidates[end++].value);
  candidates.resize(std::max<size_t>(end, 1));
}

// The first of `count` weights at which the cumulative weight exceeds uniform x total. Never one of weight 0.
size_t Sampler::draw(size_t count, double uniform) {
  const std::span<const float> weights = std::span(weights_).first(count);
  block_sums_.clear();
  double total = 0;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    block_sums_.push_back(sum_of_block(weights.data() + begin, std::min(kBlock, count - begin)));
    total += block_sums_.back();
  }
  double left = uniform * total;
  size_t last = count;  // the last one with any weight, for when rounding carries us past the end
  for (size_t block = 0; block < block_sums_.size(); ++block) {
    const double sum = block_sums_[block];
    if (sum <= 0) continue;
    if (left >= sum && block + 1 < block_sums_.size()) {
      left -= sum;
      last = block * kBlock;
      continue;
    }
    for (size_t i = block * kBlock; i < std::min((block + 1) * kBlock, count); ++i) {
      if (weights[i] <= 0) continue;
      if (left < static_cast<double>(weights[i])) return i;
      left -= static_cast<double>(weights[i]);
      last = i;
    }
  }
  FF_ASSERT(last < count);
  size_t found = count;
  for (size_t i = last; i < count; ++i) {
    if (weights[i] > 0) found = i;
  }
  FF_ASSERT(found < count);
  return found;
}

}  // namespace fourfold::cpu
