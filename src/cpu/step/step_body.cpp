#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cpu/step/stepping.h"

namespace fourfold::cpu::stepping {

// Gives each live lane its rows.
ops::StepShape HostStepper::lay_out(Run& run) {
  const Step& step = *run.step;
  run.row_tokens.clear();
  run.logit_rows.clear();
  run.reported.clear();
  run.reports = run.reports_known = 0;
  run.carried.clear();
  ops::StepShape shape;
  for (size_t i = 0; i < step.works; ++i) {
    const Step::Work& work = step.work[i];
    Lane& lane = lanes_[static_cast<size_t>(work.plan.lane)];
    if (lane.ended || lane.ends_open || lane.outputs + lane.unknown >= lane.max_output) continue;
    Entry entry;
    entry.work = i;
    entry.lane = &lane;
    entry.first = static_cast<int32_t>(run.row_tokens.size());
    entry.first_logit = static_cast<int32_t>(run.logit_rows.size());
    entry.state_in = work.plan.state_in >= 0 ? work.plan.state_in : lane.state;
    const std::span<const int32_t> tokens = step.tokens_of(work);
    entry.goes_on = tokens.empty() && entry.state_in == lane.state;
    if (tokens.empty() && lane.open_tokens > 0) {
      carry_entry(work, entry);
      run.row_tokens.resize(run.row_tokens.size() + static_cast<size_t>(entry.count), 0);
    } else if (tokens.empty()) {
      // No more rows than the lane may still choose tokens.
      const int64_t most = std::min<int64_t>(work.plan.drafts, lane.draft_count);
      entry.count = static_cast<int32_t>(std::min<int64_t>(1 + most, lane.max_output - lane.outputs - lane.unknown));
      entry.position = lane.position;
      entry.chooses = true;
      if (lane.unknown > 0) run.carried.push_back({entry.first, lane.choice, lane.request.stop_tokens});
      run.row_tokens.push_back(lane.unknown > 0 ? 0 : lane.last_token);
      run.row_tokens.insert(run.row_tokens.end(), lane.drafts.begin(), lane.drafts.begin() + entry.count - 1);
      entry.logits = entry.count;
      entry.verified = entry.count - 1;
    } else {
      entry.count = static_cast<int32_t>(tokens.size());
      entry.position = work.plan.position;
      entry.chooses = work.plan.next < 0;
      run.row_tokens.insert(run.row_tokens.end(), tokens.begin(), tokens.end());
      entry.logits = entry.chooses ? 1 : 0;
      const int32_t reports = work.plan.prompt_logprobs < 0 ? 0 : entry.count - entry.logits;
      for (int32_t row = 0; row < reports; ++row) run.reported.push_back({run.entries.size(), row});
    }
    for (int32_t row = entry.count - entry.logits; row < entry.count; ++row)
      run.logit_rows.push_back(entry.first + row);
    FF_ASSERT(entry.position + entry.count <= static_cast<int64_t>(lane.pages.size()) * limits_.page_size);
    FF_ASSERT(entry.position == 0 || entry.state_in >= 0);
    entry.puts_off = entry.count > 1 && slots_of(run, entry).size() > 1 && entry.count <= parts_.put_off_rows;
    if (work.plan.feed_drafter) shape.feed_drafter = true;
    if (entry.chooses && work.plan.new_drafts > 0) {
      ++shape.lanes;
      shape.drafts = std::max<int64_t>(shape.drafts, work.plan.new_drafts);
    }
    run.entries.push_back(entry);
  }
  FF_ASSERT(static_cast<int64_t>(run.row_tokens.size()) <= limits_.rows);
  FF_ASSERT(static_cast<int64_t>(run.logit_rows.size()) <= limits_.logit_rows);
  run.row_tokens.resize(static_cast<size_t>(round_up(static_cast<int64_t>(run.row_tokens.size()), parts_.row_bucket)),
                        0);
  shape.rows = static_cast<int64_t>(run.row_tokens.size());
  shape.logit_rows = static_cast<int64_t>(run.logit_rows.size());
  shape.lanes = drafting_rows(shape.lanes);
  shape.draft_list = step.draft_list;
  return shape;
}

void HostStepper::begin_trunk() {
  sequences_.clear();
  for (const Entry& entry : run_->entries) {
    ops::StateUpdates updates;
    if (entry.goes_on) updates = entry.lane->updates;
    if (entry.carried) updates = {.count = entry.lane->open_puts_off ? 1 : 0};  // the backend knows how many
    sequences_.push_back({entry.first, entry.count, entry.position, entry.state_in, slots_of(*run_, entry),
                          entry.lane->pages, updates, entry.puts_off});
  }
  const bool reports = !run_->reported.empty();  // those are bound one group after the other
  parts_.bind({run_->row_tokens, sequences_, reports ? std::span<const int32_t>{} : run_->logit_rows}, StepPart::kTrunk,
              run_->carried);
  carry_trunk();
}

void HostStepper::gather_logit_rows(const Tensor& x, const Tensor& out) {
  if (!run_->reported.empty()) {
    reported_of_.clear();
    for (const Entry& entry : run_->entries) {
      if (entry.logits > 0) reported_of_.push_back({entry.logits, entry.logits});
    }
    parts_.bind_logits(reported_of_);
  }
  parts_.gather(x, run_->logit_rows, out);
}

void HostStepper::choose(const Tensor& computed) {
  Run& run = *run_;
  const bool reports = !run.reported.empty();  // the steps before are settled
  bool apart = false;
  for (const Entry& entry : run.entries) apart = apart || (entry.chooses && entry.lane->request.constrained);
  if (apart) settle();  // what may be chosen depends on the tokens before
  if (open_ == nullptr) rebase(run);
  for (const Entry& entry : run.entries) {
    if (entry.chooses && entry.lane->request.constrained && !entry.lane->ended) wait_for_masks(entry);
  }
  run.ahead = keeps_lanes() && parts_.choose_later && !reports && !apart;
  if (parts_.choose_later && choose_later(computed)) {
    if (run.ahead) {
      run.under_way = true;
      move_ahead();
      return;
    }
    // Without drafts every lane moves on by the rows that it has.
    const bool known = std::all_of(run.entries.begin(), run.entries.end(),
                                   [&](const Entry& entry) { return !entry.chooses || entry.verified == 0; });
    run.under_way = known && !apart && !reports && !run.needs_tokens;
    if (run.under_way) {
      leave_open(run);
    } else {
      settle();
      take_choices(run);
    }
    return;
  }
  run.ahead = false;
  settle();
  rebase(run);
  const Tensor logits = run.logit_rows.empty() ? computed : parts_.fetch(computed);
  FF_ASSERT(logits.cols == limits_.vocabulary && logits.rows >= static_cast<int64_t>(run.logit_rows.size()));
  for_entries(run.entries.size(), [&](size_t i, Sampler& sampler) {
    Entry& entry = run.entries[i];
    if (entry.lane->ended) return;
    try {
      choose_for(*run.step, entry, false, [&](int32_t row) { return chosen_on_host(entry, row, logits, sampler); });
    } catch (const Error& error) {
      run.step->outcomes[entry.work].error = error.what();
      entry.lane->ended = true;
    }
    move_on(*run.step, entry);
  });
}

// All rows at once, each as if the drafts before it had been chosen: what is taken of them is decided afterwards.
bool HostStepper::choose_later(const Tensor& logits) {
  Run& run = *run_;
  run.choices.clear();
  for (const Entry& entry : run.entries) {
    const Lane& lane = *entry.lane;
    if (lane.ended) continue;
    if (!entry.chooses) continue;
    const int64_t before = lane.outputs + lane.unknown;
    for (int32_t i = 0; i <= entry.verified; ++i) {
      if (lane.request.constrained && mask_of(*run.step, entry, i).empty()) break;
      const bool goes_on = run.step->work[entry.work].token_count == 0;
      const int32_t number = run.step->work[entry.work].plan.lane;
      run.choices.push_back({entry.first_logit + (goes_on ? i : entry.logits - 1), choice_of(entry, i, before + i),
                             entry.carried ? number : -1});
      if (lane.counts.active()) run.choices.back().counted = counted_of(entry, i, number);
    }
  }
  if (run.choices.empty() && run.needs_tokens && !run.ahead) return true;
  if (!parts_.choose_later(logits, run.choices)) return false;
  uncollected_.push_back(run.choices.size());
  run.asked = true;
  for (const RowChoice& row : run.choices) {
    if (row.counted.lane < 0) continue;
    Lane& lane = lanes_[static_cast<size_t>(row.counted.lane)];
    lane.counted = true;
    lane.uncounted.clear();
    if (row.counted.choice >= 0) lane.open_counted = true;
  }
  return true;
}

// Of a lane with penalties: what the backend is told in front of its i-th row.
CountedTokens HostStepper::counted_of(const Entry& entry, int32_t i, int32_t number) const {
  const Lane& lane = *entry.lane;
  CountedTokens counted;
  counted.lane = number;
  if (i == 0) {
    counted.begins = !lane.counted;
    FF_ASSERT(!counted.begins || lane.unknown == 0);
    if (!counted.begins) counted.more = lane.uncounted;
    if (!keeps_lanes() && lane.unknown > 0) counted.choice = lane.choice;
  }
  counted.draft_row = entry.first + 1;
  counted.drafts = i;
  return counted;
}

// Lanes move on before their tokens are known.
void HostStepper::leave_open(Run& run) {
  int32_t choice = 0;
  for (Entry& entry : run.entries) {
    if (entry.lane->ended) continue;
    move_on(*run.step, entry);
    if (!entry.chooses) continue;
    ++entry.lane->unknown;
    entry.lane->choice = choice++;
  }
}

std::span<Chosen> HostStepper::collect() {
  const size_t count = uncollected_.front();
  uncollected_.erase(uncollected_.begin());
  const std::span<Chosen> chosen = std::span(chosen_).first(count);
  const std::span<std::string> errors = std::span(errors_).first(count);
  std::fill(errors.begin(), errors.end(), std::string());
  parts_.collect(chosen, errors);
  return chosen;
}

void HostStepper::take_answer(Run& run) {
  if (!run.asked) return;
  run.asked = false;
  const std::span<Chosen> chosen = collect();
  std::move(chosen.begin(), chosen.end(), run.chosen.begin());
  std::copy_n(errors_.begin(), chosen.size(), run.errors.begin());
}

// The tokens that the backend chose for a run, which may have been left open.
void HostStepper::take_choices(Run& run) {
  take_answer(run);
  if (!run.failed.empty()) throw Error(run.failed);
  size_t first = 0;
  for (Entry& entry : run.entries) {
    Lane& lane = *entry.lane;
    size_t rows = 0;
    while (first + rows < run.choices.size() && &run.choices[first + rows].choice.params == &lane.request.sampling) {
      ++rows;
    }
    const size_t at = std::exchange(first, first + rows);
    if (run.under_way && rows > 0 && --lane.unknown == 0) lane.open_tokens = 0;
    if (lane.ended) continue;  // with the token before, or before this step
    const bool moves = !run.under_way || (run.ahead && run.step->work[entry.work].token_count == 0);
    if (run.ahead) {
      // The drafts on its rows are known by now, and those behind an answer's end are none.
      if (entry.carried) entry.verified = std::min(entry.verified, lane.draft_count);
      if (moves) entry.position = lane.position;
      lane.drafts_end = false;
    }
    const auto take = [&](size_t choice) {
      if (!run.errors[choice].empty()) fail("{}", run.errors[choice]);
      return std::move(run.chosen[choice]);
    };
    try {
      choose_for(*run.step, entry, run.ahead || std::exchange(lane.open_counted, false),
                 [&](int32_t i) { return take(at + static_cast<size_t>(i)); });
    } catch (const Error& error) {
      run.step->outcomes[entry.work].error = error.what();
      lane.ended = true;
    }
    if (moves) {
      move_on(*run.step, entry);
    } else if (lane.ended) {  // the next step has moved on for nothing
      lane.position = entry.end_position;
      lane.state = entry.end_state;
      lane.updates = entry.end_updates;
    }
  }
  if (run.ahead) take_drafts(run);
}

// The rows whose tokens were chosen are the lane's now; the first is in any case.
void HostStepper::move_on(const Step& step, Entry& entry) {
  const std::span<const int32_t> slots = step.states_of(step.work[entry.work]);
  const size_t chosen = step.outcomes[entry.work].tokens.size();
  const bool goes_on = step.work[entry.work].token_count == 0;
  const size_t rows = goes_on ? std::max<size_t>(chosen, 1) : static_cast<size_t>(entry.count);
  entry.lane->position = entry.end_position = entry.position + static_cast<int32_t>(rows);
  const size_t last = std::min(rows, slots.size()) - 1;
  entry.lane->state = entry.end_state = slots[last];
  entry.end_updates = {};
  if (entry.puts_off && last > 0) entry.end_updates = {slots[0], slots[1], static_cast<int32_t>(last)};
  entry.lane->updates = entry.end_updates;
  entry.lane->draft_count = 0;
}

void HostStepper::wait_for_masks(const Entry& entry) {
  std::unique_lock lock(mutex_);
  supplied_.wait(lock, [&] { return stopping_ || run_->step->work[entry.work].masked; });
}

// Of a constrained lane's i-th row; empty where none was supplied.
std::span<const uint32_t> HostStepper::mask_of(const Step& step, const Entry& entry, int32_t i) const {
  const std::vector<uint32_t>& masks = step.work[entry.work].masks;
  const auto words = static_cast<size_t>(ceil_div(limits_.vocabulary, 32));
  const size_t begin = static_cast<size_t>(i) * words;
  if (!entry.lane->request.constrained || begin >= masks.size()) return {};
  return std::span(masks).subspan(begin, words);
}

// Of the running step; `index`: output tokens before it.
Choice HostStepper::choice_of(const Entry& entry, int32_t i, int64_t index) const {
  const LaneStartCopy& request = entry.lane->request;
  return {.params = request.sampling,
          .seed = request.seed,
          .index = index,
          .defined_tokens = request.defined_tokens,
          .banned = request.banned_tokens,
          .too_early = index < request.min_output ? request.stop_tokens : std::span<const int32_t>{},
          .mask = mask_of(*run_->step, entry, i),
          .counts = entry.lane->counts.counts()};
}

Chosen HostStepper::chosen_on_host(const Entry& entry, int32_t i, const Tensor& logits, Sampler& sampler) {
  const bool goes_on = run_->step->work[entry.work].token_count == 0;
  float* row = logits.f32(entry.first_logit + (goes_on ? i : entry.logits - 1));
  // The lane has moved on with the rows before.
  return sampler.choose({row, static_cast<size_t>(logits.cols)}, choice_of(entry, i, entry.lane->outputs));
}

template <typename F>
void HostStepper::choose_for(Step& step, Entry& entry, bool counted, F&& chosen_from) {
  if (!entry.chooses) return;
  Lane& lane = *entry.lane;
  LaneOutcome& outcome = step.outcomes[entry.work];
  const int32_t verified = entry.verified;
  outcome.verified = verified;
  for (int32_t i = 0; i <= verified; ++i) {
    if (lane.request.constrained && mask_of(step, entry, i).empty()) {
      if (i == 0) lane.ended = true;
      break;
    }
    Chosen chosen = chosen_from(i);
    const bool as_drafted = i < verified && chosen.token == lane.drafts[static_cast<size_t>(i)];
    lane.add_output(chosen.token, counted);
    outcome.tokens.push_back(chosen.token);
    if (lane.request.sampling.logprobs >= 0) outcome.logprobs.push_back(std::move(chosen.logprobs));
    if (as_drafted) ++outcome.accepted;
    if (!as_drafted || lane.ended) break;
  }
}

// ---- drafting

void HostStepper::begin_feed() {
  if (run_->ahead) return feed_ahead();
  const Step& step = *run_->step;
  next_tokens_.assign(run_->row_tokens.size(), 0);
  for (size_t i = 0; i < run_->entries.size(); ++i) {
    const Entry& entry = run_->entries[i];
    sequences_[i].position = entry.position;
    const Step::Work& work = step.work[entry.work];
    const std::span<const int32_t> tokens = step.tokens_of(work), chosen = step.outcomes[entry.work].tokens;
    const auto at = next_tokens_.begin() + entry.first;
    if (tokens.empty()) {
      std::copy(chosen.begin(), chosen.end(), at);
    } else {
      std::copy(tokens.begin() + 1, tokens.end(), at);
      at[entry.count - 1] = !chosen.empty() ? chosen.front() : std::max(work.plan.next, 0);
    }
  }
  parts_.bind({next_tokens_, sequences_, {}}, StepPart::kFeed, {});
}

// Lanes that draft, and how much: no further than a next step could verify, nor than the pages reach.
void HostStepper::list_drafters() {
  const Step& step = *run_->step;
  std::vector<size_t>& drafters = run_->drafters;
  drafters.clear();
  for (size_t i = 0; i < run_->entries.size(); ++i) {
    const Entry& entry = run_->entries[i];
    Lane& lane = *entry.lane;
    const Step::Work& work = step.work[entry.work];
    lane.wanted_drafts = 0;
    lane.drafts_end = false;
    if (step.outcomes[entry.work].tokens.empty() || lane.ended || work.plan.new_drafts == 0) continue;
    const int64_t positions = static_cast<int64_t>(lane.pages.size()) * limits_.page_size;
    const int64_t most = std::min(lane.max_output - lane.outputs - 1, positions - lane.position + 1);
    lane.wanted_drafts = static_cast<int32_t>(std::clamp<int64_t>(work.plan.new_drafts, 0, std::max<int64_t>(most, 0)));
    if (lane.wanted_drafts > 0) drafters.push_back(i);
  }
  std::stable_sort(drafters.begin(), drafters.end(), [&](size_t a, size_t b) {
    return run_->entries[a].lane->wanted_drafts > run_->entries[b].lane->wanted_drafts;
  });
}

int64_t HostStepper::begin_draft(int64_t pass) {
  if (run_->ahead) return begin_draft_ahead(pass);
  if (pass == 0) list_drafters();
  std::vector<size_t>& drafters = run_->drafters;
  const bool known = run_->passes.empty();  // the drafts so far
  // Behind an answer's end nothing is drafted; where others follow, a drafter keeps its row all the same.
  while (!drafters.empty() && run_->entries[drafters.back()].lane->drafts_end) drafters.pop_back();
  next_tokens_.clear();
  sequences_.clear();
  end_rows_.clear();
  carried_drafts_.clear();
  for (const size_t i : drafters) {
    const Entry& entry = run_->entries[i];
    const Lane& lane = *entry.lane;
    if (lane.wanted_drafts <= pass) break;
    ++run_->step->outcomes[entry.work].passes;
    const auto row = static_cast<int32_t>(next_tokens_.size());
    sequences_.push_back({row, 1, lane.position - 1 + static_cast<int32_t>(pass), -1, {}, lane.pages});
    // Drafters keep their rows from pass to pass, and so their choices.
    if (pass > 0 && !known) carried_drafts_.push_back({row, row, {}});
    next_tokens_.push_back(pass == 0 ? lane.last_token : known ? lane.drafts[static_cast<size_t>(pass) - 1] : 0);
    end_rows_.push_back(entry.first + lane.position - entry.position - 1);
  }
  const auto rows = static_cast<int64_t>(next_tokens_.size());
  if (rows == 0) return 0;
  next_tokens_.resize(static_cast<size_t>(drafting_rows(rows)), 0);
  bind_draft(pass, carried_drafts_);
  return static_cast<int64_t>(next_tokens_.size());
}

void HostStepper::bind_draft(int64_t pass, std::span<const CarriedRow> carried) {
  parts_.bind({next_tokens_, sequences_, {}, run_->step->draft_list},
              pass == 0 ? StepPart::kFirstDraft : StepPart::kDraft, carried);
}

void HostStepper::gather_ends(const Tensor& x, const Tensor& out) {
  if (run_->ahead) return parts_.gather_ends(x, end_rows_, out);  // of lanes
  // Padding takes the first row again.
  while (static_cast<int64_t>(end_rows_.size()) < out.rows) end_rows_.push_back(end_rows_.front());
  parts_.gather(x, end_rows_, out);
}

void HostStepper::keep_draft(Run& run, size_t drafter, int64_t pass, int32_t token) {
  Lane& lane = *run.entries[run.drafters[drafter]].lane;
  if (lane.ended) return;
  lane.drafts[static_cast<size_t>(pass)] = token;  // the next pass begins with it in any case
  // A token that ends the answer need not be verified: the row before it chooses it, or another one.
  lane.drafts_end = lane.drafts_end || lane.stops_at(token);
  if (!lane.drafts_end) lane.draft_count = static_cast<int32_t>(pass) + 1;
}

void HostStepper::draft(int64_t pass, const Tensor& computed) {
  // The first tokens of the vocabulary may be all that is drafted.
  const auto defined_of = [&](const Lane& lane) {
    return static_cast<int32_t>(std::min<int64_t>(lane.request.defined_tokens, computed.cols));
  };
  if (parts_.choose_later) {
    static const ops::SamplingParams greedy = [] {
      ops::SamplingParams params;
      params.temperature = 0;
      return params;
    }();
    draft_choices_.clear();
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const Lane& lane = *run_->entries[run_->drafters[i]].lane;
      draft_choices_.push_back({static_cast<int64_t>(i), {.params = greedy, .defined_tokens = defined_of(lane)}});
    }
    if (parts_.choose_later(computed, draft_choices_)) {
      uncollected_.push_back(draft_choices_.size());
      run_->passes.push_back(pass);
      return;
    }
    FF_ASSERT(!run_->ahead);  // the most probable token, and nothing else, is always to be had
    take_drafts(*run_);
  }
  const Tensor logits = parts_.fetch(computed);
  for_entries(sequences_.size(), [&](size_t i, Sampler&) {
    const Lane& lane = *run_->entries[run_->drafters[i]].lane;
    const std::span<const float> row(logits.f32(static_cast<int64_t>(i)), static_cast<size_t>(logits.cols));
    keep_draft(*run_, i, pass, Sampler::most_probable(row, defined_of(lane)));
  });
}

// The drafts that the backend has made.
void HostStepper::take_drafts(Run& run) {
  while (!run.passes.empty()) {
    const int64_t pass = run.passes.front();
    run.passes.erase(run.passes.begin());
    const std::span<const Chosen> chosen = collect();
    // Where no token can be chosen any draft will do.
    for (size_t i = 0; i < chosen.size(); ++i) keep_draft(run, i, pass, std::max(chosen[i].token, 0));
  }
}

// Those of one pass, unread.
void HostStepper::drop_draft(Run& run) {
  run.passes.erase(run.passes.begin());
  try {
    collect();
  } catch (const std::exception&) {  // the step has failed as it is
  }
}

}  // namespace fourfold::cpu::stepping
