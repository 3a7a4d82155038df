// A request inside the engine: its limits, and its state while it waits and runs. Only the engine thread touches an
// Active request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/sampler.h"
#include "engine/stream.h"

namespace fourfold::engine {

struct RequestLimits {
  int64_t vocabulary = 0;
  int64_t max_context = 0;
};

// An Error that names the field, the value and the limits.
void check_request(const Request& request, const RequestLimits& limits);

using Clock = std::chrono::steady_clock;

struct Active {
  Active(uint64_t id, Request request, int64_t max_context, std::shared_ptr<Channel> channel);

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t output_tokens() const { return length() - prompt_tokens; }
  // Tokens that have no place in the caches yet. At least 1 while the request runs: the newest token is fed with the
  // next step. One is a decode step; more are a prompt, or a preempted request that is computed again.
  int64_t pending() const { return length() - cached; }

  const uint64_t id;  // ascending in the order of submission: the age that scheduling goes by
  Request request;    // without the prompt, which moved to `tokens`
  const int64_t prompt_tokens;
  const int64_t max_output;  // max_tokens, cut to the context
  const uint64_t seed;
  std::vector<int32_t> tokens;  // prompt and output
  TokenHistory history;
  std::shared_ptr<Channel> channel;

  int64_t cached = 0;          // positions [0, cached) are in the caches
  std::vector<int32_t> pages;  // of the key/value cache; empty while waiting
  int32_t slot = -1;           // of recurrent state; -1 while waiting

  bool started = false;  // was part of a step
  Clock::time_point submitted, first_step, first_token, last_token;
};

}  // namespace fourfold::engine
