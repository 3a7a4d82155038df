// Steps of lanes that the backend moves on itself (HostStepParts::move_lanes): nothing in them waits for tokens, and
// the next step begins before they are known. Here rows are laid out for the most that the open step may accept; what
// it did accept is found out when its tokens are collected (step_body.cpp, take_choices()).
#include <algorithm>

#include "base/check.h"
#include "cpu/step/stepping.h"

namespace fourfold::cpu::stepping {

// Whether nothing is chosen with a look at the tokens before it that the host has to take.
bool HostStepper::may_run_ahead(const Step& step) const {
  for (size_t i = 0; i < step.works; ++i) {
    const Step::Work& work = step.work[i];
    const LaneStartCopy& request = work.starts ? step.starts[i] : lanes_[static_cast<size_t>(work.plan.lane)].request;
    if (work.plan.prompt_logprobs >= 0 || request.constrained) return false;
  }
  return true;
}

// Whether a lane of the open step can go on from wherever that leads: its limits are not reached by then, and do not
// change on the way.
bool HostStepper::may_carry(const Step::Work& work) const {
  const Lane& lane = lanes_[static_cast<size_t>(work.plan.lane)];
  if (work.token_count > 0 || lane.open_tokens == 0 || lane.ended) return true;
  if (lane.outputs + lane.unknown >= lane.max_output) return true;  // it has no rows
  if (lane.outputs + lane.open_tokens >= lane.max_output) return false;
  if (!lane.request.stop_tokens.empty() && lane.outputs + 1 < lane.request.min_output) return false;
  const size_t pages = std::max(lane.pages.size(), static_cast<size_t>(work.plan.first_page) + work.page_count);
  return lane.position + lane.open_rows < static_cast<int64_t>(pages) * limits_.page_size;
}

// While the backend drafts behind the open step's tokens they are looked at: a lane whose answer ends with them has no
// rows in the next step, which would be computed for nothing. Without drafts nothing is to be done in the meantime, and
// there is no wait.
void HostStepper::look_at_ends(Run& run) {
  if (!run.ahead || run.passes.empty() || !run.asked) return;
  try {
    take_answer(run);
  } catch (const std::exception& error) {  // take_choices() says so
    run.failed = *error.what() == '\0' ? "unknown error" : error.what();
    return;
  }
  size_t first = 0;
  for (const Entry& entry : run.entries) {
    Lane& lane = *entry.lane;
    const size_t at = first;
    while (first < run.choices.size() && &run.choices[first].choice.params == &lane.request.sampling) ++first;
    if (lane.ended || first == at) continue;
    for (size_t i = 0; at + i < first; ++i) {
      const int32_t token = run.chosen[at + i].token;
      lane.ends_open = !run.errors[at + i].empty() || lane.stops_at(token) ||
                       lane.outputs + static_cast<int64_t>(i) + 1 >= lane.max_output;
      const bool follows = i < static_cast<size_t>(lane.draft_count) && token == lane.drafts[i];
      if (lane.ends_open || !follows) break;
    }
  }
}

// Rows of a lane that is open: as many as it has drafts to verify, wherever it is.
void HostStepper::carry_entry(const Step::Work& work, Entry& entry) const {
  const Lane& lane = *entry.lane;
  const int64_t positions = static_cast<int64_t>(lane.pages.size()) * limits_.page_size;
  entry.carried = entry.chooses = true;
  entry.position = lane.position + lane.open_rows;
  const int64_t most =
      std::min<int64_t>({1 + int64_t{std::min(work.plan.drafts, lane.open_drafts)},
                         lane.max_output - lane.outputs - lane.open_tokens, positions - entry.position});
  FF_ASSERT(most >= 1);
  entry.count = entry.logits = static_cast<int32_t>(most);
  entry.verified = entry.count - 1;
}

void HostStepper::carry_trunk() {
  carried_lanes_.clear();
  for (size_t i = 0; i < run_->entries.size(); ++i) {
    const Entry& entry = run_->entries[i];
    if (!entry.carried) continue;
    CarriedLane carried;
    carried.lane = run_->step->work[entry.work].plan.lane;
    carried.sequence = static_cast<int32_t>(i);
    carried.row = entry.first;
    carried.count = entry.count;
    carried.drafter = entry.lane->open_drafter;
    carried_lanes_.push_back(carried);
  }
  if (!carried_lanes_.empty()) parts_.carry_lanes(carried_lanes_);
}

// The step before is known: entries that began without it are where they are.
void HostStepper::rebase(Run& run) {
  for (Entry& entry : run.entries) {
    if (!entry.carried) continue;
    entry.carried = false;
    entry.position = entry.lane->position;
    entry.verified = std::min(entry.verified, entry.lane->draft_count);
  }
}

// Behind the choice of tokens: the backend moves the lanes on, and how far they may be is noted.
void HostStepper::move_ahead() {
  Run& run = *run_;
  moved_.clear();
  int32_t choice = 0;
  for (size_t i = 0; i < run.entries.size(); ++i) {
    Entry& entry = run.entries[i];
    Lane& lane = *entry.lane;
    const Step::Work& work = run.step->work[entry.work];
    const bool goes_on = work.token_count == 0;
    if (!goes_on) move_on(*run.step, entry);
    if (!entry.chooses) continue;
    const int64_t positions = static_cast<int64_t>(lane.pages.size()) * limits_.page_size;
    const int64_t outputs = lane.outputs + (entry.carried ? lane.open_tokens : 0) + (goes_on ? entry.count : 1);
    const int64_t most = std::min(lane.max_output - outputs - 1, positions - entry.position - entry.count + 1);
    entry.drafts = static_cast<int32_t>(std::clamp<int64_t>(most, 0, work.plan.new_drafts));
    MovedLane moved;
    moved.lane = work.plan.lane;
    moved.sequence = static_cast<int32_t>(i);
    moved.first = goes_on ? entry.first : entry.first + entry.count - 1;
    moved.count = goes_on ? entry.count : 1;
    moved.choice = choice;
    moved.prompt = !goes_on;
    moved.position = entry.end_position;
    moved.state = entry.end_state;
    moved.puts_off = entry.puts_off;
    moved.counted = lane.counted;
    moved.stop_tokens = lane.request.stop_tokens;
    moved_.push_back(moved);
    choice += 1 + entry.verified;
    ++lane.unknown;
    lane.open_tokens = moved.count;
    lane.open_rows = goes_on ? entry.count : 0;
    lane.open_drafts = entry.drafts;
    lane.open_puts_off = entry.puts_off;
  }
  if (!moved_.empty()) parts_.move_lanes(moved_);
}

void HostStepper::feed_ahead() {
  const Step& step = *run_->step;
  next_tokens_.assign(run_->row_tokens.size(), 0);
  carried_lanes_.clear();
  int32_t choice = 0;
  for (size_t i = 0; i < run_->entries.size(); ++i) {
    const Entry& entry = run_->entries[i];
    const Step::Work& work = step.work[entry.work];
    const std::span<const int32_t> tokens = step.tokens_of(work);
    const auto at = next_tokens_.begin() + entry.first;
    if (!tokens.empty()) {
      std::copy(tokens.begin() + 1, tokens.end(), at);
      at[entry.count - 1] = std::max(work.plan.next, 0);
    }
    if (!entry.chooses) continue;
    CarriedLane carried;
    carried.as = CarriedLane::As::kFed;
    carried.lane = work.plan.lane;
    carried.sequence = tokens.empty() ? static_cast<int32_t>(i) : -1;
    carried.row = tokens.empty() ? entry.first : entry.first + entry.count - 1;
    carried.count = 1 + entry.verified;
    carried.choice = choice;
    carried_lanes_.push_back(carried);
    choice += carried.count;
  }
  parts_.bind({next_tokens_, sequences_, {}}, StepPart::kFeed, {});
  if (!carried_lanes_.empty()) parts_.carry_lanes(carried_lanes_);
}

void HostStepper::list_drafters_ahead() {
  std::vector<Entry>& entries = run_->entries;
  std::vector<size_t>& drafters = run_->drafters;
  drafters.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].chooses && entries[i].drafts > 0) drafters.push_back(i);
  }
  std::stable_sort(drafters.begin(), drafters.end(),
                   [&](size_t a, size_t b) { return entries[a].drafts > entries[b].drafts; });
  for (size_t row = 0; row < drafters.size(); ++row) {
    entries[drafters[row]].lane->open_drafter = static_cast<int32_t>(row);
  }
}

int64_t HostStepper::begin_draft_ahead(int64_t pass) {
  if (pass == 0) list_drafters_ahead();
  sequences_.clear();
  end_rows_.clear();
  carried_lanes_.clear();
  for (const size_t i : run_->drafters) {
    const Entry& entry = run_->entries[i];
    if (entry.drafts <= pass) break;
    const Step::Work& work = run_->step->work[entry.work];
    ++run_->step->outcomes[entry.work].passes;
    const auto row = static_cast<int32_t>(sequences_.size());
    sequences_.push_back(
        {row, 1, entry.position + entry.count - 1 + static_cast<int32_t>(pass), -1, {}, entry.lane->pages});
    CarriedLane carried;
    carried.as = CarriedLane::As::kDrafts;
    carried.lane = work.plan.lane;
    carried.sequence = carried.row = carried.drafter = row;
    carried.pass = static_cast<int32_t>(pass);
    carried_lanes_.push_back(carried);
    end_rows_.push_back(work.plan.lane);
  }
  const auto rows = static_cast<int64_t>(sequences_.size());
  if (rows == 0) return 0;
  next_tokens_.assign(static_cast<size_t>(drafting_rows(rows)), 0);
  bind_draft(pass, {});
  parts_.carry_lanes(carried_lanes_);
  return static_cast<int64_t>(next_tokens_.size());
}

}  // namespace fourfold::cpu::stepping
