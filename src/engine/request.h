// A request inside the engine: its limits, and its state while it waits and runs. Only the engine thread touches an
// Active request.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/draft_lists.h"
#include "engine/draft_policy.h"
#include "engine/engine.h"
#include "engine/prefix_policy.h"
#include "engine/stream.h"

namespace fourfold::engine {

struct RequestLimits {
  int64_t vocabulary = 0;
  int64_t max_context = 0;
  int32_t drafts = 0;  // the most that the engine was made for
};

// Refused (kInvalid, kTooLong) with a message that names the field, the value and the limits.
void check_request(const Request& request, const RequestLimits& limits);

using Clock = std::chrono::steady_clock;

// What a request has of the caches, and how far the steps are with it. What they make of it is known one step late, so
// there are two books: what the last settled step said, and what was launched since.
struct Lane {
  int32_t index = -1;          // of the stepper; -1: the request has no lane
  std::vector<int32_t> pages;  // hold positions from 0 on; the first may be shared, and then are full
  int64_t sent_pages = 0;      // of them the stepper knows
  std::vector<int32_t>
      slots;               // of recurrent state: the state is in the first while the prompt is computed, later in any
  int32_t hit_state = -1;  // the cached state that the first chunk reads
  int32_t hit_page = -1;   // the cached page that is copied before it

  std::vector<Boundary> boundaries;  // where the prompt's chunks end because the state is kept; ascending
  size_t next_boundary = 0;          // the first beyond `fed`
  int64_t dropped_boundary = -1;     // no slot was left to keep this one's state

  bool begun = false;        // a step was launched that starts the lane
  bool feeds = false;        // the drafter's caches are kept up to date
  int64_t fed = 0;           // tokens that the host gave, or the prefix cache: at positions [0, fed)
  int64_t target = 0;        // of `fed`: what was known when the lane began
  bool going = false;        // all were given: the lane goes on with what it chooses
  int32_t asked_drafts = 0;  // of the last launched step

  int64_t position = 0;  // tokens in the caches, and the slot of the state there, as the last settled step said
  int32_t state = -1;
  bool ended = false;   // nothing that was launched for it changes anything any more
  int64_t flights = 0;  // launched since: steps, their rows, and how many of them choose tokens
  int64_t rows = 0;
  int64_t choices = 0;
};

struct Active {
  Active(uint64_t id, Request request, uint64_t seed, int64_t max_context, std::shared_ptr<Channel> channel);

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  // Chosen tokens, those that are not delivered any more (the request is over, a step was under way) included.
  int64_t output_tokens() const { return length() - prompt_tokens; }
  // The most positions it takes: its last token is never fed.
  int64_t positions() const { return prompt_tokens + max_output - 1; }
  // No position beyond this one is written by any step launched so far.
  int64_t position_bound() const { return std::min(lane.position + lane.rows, positions()); }
  // Tokens it has at least when everything under way is settled, unless it ends.
  int64_t least_output() const { return output_tokens() + lane.choices; }
  // Its tokens may come from the prefix cache: with log-probabilities of the prompt every row is computed.
  bool may_hit() const { return request.prompt_logprobs < 0 || output_tokens() > 0; }
  bool before(const Active& other) const {
    return request.priority != other.request.priority ? request.priority < other.request.priority : id < other.id;
  }

  const uint64_t id;  // ascending in the order of submission: the age that scheduling goes by
  Request request;    // without the prompt, which moved to `tokens`
  const int64_t prompt_tokens;
  const int64_t max_output;  // max_tokens, cut to the context
  const uint64_t seed;
  std::vector<int32_t> tokens;  // prompt and output
  std::shared_ptr<Channel> channel;

  Lane lane;
  uint64_t awaits = 0;           // id of a running request whose prompt's caches this one waits for; 0: none
  int64_t awaited_position = 0;  // until they reach so far
  bool counted = false;          // in the statistics of the prefix cache

  bool started = false;        // was part of a step
  bool over = false;           // kFinished is delivered, or about to be
  bool cacheable = true;       // what it computed can be trusted
  bool preempted = false;      // leaves its lane to come back
  std::string callback_error;  // its notify threw
  int64_t delivered = 0;       // tokens
  int64_t cached_tokens = 0;
  int64_t drafted = 0, accepted = 0;
  Acceptance acceptance;
  ListedText listed;
  std::vector<int32_t> drafts;  // with a constraint: those that the last settled step made
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;
  Clock::time_point submitted, first_step, first_token, last_token;
};

// A fresh seed for a request that brings none.
uint64_t fresh_seed();

}  // namespace fourfold::engine
