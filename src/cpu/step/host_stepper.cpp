#include "cpu/step/host_stepper.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cpu/step/stepping.h"

namespace fourfold::cpu {
namespace stepping {
namespace {

// HostStepParts::gather of tensors in host memory.
void copy_rows(const Tensor& x, std::span<const int32_t> rows, const Tensor& out) {
  FF_ASSERT(x.cols == out.cols && static_cast<int64_t>(rows.size()) == out.rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    FF_ASSERT(rows[i] >= 0 && rows[i] < x.rows);
    std::copy_n(x.f32(rows[i]), x.cols, out.f32(static_cast<int64_t>(i)));
  }
}

HostStepParts with_defaults(HostStepParts parts) {
  if (!parts.gather) parts.gather = copy_rows;
  if (!parts.bind_logits) parts.bind_logits = [](std::span<const ops::LogitRows>) {};
  if (!parts.end) parts.end = [](bool) {};
  if (!parts.fetch) parts.fetch = [](const Tensor& logits) { return logits; };
  return parts;
}

void check_limit(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail("step: {} is {}, wanted {} to {}", name, value, low, high);
}

}  // namespace

HostStepper::HostStepper(const ops::StepLimits& limits, HostStepParts parts)
    : limits_(limits), parts_(with_defaults(std::move(parts))) {
  check_limit("lanes", limits_.lanes, 1, 4096);
  check_limit("rows", limits_.rows, limits_.lanes, int64_t{1} << 20);
  check_limit("logit_rows", limits_.logit_rows, limits_.lanes, limits_.rows);
  check_limit("drafts", limits_.drafts, 0, ops::kMaxDrafts);
  check_limit("context", limits_.context, 1, int64_t{1} << 30);
  check_limit("page_size", limits_.page_size, 1, 65536);
  check_limit("vocabulary", limits_.vocabulary, 1, int64_t{1} << 30);
  FF_ASSERT(parts_.pool != nullptr && parts_.bind && parts_.body && parts_.row_bucket >= 1);

  const auto lanes = static_cast<size_t>(limits_.lanes);
  const auto rows = static_cast<size_t>(round_up(limits_.rows, parts_.row_bucket));
  const auto pages = static_cast<size_t>(ceil_div(limits_.context, limits_.page_size));
  lanes_.resize(lanes);
  for (Lane& lane : lanes_) lane.pages.reserve(pages);
  for (int i = 0; i < parts_.pool->size(); ++i) samplers_.emplace_back(limits_.vocabulary);
  for (Run& run : runs_) {
    run.entries.reserve(lanes);
    run.carried.reserve(lanes);
    run.row_tokens.reserve(rows);
    run.reported.reserve(rows);
    run.logit_rows.reserve(static_cast<size_t>(limits_.logit_rows));
    run.choices.reserve(static_cast<size_t>(limits_.logit_rows));
    run.chosen.resize(static_cast<size_t>(limits_.logit_rows));
    run.errors.resize(static_cast<size_t>(limits_.logit_rows));
  }
  for (Run& run : runs_) {
    run.drafters.reserve(lanes);
    run.passes.reserve(ops::kMaxDrafts);
  }
  end_rows_.reserve(lanes);
  carried_drafts_.reserve(lanes);
  draft_choices_.reserve(lanes);
  report_choices_.reserve(static_cast<size_t>(limits_.logit_rows));
  reported_rows_.reserve(static_cast<size_t>(limits_.logit_rows));
  reported_of_.reserve(lanes);
  moved_.reserve(lanes);
  carried_lanes_.reserve(lanes);
  uncollected_.reserve(kChoicesUnderWay);
  sequences_.reserve(lanes);
  left_.reserve(lanes);
  read_.reserve(lanes);
  written_.reserve(lanes * static_cast<size_t>(1 + limits_.drafts));
  to_make_.reserve(2 * lanes);
  put_off_.reserve(2 * lanes);
  next_tokens_.reserve(rows);
  chosen_.resize(static_cast<size_t>(limits_.logit_rows));
  errors_.resize(static_cast<size_t>(limits_.logit_rows));
  for (Step& step : steps_) {
    step.work.resize(lanes);
    step.starts.resize(lanes);
    step.outcomes.resize(lanes);
    step.page_copies.reserve(lanes);
    step.tokens.reserve(rows);
    step.pages.reserve(lanes * std::min<size_t>(pages, 64));
    step.states.reserve(lanes * static_cast<size_t>(1 + limits_.drafts));
  }
  thread_ = std::thread([this] { run(); });
}

HostStepper::~HostStepper() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  launched_.notify_all();
  supplied_.notify_all();
  thread_.join();
}

// ---- the host's side

ops::Ticket HostStepper::launch(const ops::StepPlan& plan) {
  FF_ASSERT(plan.work.size() <= lanes_.size());
  ops::Ticket ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    FF_ASSERT(next_ticket_ - next_wait_ < static_cast<ops::Ticket>(ops::kInFlight));
    ticket = next_ticket_;
  }
  // The slot is nobody's: its last outcome was given up by the wait() after it.
  Step& step = step_of(ticket);
  step.ticket = ticket;
  step.done = false;
  step.works = plan.work.size();
  FF_ASSERT(plan.draft_list >= 0 && plan.draft_list <= static_cast<int32_t>(ops::kDraftLists));
  FF_ASSERT(plan.draft_list == 0 || limits_.draft_lists[static_cast<size_t>(plan.draft_list) - 1] > 0);
  step.draft_list = plan.draft_list;
  step.page_copies.assign(plan.page_copies.begin(), plan.page_copies.end());
  step.tokens.clear();
  step.pages.clear();
  step.states.clear();
  for (size_t i = 0; i < step.works; ++i) {
    const ops::LaneWork& from = plan.work[i];
    FF_ASSERT(from.lane >= 0 && from.lane < limits_.lanes && !from.state_out.empty());
    FF_ASSERT(from.drafts >= 0 && from.drafts <= limits_.drafts && from.new_drafts <= limits_.drafts);
    FF_ASSERT(from.state_out.size() == 1 || from.state_out.size() > static_cast<size_t>(from.drafts));
    FF_ASSERT(from.drafts == 0 || from.state_out.size() > 1);
    Step::Work& work = step.work[i];
    const auto copy = [](std::span<const int32_t> source, std::vector<int32_t>& into, size_t& begin, size_t& count) {
      begin = into.size();
      count = source.size();
      into.insert(into.end(), source.begin(), source.end());
    };
    copy(from.tokens, step.tokens, work.tokens, work.token_count);
    copy(from.pages, step.pages, work.pages, work.page_count);
    copy(from.state_out, step.states, work.states, work.state_count);
    work.starts = from.start != nullptr;
    if (work.starts) step.starts[i].take(*from.start);
    work.plan = from;
    work.plan.start = nullptr;
    work.plan.tokens = work.plan.pages = work.plan.state_out = {};
    work.masked = false;
    work.masks.clear();
  }
  {
    const std::lock_guard lock(mutex_);
    ++next_ticket_;
  }
  launched_.notify_one();
  return ticket;
}

void HostStepper::supply_masks(ops::Ticket ticket, int32_t lane, std::span<const uint32_t> rows) {
  {
    const std::lock_guard lock(mutex_);
    Step& step = step_of(ticket);
    FF_ASSERT(step.ticket == ticket);
    const auto end = step.work.begin() + static_cast<std::ptrdiff_t>(step.works);
    const auto work = std::find_if(step.work.begin(), end, [&](const auto& w) { return w.plan.lane == lane; });
    FF_ASSERT(work != end && !work->masked);
    FF_ASSERT(rows.size() % static_cast<size_t>(ceil_div(limits_.vocabulary, 32)) == 0);
    work->masks.assign(rows.begin(), rows.end());
    work->masked = true;
  }
  supplied_.notify_all();
}

const ops::StepOutcome& HostStepper::wait(ops::Ticket ticket) {
  std::unique_lock lock(mutex_);
  FF_ASSERT(ticket == next_wait_ && ticket < next_ticket_);
  Step& step = step_of(ticket);
  finished_.wait(lock, [&] { return step.done; });
  ++next_wait_;
  return step.outcome;
}

bool HostStepper::ended(ops::Ticket ticket, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  FF_ASSERT(ticket == next_wait_ && ticket < next_ticket_);
  return finished_.wait_for(lock, patience, [&] { return step_of(ticket).done; });
}

// ---- the stepper's thread

void HostStepper::run() {
  if (parts_.begin_thread) parts_.begin_thread();
  for (;;) {
    Step* step = next_step();
    if (step == nullptr && open_ == nullptr) return;
    const bool leads = parts_.order != nullptr && parts_.first;
    if (step == nullptr || (open_ != nullptr && !may_follow(*step))) {
      if (leads) parts_.order->say(open_->step->ticket, false);
      settle();
      continue;
    }
    if (open_ != nullptr) look_at_ends(*open_);
    if (leads && open_ != nullptr) parts_.order->say(open_->step->ticket, true);
    Run& run = open_ == &runs_[0] ? runs_[1] : runs_[0];
    begin(run, *step);
    settle();
    if (run.under_way) {
      open_ = &run;
    } else {
      if (leads) parts_.order->say(step->ticket, false);  // it may be open elsewhere
      end(run);
    }
  }
}

// Whether the step behind the open one, if it is there, begins before the open one's tokens are known; null: that is
// not known yet.
std::optional<bool> HostStepper::follows(bool there) const {
  if (parts_.order != nullptr && !parts_.first) {
    const std::optional<bool> said = parts_.order->said(open_->step->ticket);
    return said == true && !there ? std::nullopt : said;
  }
  if (there) return true;
  try {
    if (!parts_.collectable()) return std::nullopt;
  } catch (const std::exception&) {  // collect() says so again
  }
  return false;
}

// The next step to begin. Null: there is none before the open step's tokens are known, or no more.
Step* HostStepper::next_step() {
  constexpr std::chrono::milliseconds kBusy{2};
  constexpr std::chrono::microseconds kPause{50};
  std::unique_lock lock(mutex_);
  const auto there = [&] { return next_run_ < next_ticket_; };
  if (open_ == nullptr) {
    launched_.wait(lock, [&] { return stopping_ || there(); });
    return stopping_ ? nullptr : &step_of(next_run_);
  }
  // Steps of the device are short: the thread does not sleep while it waits for one.
  for (const auto begun = std::chrono::steady_clock::now(); !stopping_;) {
    const bool launched = there();
    lock.unlock();
    const std::optional<bool> follow = follows(launched);
    lock.lock();
    if (follow.has_value() && !stopping_) return *follow ? &step_of(next_run_) : nullptr;
    if (std::chrono::steady_clock::now() - begun > kBusy) {
      launched_.wait_for(lock, kPause, [&] { return stopping_ || (there() && !launched); });
    }
  }
  return nullptr;
}

// Whether it may begin while the open step's tokens are not known: it may not begin a lane anew that this one works
// for, and what feeds the drafter goes by tokens that are known.
bool HostStepper::may_follow(const Step& step) const {
  const Step& before = *open_->step;
  const bool ahead = keeps_lanes() && may_run_ahead(step);
  for (size_t i = 0; i < step.works; ++i) {
    if (!ahead && (step.work[i].plan.feed_drafter || step.work[i].plan.new_drafts > 0)) return false;
    if (!step.work[i].starts) {
      if (keeps_lanes() && !may_carry(step.work[i])) return false;
      continue;
    }
    for (size_t k = 0; k < before.works; ++k) {
      if (before.work[k].plan.lane == step.work[i].plan.lane) return false;
    }
  }
  return true;
}

// Runs the step's body. Afterwards all that it is to compute is done, or launched (under_way).
void HostStepper::begin(Run& run, Step& step) {
  {
    const std::lock_guard lock(mutex_);
    ++next_run_;
  }
  run_ = &run;
  run.step = &step;
  run.under_way = run.asked = run.prepared = run.ahead = false;
  run.failed.clear();
  run.drafters.clear();
  run.passes.clear();
  run.begun = std::chrono::steady_clock::now();
  run.entries.clear();
  step.outcome.error.clear();
  for (size_t i = 0; i < step.works; ++i) reset(step.outcomes[i], step.work[i].plan.lane);
  try {
    for (const ops::PageCopy& copy : step.page_copies) parts_.copy_page(copy.from, copy.to);
    start_lanes(step);
    const ops::StepShape shape = lay_out(run);
    if (parts_.put_off_rows > 0) make_states(run);
    run.needs_tokens = shape.feed_drafter || shape.drafts > 0;
    if (shape.rows > 0) parts_.body(shape, *this);
    parts_.end(false);
    if (parts_.prepared && parts_.prepared()) {
      run.prepared = true;
      if (open_ != nullptr) open_->prepared = true;  // it ends for the host when this one is on its way
    }
    if (!run.ahead) take_drafts(run);
  } catch (const std::exception& error) {
    step.outcome.error = *error.what() == '\0' ? "unknown error" : error.what();
  } catch (...) {
    step.outcome.error = "unknown error";
  }
  if (step.outcome.error.empty()) return;
  parts_.end(true);
  settle(step.outcome.error);
  // Nobody wants these any more.
  while (!uncollected_.empty()) {
    try {
      collect();
    } catch (const std::exception&) {
    }
  }
  for (const Entry& entry : run.entries) {
    entry.lane->unknown = entry.lane->open_tokens = 0;
    entry.lane->open_counted = entry.lane->counted = false;
  }
  run.under_way = false;
}

// The host gets to know the open step's tokens, if there is one. Where it cannot: for what failed before.
void HostStepper::settle(const std::string& failed) {
  if (open_ == nullptr) return;
  Run& run = *open_;
  open_ = nullptr;
  finish(run);
  if (!failed.empty() && !run.step->outcome.error.empty()) run.step->outcome.error = failed;
  end(run);
}

void HostStepper::finish(Run& run) {
  try {
    take_choices(run);
  } catch (const std::exception& error) {
    run.step->outcome.error = *error.what() == '\0' ? "unknown error" : error.what();
    while (!run.passes.empty()) drop_draft(run);
  }
  run.under_way = false;
}

// What became of a step is known.
void HostStepper::end(Run& run) {
  Step& step = *run.step;
  for (size_t i = 0; i < step.works; ++i) {
    const Lane& lane = lanes_[static_cast<size_t>(step.work[i].plan.lane)];
    LaneOutcome& outcome = step.outcomes[i];
    outcome.ended = lane.ended;
    outcome.position = lane.position;
    outcome.state = lane.state;
    outcome.drafts.assign(lane.drafts.begin(), lane.drafts.begin() + lane.draft_count);
  }
  for (const Entry& entry : run.entries) {  // the next step may have moved the lane on
    LaneOutcome& outcome = step.outcomes[entry.work];
    if (outcome.ended) continue;
    outcome.position = entry.end_position;
    outcome.state = entry.end_state;
  }
  step.outcome.lanes = std::span(step.outcomes).first(step.works);
  step.outcome.prepared = run.prepared;
  const auto now = std::chrono::steady_clock::now();
  step.outcome.seconds = std::chrono::duration<double>(now - std::max(run.begun, last_end_)).count();
  last_end_ = now;
  {
    const std::lock_guard lock(mutex_);
    step.done = true;
  }
  finished_.notify_all();
}

void HostStepper::start_lanes(Step& step) {
  for (size_t i = 0; i < step.works; ++i) {
    const Step::Work& work = step.work[i];
    Lane& lane = lanes_[static_cast<size_t>(work.plan.lane)];
    if (work.starts) {
      if (lane.updates.count > 0) put_off_.push_back({lane.state, lane.updates});  // somebody may have kept it
      lane.start(step.starts[i], limits_.vocabulary);
    }
    const auto first = static_cast<size_t>(work.plan.first_page);
    const std::span<const int32_t> pages = step.pages_of(work);
    if (!pages.empty()) {
      FF_ASSERT(first <= lane.pages.size());
      if (lane.pages.size() < first + pages.size()) lane.pages.resize(first + pages.size());
      std::copy(pages.begin(), pages.end(), lane.pages.begin() + static_cast<std::ptrdiff_t>(first));
    }
  }
}

// The slots that a step's rows write.
std::span<const int32_t> HostStepper::slots_of(const Run& run, const Entry& entry) const {
  const Step::Work& work = run.step->work[entry.work];
  const std::span<const int32_t> out = run.step->states_of(work);
  const bool each = out.size() > 1 && work.token_count == 0;
  return out.first(each ? static_cast<size_t>(entry.count) : 1);
}

// States that were put off, and are read by who does not know of it, or whose updates are about to be overwritten, are
// made. A lane that goes on reads its own before anything is written.
void HostStepper::make_states(const Run& run) {
  for (const Entry& entry : run.entries) entry.lane->takes_own = entry.goes_on;
  left_.clear();
  for (Lane& lane : lanes_) {
    if (!std::exchange(lane.takes_own, false) && lane.updates.count > 0) left_.push_back(&lane);
  }
  if (left_.empty() && put_off_.empty()) return;
  written_.clear();
  read_.clear();
  for (const Entry& entry : run.entries) {
    const std::span<const int32_t> slots = slots_of(run, entry);
    written_.insert(written_.end(), slots.begin(), slots.end());
    if (!entry.goes_on && entry.position > 0) read_.push_back(entry.state_in);
  }
  std::sort(written_.begin(), written_.end());
  std::sort(read_.begin(), read_.end());
  to_make_.clear();
  const auto in = [](const std::vector<int32_t>& slots, int32_t slot) {
    return std::binary_search(slots.begin(), slots.end(), slot);
  };
  // Whether the state is one that was put off no longer: it is made, or written anew.
  const auto is_over = [&](const PutOffState& state) {
    const bool read = in(read_, state.slot), overwritten = in(written_, state.slot);
    const bool lost = in(written_, state.updates.base) || in(written_, state.updates.from);
    if (read || (lost && !overwritten)) to_make_.push_back(state);
    return read || lost || overwritten;
  };
  std::erase_if(put_off_, is_over);
  for (Lane* lane : left_) {
    if (is_over({lane->state, lane->updates})) lane->updates = {};
  }
  if (!to_make_.empty()) parts_.make_states(to_make_);
}

}  // namespace stepping

std::unique_ptr<ops::Stepper> make_host_stepper(const ops::StepLimits& limits, HostStepParts parts) {
  return std::make_unique<stepping::HostStepper>(limits, std::move(parts));
}

}  // namespace fourfold::cpu
