#include "engine/request.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <span>
#include <string_view>

#include "base/random.h"

namespace fourfold::engine {
namespace {

constexpr size_t kMaxStopTokens = 256;
constexpr size_t kMaxBoundaries = 1024;
constexpr size_t kMaxSalt = 1024;
constexpr float kMaxBias = 100.0f;

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Refused(Refusal::kInvalid, fmt::format(format, std::forward<Args>(args)...));
}

// `open_low`: the lower limit itself is not allowed; `open_high` likewise.
void check_range(std::string_view field, float value, float low, bool open_low, float high, bool open_high) {
  const bool ok = (open_low ? value > low : value >= low) && (open_high ? value < high : value <= high);
  if (!ok) {
    refuse("request: {} is {}, wanted {}{}, {}{}", field, value, open_low ? "(" : "[", low, high,
           open_high ? ")" : "]");
  }
}

void check_ids(std::string_view field, std::span<const int32_t> ids, int64_t vocabulary) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary) {
      refuse("request: {}[{}] is {}, wanted a token id in [0, {})", field, i, ids[i], vocabulary);
    }
  }
}

}  // namespace

void check_request(const Request& request, const RequestLimits& limits) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) refuse("request: prompt is empty, wanted at least one token");
  if (prompt >= limits.max_context) {
    throw Refused(
        Refusal::kTooLong,
        fmt::format(
            "request: prompt has {} tokens, wanted at most {} (a context of {} and at least one token of output)",
            prompt, limits.max_context - 1, limits.max_context));
  }
  check_ids("prompt", request.prompt, limits.vocabulary);
  if (request.max_tokens < 1) refuse("request: max_tokens is {}, wanted at least 1", request.max_tokens);
  if (request.min_tokens < 0 || request.min_tokens > request.max_tokens) {
    refuse("request: min_tokens is {}, wanted 0 to {} (max_tokens)", request.min_tokens, request.max_tokens);
  }
  if (request.stop_tokens.size() > kMaxStopTokens) {
    refuse("request: stop_tokens has {} entries, wanted at most {}", request.stop_tokens.size(), kMaxStopTokens);
  }
  check_ids("stop_tokens", request.stop_tokens, limits.vocabulary);
  const size_t vocabulary = static_cast<size_t>(limits.vocabulary);
  if (request.banned_tokens.size() > vocabulary) {
    refuse("request: banned_tokens has {} entries, wanted at most {}", request.banned_tokens.size(), vocabulary);
  }
  check_ids("banned_tokens", request.banned_tokens, limits.vocabulary);
  if (request.defined_tokens < 0 || request.defined_tokens > limits.vocabulary) {
    refuse("request: defined_tokens is {}, wanted [0, {}]", request.defined_tokens, limits.vocabulary);
  }

  const SamplingParams& sampling = request.sampling;
  check_range("temperature", sampling.temperature, 0, false, 10, false);
  if (sampling.top_k < 0) refuse("request: top_k is {}, wanted 0 (off) or more", sampling.top_k);
  check_range("top_p", sampling.top_p, 0, true, 1, false);
  check_range("min_p", sampling.min_p, 0, false, 1, true);
  check_range("repetition_penalty", sampling.repetition_penalty, 0, true, 10, false);
  check_range("presence_penalty", sampling.presence_penalty, -10, false, 10, false);
  check_range("frequency_penalty", sampling.frequency_penalty, -10, false, 10, false);
  if (sampling.logit_bias.size() > vocabulary) {
    refuse("request: logit_bias has {} entries, wanted at most {}", sampling.logit_bias.size(), vocabulary);
  }
  for (const auto& [token, bias] : sampling.logit_bias) {
    if (token < 0 || token >= limits.vocabulary) {
      refuse("request: logit_bias has token {}, wanted a token id in [0, {})", token, limits.vocabulary);
    }
    check_range("logit_bias", bias, -kMaxBias, false, kMaxBias, false);
  }
  if (sampling.logprobs < -1 || sampling.logprobs > ops::kMaxLogprobs) {
    refuse("request: logprobs is {}, wanted -1 (off) to {}", sampling.logprobs, ops::kMaxLogprobs);
  }
  if (request.prompt_logprobs < -1 || request.prompt_logprobs > ops::kMaxLogprobs) {
    refuse("request: prompt_logprobs is {}, wanted -1 (off) to {}", request.prompt_logprobs, ops::kMaxLogprobs);
  }
  if (request.drafts < -1 || request.drafts > limits.drafts) {
    refuse("request: drafts is {}, wanted -1 (as the engine) to {}", request.drafts, limits.drafts);
  }
  const CacheHints& cache = request.cache;
  if (cache.boundaries.size() > kMaxBoundaries) {
    refuse("request: cache.boundaries has {} entries, wanted at most {}", cache.boundaries.size(), kMaxBoundaries);
  }
  for (size_t i = 0; i < cache.boundaries.size(); ++i) {
    const int64_t low = i == 0 ? 0 : cache.boundaries[i - 1];
    if (cache.boundaries[i] < low || cache.boundaries[i] > prompt) {
      refuse("request: cache.boundaries[{}] is {}, wanted {} to {} (ascending, within the prompt)", i,
             cache.boundaries[i], low, prompt);
    }
  }
  if (cache.salt.size() > kMaxSalt) {
    refuse("request: cache.salt has {} bytes, wanted at most {}", cache.salt.size(), kMaxSalt);
  }
}

uint64_t fresh_seed() {
  static std::atomic<uint64_t> counter{[] {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32) ^ device();
  }()};
  return Random(counter.fetch_add(1)).next();
}

Active::Active(uint64_t request_id, Request r, uint64_t draw_seed, int64_t max_context, std::shared_ptr<Channel> c)
    : id(request_id),
      request(std::move(r)),
      prompt_tokens(static_cast<int64_t>(request.prompt.size())),
      max_output(std::min(request.max_tokens, max_context - prompt_tokens)),
      seed(draw_seed),
      tokens(std::move(request.prompt)),
      channel(std::move(c)),
      submitted(Clock::now()) {}

}  // namespace fourfold::engine
