#include "cpu/step/lane.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fourfold::cpu {

void LaneStartCopy::take(const ops::LaneStart& start) {
  FF_ASSERT(static_cast<int64_t>(start.output.size()) < start.max_output);
  sampling = start.sampling;
  seed = start.seed;
  max_output = start.max_output;
  min_output = start.min_output;
  defined_tokens = start.defined_tokens;
  constrained = start.constrained;
  outputs = static_cast<int64_t>(start.output.size());
  history.clear();
  prompt_tokens = 0;
  if (sampling.penalized()) {
    prompt_tokens = start.prompt.size();
    history.assign(start.prompt.begin(), start.prompt.end());
    history.insert(history.end(), start.output.begin(), start.output.end());
  }
  stop_tokens.assign(start.stop_tokens.begin(), start.stop_tokens.end());
  banned_tokens.assign(start.banned_tokens.begin(), start.banned_tokens.end());
}

void Lane::start(LaneStartCopy& start, int64_t vocabulary) {
  std::swap(request, start);
  max_output = request.max_output;
  outputs = request.outputs;
  ended = ends_open = false;
  last_token = 0;
  position = 0;
  state = -1;
  updates = {};
  draft_count = 0;
  wanted_drafts = 0;
  drafts_end = false;
  unknown = 0;
  open_tokens = open_rows = open_drafts = open_drafter = 0;
  open_puts_off = false;
  pages.clear();
  counts.clear();
  counted = open_counted = false;
  uncounted.clear();
  if (!request.sampling.penalized()) return;
  counts.start(vocabulary);
  for (size_t i = 0; i < request.history.size(); ++i) {
    if (i < request.prompt_tokens) {
      counts.add_prompt(request.history[i]);
    } else {
      counts.add_output(request.history[i]);
    }
  }
}

void Lane::add_output(int32_t token, bool counted_there) {
  last_token = token;
  ++outputs;
  if (counts.active()) {
    counts.add_output(token);
    if (counted && !counted_there) uncounted.push_back(token);
    constexpr size_t kMost = 32;
    if (uncounted.size() > kMost) counted = false;  // it is told all of them anew
  }
  if (outputs >= max_output || stops_at(token)) ended = true;
}

bool Lane::stops_at(int32_t token) const {
  const std::vector<int32_t>& stops = request.stop_tokens;
  return std::find(stops.begin(), stops.end(), token) != stops.end();
}

void reset(ops::LaneOutcome& outcome, int32_t lane) {
  outcome.lane = lane;
  outcome.tokens.clear();
  outcome.logprobs.clear();
  outcome.prompt_logprobs.clear();
  outcome.drafts.clear();
  outcome.verified = outcome.accepted = outcome.passes = 0;
  outcome.ended = false;
  outcome.error.clear();
}

}  // namespace fourfold::cpu
