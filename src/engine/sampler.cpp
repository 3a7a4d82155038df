#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/random.h"

namespace fourfold::engine {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

constexpr float kLowestExponent = -88.0f;

// exp(x) for -88 <= x <= 0 within 2 units in the last place, 0 where the result would be denormal (below about -87.7).
// Without branches, so that the compiler vectorises loops over it (the caller clamps in a loop of its own, or GCC
// specialises the clamped case and does not): std::exp over a vocabulary of 248320 would take longer than a
// millisecond.
inline float exp_clamped(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 x 2^23 rounds to an integer and leaves it in the low bits.
  const float shifted = x * 1.44269504f + 12582912.0f;
  const int32_t n = std::bit_cast<int32_t>(shifted) - 0x4B400000;
  const float integral = shifted - 12582912.0f;
  const float r = (x - integral * 0.693359375f) + integral * 2.12194440e-4f;
  // Taylor to degree 7: the remainder is below 1e-8 relative.
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((n + 127) << 23);  // n = -127 makes the factor 0
}

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

// Number `index` of the stream of Random(seed): SplitMix64 can be entered anywhere.
double uniform_at(uint64_t seed, int64_t index) {
  return Random(seed + 0x9e3779b97f4a7c15ull * static_cast<uint64_t>(index)).uniform();
}

float clamp_finite(float x) {
  constexpr float kLimit = std::numeric_limits<float>::max();
  return std::clamp(x, -kLimit, kLimit);
}

void apply_penalties(std::span<float> logits, const SamplingParams& params, const TokenHistory& history) {
  for (const auto& [token, occurrences] : history.seen()) {
    if (token < 0 || static_cast<size_t>(token) >= logits.size() || logits[token] == kMasked) continue;
    float logit = logits[token];
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    if (occurrences > 0) {
      logit -= params.presence_penalty + params.frequency_penalty * static_cast<float>(occurrences);
    }
    logits[token] = clamp_finite(logit);
  }
}

}  // namespace

TokenHistory::TokenHistory(std::span<const int32_t> prompt, bool needed) : needed_(needed) {
  if (!needed_) return;
  for (const int32_t token : prompt) seen_.emplace(token, 0);
}

bool TokenHistory::needed_by(const SamplingParams& params) {
  return params.repetition_penalty != 1.0f || params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f;
}

void TokenHistory::add_output(int32_t token) {
  if (needed_) ++seen_[token];
}

Sampler::Sampler(int64_t vocabulary) : vocabulary_(vocabulary), weights_(static_cast<size_t>(vocabulary)) {}

Sampled Sampler::sample(std::span<float> logits, const Request& request, const TokenHistory& history, uint64_t seed,
                        int64_t index) {
  FF_ASSERT(static_cast<int64_t>(logits.size()) == vocabulary_);
  const SamplingParams& params = request.sampling;
  if (request.defined_tokens > 0) logits = logits.first(static_cast<size_t>(request.defined_tokens));
  const int64_t n = static_cast<int64_t>(logits.size());

  bool finite = true;
  float largest = largest_of(logits, finite);
  if (!finite) {
    const auto bad = std::find_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); });
    fail("the model's logit of token {} is {}, wanted finite numbers", bad - logits.begin(), *bad);
  }

  Sampled result;
  double log_total = 0;
  const float raw_largest = largest;
  if (params.logprobs >= 0) {
    raw_.assign(logits.begin(), logits.end());
    log_total = std::log(exponentiate(logits, largest, 1.0f));
    if (params.logprobs > 0) {
      select_largest(logits, std::min<int64_t>(params.logprobs, n), candidates_);
      std::sort(candidates_.begin(), candidates_.end(), better);
    } else {
      candidates_.clear();
    }
    result.logprobs.emplace_back();  // of the chosen token, filled in by finish()
    for (const Candidate& candidate : candidates_) {
      result.logprobs.push_back({candidate.token, static_cast<float>(candidate.value - largest - log_total)});
    }
  }
  const auto finish = [&](int32_t token) {
    result.token = token;
    if (params.logprobs >= 0) {
      result.logprobs[0] = {token, static_cast<float>(raw_[token] - raw_largest - log_total)};
    }
    return std::move(result);
  };

  bool changed = false;
  for (const auto& [token, bias] : params.logit_bias) {
    if (token < n) logits[token] = clamp_finite(logits[token] + bias);
    changed = true;
  }
  for (const int32_t token : request.banned_tokens) {
    if (token < n) logits[token] = kMasked;
    changed = true;
  }
  if (!history.seen().empty()) {
    apply_penalties(logits, params, history);
    changed = true;
  }
  if (changed) {
    largest = largest_of(logits, finite);
    if (largest == kMasked) fail("no token may be sampled: all {} defined tokens are banned", n);
  }

  if (params.temperature == 0.0f) {
    return finish(static_cast<int32_t>(std::find(logits.begin(), logits.end(), largest) - logits.begin()));
  }
  // A temperature below 1e-30 is as good as greedy, and its inverse stays finite.
  const float inverse_temperature = 1.0f / std::max(params.temperature, 1e-30f);
  const double uniform = uniform_at(seed, index);
  const bool has_top_k = params.top_k > 0 && params.top_k < n;
  const bool has_top_p = params.top_p < 1.0f;

  if (!has_top_k) {
    const double total = exponentiate(logits, largest, inverse_temperature);
    if (has_top_p) mask_outside_nucleus(n, static_cast<double>(params.top_p), total);
    if (params.min_p > 0) {
      for (int64_t i = 0; i < n; ++i) weights_[i] = weights_[i] >= params.min_p ? weights_[i] : 0.0f;
    }
    return finish(static_cast<int32_t>(draw(static_cast<size_t>(n), uniform)));
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
  constexpr int kShift = 16;  // keeps the exponent and 7 bits of the fraction
  const auto bucket_of = [](float weight) { return std::bit_cast<uint32_t>(weight) >> kShift; };
  constexpr size_t kBuckets = (std::bit_cast<uint32_t>(1.0f) >> kShift) + 1;  // weights are at most 1
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
  const float inside = std::bit_cast<float>(static_cast<uint32_t>(end + 1) << kShift);
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

}  // namespace fourfold::engine
