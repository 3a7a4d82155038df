#include "engine/request.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <span>
#include <string_view>

#include "base/check.h"
#include "base/random.h"

namespace fourfold::engine {
namespace {

constexpr size_t kMaxStopTokens = 256;
constexpr int32_t kMaxLogprobs = 20;
constexpr float kMaxBias = 100.0f;

// `open_low`: the lower limit itself is not allowed; `open_high` likewise.
void check_range(std::string_view field, float value, float low, bool open_low, float high, bool open_high) {
  const bool ok = (open_low ? value > low : value >= low) && (open_high ? value < high : value <= high);
  if (!ok) {
    fail("request: {} is {}, wanted {}{}, {}{}", field, value, open_low ? "(" : "[", low, high, open_high ? ")" : "]");
  }
}

void check_ids(std::string_view field, std::span<const int32_t> ids, int64_t vocabulary) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary) {
      fail("request: {}[{}] is {}, wanted a token id in [0, {})", field, i, ids[i], vocabulary);
    }
  }
}

uint64_t fresh_seed() {
  static std::atomic<uint64_t> counter{[] {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32) ^ device();
  }()};
  return Random(counter.fetch_add(1)).next();
}

}  // namespace

void check_request(const Request& request, const RequestLimits& limits) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) fail("request: prompt is empty, wanted at least one token");
  if (prompt >= limits.max_context) {
    fail("request: prompt has {} tokens, wanted at most {} (a context of {} and at least one token of output)", prompt,
         limits.max_context - 1, limits.max_context);
  }
  check_ids("prompt", request.prompt, limits.vocabulary);
  if (request.max_tokens < 1) fail("request: max_tokens is {}, wanted at least 1", request.max_tokens);
  if (request.stop_tokens.size() > kMaxStopTokens) {
    fail("request: stop_tokens has {} entries, wanted at most {}", request.stop_tokens.size(), kMaxStopTokens);
  }
  check_ids("stop_tokens", request.stop_tokens, limits.vocabulary);
  const size_t vocabulary = static_cast<size_t>(limits.vocabulary);
  if (request.banned_tokens.size() > vocabulary) {
    fail("request: banned_tokens has {} entries, wanted at most {}", request.banned_tokens.size(), vocabulary);
  }
  check_ids("banned_tokens", request.banned_tokens, limits.vocabulary);
  if (request.defined_tokens < 0 || request.defined_tokens > limits.vocabulary) {
    fail("request: defined_tokens is {}, wanted [0, {}]", request.defined_tokens, limits.vocabulary);
  }

  const SamplingParams& sampling = request.sampling;
  check_range("temperature", sampling.temperature, 0, false, 10, false);
  if (sampling.top_k < 0) fail("request: top_k is {}, wanted 0 (off) or more", sampling.top_k);
  check_range("top_p", sampling.top_p, 0, true, 1, false);
  check_range("min_p", sampling.min_p, 0, false, 1, true);
  check_range("repetition_penalty", sampling.repetition_penalty, 0, true, 10, false);
  check_range("presence_penalty", sampling.presence_penalty, -10, false, 10, false);
  check_range("frequency_penalty", sampling.frequency_penalty, -10, false, 10, false);
  if (sampling.logit_bias.size() > vocabulary) {
    fail("request: logit_bias has {} entries, wanted at most {}", sampling.logit_bias.size(), vocabulary);
  }
  for (const auto& [token, bias] : sampling.logit_bias) {
    if (token < 0 || token >= limits.vocabulary) {
      fail("request: logit_bias has token {}, wanted a token id in [0, {})", token, limits.vocabulary);
    }
    check_range("logit_bias", bias, -kMaxBias, false, kMaxBias, false);
  }
  if (sampling.logprobs < -1 || sampling.logprobs > kMaxLogprobs) {
    fail("request: logprobs is {}, wanted -1 (off) to {}", sampling.logprobs, kMaxLogprobs);
  }
}

Active::Active(uint64_t request_id, Request r, int64_t max_context, std::shared_ptr<Channel> c)
    : id(request_id),
      request(std::move(r)),
      prompt_tokens(static_cast<int64_t>(request.prompt.size())),
      max_output(std::min(request.max_tokens, max_context - prompt_tokens)),
      seed(request.sampling.seed ? *request.sampling.seed : fresh_seed()),
      tokens(std::move(request.prompt)),
      history(tokens, TokenHistory::needed_by(request.sampling)),
      channel(std::move(c)),
      submitted(Clock::now()) {}

}  // namespace fourfold::engine
