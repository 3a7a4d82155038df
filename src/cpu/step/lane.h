// A lane of the host's stepper: what stands between the steps of one sequence.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/sample/sampler.h"
#include "ops/batch.h"
#include "ops/step.h"

namespace fourfold::cpu {

// ops::LaneStart with memory of its own.
struct LaneStartCopy {
  ops::SamplingParams sampling;
  uint64_t seed = 0;
  int64_t max_output = 0, min_output = 0;
  int32_t defined_tokens = 0;
  bool constrained = false;
  std::vector<int32_t> history;  // prompt, then output; only where penalties look at it
  size_t prompt_tokens = 0;      // of `history`
  int64_t outputs = 0;
  std::vector<int32_t> stop_tokens, banned_tokens;

  void take(const ops::LaneStart& start);
};

struct Lane {
  LaneStartCopy request;
  int64_t max_output = 0;
  int64_t outputs = 0;  // tokens chosen
  bool ended = true;
  bool ends_open = false;  // it will have ended when the tokens that its open step chose are taken
  int32_t last_token = 0;
  int32_t position = 0;       // of its last token, once there is one: what comes before it is in the caches
  int32_t state = -1;         // the slot of the state at `position`
  ops::StateUpdates updates;  // which was put off
  bool takes_own = false;     // the step that begins goes on from it
  std::array<int32_t, ops::kMaxDrafts> drafts{};
  int32_t draft_count = 0;
  int32_t wanted_drafts = 0;  // of the running step
  bool drafts_end = false;    // one of them ends the answer
  int32_t unknown = 0;        // steps that choose for it and whose tokens the host does not know yet
  int32_t choice = 0;         // the last of these: its number among the choices of its step
  // Where the backend moves lanes on, `outputs` and `position` are those before these steps. Of the last one: tokens
  // that it chooses at most, rows that it moves on by at most, drafts that it makes, and which row these have.
  int32_t open_tokens = 0, open_rows = 0, open_drafts = 0, open_drafter = 0;
  bool open_puts_off = false;  // and whether states of its rows were put off
  std::vector<int32_t> pages;
  TokenCounts counts;
  // Where the backend counts as well: whether it has begun, tokens that it was not told of yet, and whether it has
  // counted the token of the open step, which is not known.
  bool counted = false, open_counted = false;
  std::vector<int32_t> uncounted;

  // Begins anew with what `start` holds, which it may swap with its own.
  void start(LaneStartCopy& start, int64_t vocabulary);
  // The next token was chosen, and is among those that the backend has counted, or is not.
  void add_output(int32_t token, bool counted_there);
  // Whether the answer ends with this token.
  bool stops_at(int32_t token) const;
};

// An outcome that says nothing yet; its vectors keep their memory.
void reset(ops::LaneOutcome& outcome, int32_t lane);

}  // namespace fourfold::cpu
