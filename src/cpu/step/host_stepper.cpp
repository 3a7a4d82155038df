#include "cpu/step/host_stepper.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "cpu/sample/sampler.h"
#include "cpu/step/lane.h"

namespace fourfold::cpu {
namespace {

using ops::LaneOutcome;
using ops::Tensor;

// A plan, copied, with what became of it. Its vectors keep their memory from step to step.
struct Step {
  struct Work {
    ops::LaneWork plan;  // without its spans, which are ranges of the vectors below
    size_t tokens = 0, token_count = 0, pages = 0, page_count = 0, states = 0, state_count = 0;
    bool starts = false;
    bool constrained = false;
    bool masked = false;  // supply_masks() was called
    std::vector<uint32_t> masks;
  };

  ops::Ticket ticket = 0;
  std::vector<ops::PageCopy> page_copies;
  std::vector<Work> work;  // as many as there are lanes; `works` of them are of this plan
  size_t works = 0;
  std::vector<LaneStartCopy> starts;  // by index of the work
  std::vector<int32_t> tokens, pages, states;
  std::vector<LaneOutcome> outcomes;
  ops::StepOutcome outcome;
  bool done = false;

  std::span<const int32_t> tokens_of(const Work& w) const { return std::span(tokens).subspan(w.tokens, w.token_count); }
  std::span<const int32_t> pages_of(const Work& w) const { return std::span(pages).subspan(w.pages, w.page_count); }
  std::span<const int32_t> states_of(const Work& w) const { return std::span(states).subspan(w.states, w.state_count); }
};

// A work of the running step whose lane is live: its rows.
struct Entry {
  size_t work = 0;  // index into Step::work, and of its outcome
  Lane* lane = nullptr;
  int32_t first = 0, count = 0;
  int32_t first_logit = 0, logits = 0;  // among the rows whose logits are computed
  int32_t position = 0;                 // of the first row
  int32_t state_in = 0;
  bool chooses = false;
};

class HostStepper final : public ops::Stepper, public ops::StepScope {
 public:
  HostStepper(const ops::StepLimits& limits, HostStepParts parts);
  ~HostStepper() override;

  const ops::StepLimits& limits() const override { return limits_; }
  ops::Ticket launch(const ops::StepPlan& plan) override;
  void supply_masks(ops::Ticket ticket, int32_t lane, std::span<const uint32_t> rows) override;
  const ops::StepOutcome& wait(ops::Ticket ticket) override;
  bool ended(ops::Ticket ticket, std::chrono::milliseconds patience) override;

  // ---- of the body, on the stepper's thread
  void begin_trunk() override;
  void gather_logit_rows(const Tensor& x, const Tensor& out) override;
  void choose(const Tensor& logits) override;
  void begin_feed() override;
  int64_t begin_draft(int64_t pass) override;
  void gather_ends(const Tensor& x, const Tensor& out) override;
  void draft(int64_t pass, const Tensor& logits) override;

 private:
  void run();
  void execute(Step& step);
  void start_lanes(Step& step);
  ops::StepShape lay_out(Step& step);
  void wait_for_masks(const Entry& entry);
  // chosen(i): from the lane's i-th row.
  template <typename F>
  void choose_for(Entry& entry, F&& chosen);
  Chosen chosen_on_host(const Entry& entry, int32_t i, const Tensor& logits, Sampler& sampler);
  Choice choice_of(const Entry& entry, int32_t i, int64_t index) const;
  std::span<const uint32_t> mask_of(const Entry& entry, int32_t i) const;
  int32_t verified_rows(const Entry& entry) const;
  bool choose_where_logits_are(const Tensor& logits);
  void move_on(Entry& entry);
  void report_prompt(const Entry& entry, const Tensor& logits, Sampler& sampler);
  void list_drafters();
  int64_t drafting_rows(int64_t lanes) const { return std::min(round_up(lanes, parts_.row_bucket), limits_.lanes); }
  template <typename F>
  void for_entries(size_t count, F&& fn);

  const ops::StepLimits limits_;
  const HostStepParts parts_;

  // Of the stepper's thread.
  std::vector<Lane> lanes_;
  std::vector<Sampler> samplers_;  // one a thread
  Step* step_ = nullptr;           // the running one
  std::vector<Entry> entries_;
  std::vector<size_t> drafters_;  // indices of entries_, those with most drafts to make first
  std::vector<int32_t> row_tokens_, logit_rows_, next_tokens_, end_rows_;
  std::vector<int32_t> draft_counts_;  // by drafter: drafts to make
  std::vector<RowChoice> choices_;     // of rows that parts_.choose chooses from
  std::vector<Chosen> chosen_;
  std::vector<std::string> errors_;
  std::vector<ops::Sequence> sequences_;

  // Shared.
  std::mutex mutex_;
  std::condition_variable launched_, finished_, supplied_;
  std::array<Step, ops::kInFlight + 1> steps_;  // a ring: one more than under way, for the outcome last waited for
  ops::Ticket next_ticket_ = 1, next_run_ = 1, next_wait_ = 1;
  bool stopping_ = false;

  std::thread thread_;  // last: it starts when all else is there

  Step& step_of(ops::Ticket ticket) { return steps_[ticket % steps_.size()]; }
};

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
  if (!parts.end) parts.end = [](bool) {};
  if (!parts.fetch) parts.fetch = [](const Tensor& logits) { return logits; };
  return parts;
}

void check_limit(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail("step: {} is {}, wanted {} to {}", name, value, low, high);
}

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
  entries_.reserve(lanes);
  drafters_.reserve(lanes);
  draft_counts_.reserve(lanes);
  end_rows_.reserve(lanes);
  sequences_.reserve(lanes);
  row_tokens_.reserve(rows);
  next_tokens_.reserve(rows);
  logit_rows_.reserve(static_cast<size_t>(limits_.logit_rows));
  choices_.reserve(static_cast<size_t>(limits_.logit_rows));
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
    Step* step = nullptr;
    {
      std::unique_lock lock(mutex_);
      launched_.wait(lock, [&] { return stopping_ || next_run_ < next_ticket_; });
      if (stopping_) return;
      step = &step_of(next_run_);
    }
    execute(*step);
    {
      const std::lock_guard lock(mutex_);
      step->done = true;
      ++next_run_;
    }
    finished_.notify_all();
  }
}

void HostStepper::execute(Step& step) {
  const auto begin = std::chrono::steady_clock::now();
  step_ = &step;
  step.outcome.error.clear();
  for (size_t i = 0; i < step.works; ++i) reset(step.outcomes[i], step.work[i].plan.lane);
  try {
    for (const ops::PageCopy& copy : step.page_copies) parts_.copy_page(copy.from, copy.to);
    start_lanes(step);
    const ops::StepShape shape = lay_out(step);
    if (shape.rows > 0) parts_.body(shape, *this);
    parts_.end(false);
  } catch (const std::exception& error) {
    step.outcome.error = *error.what() == '\0' ? "unknown error" : error.what();
  } catch (...) {
    step.outcome.error = "unknown error";
  }
  if (!step.outcome.error.empty()) parts_.end(true);
  for (size_t i = 0; i < step.works; ++i) {
    const Lane& lane = lanes_[static_cast<size_t>(step.work[i].plan.lane)];
    LaneOutcome& outcome = step.outcomes[i];
    outcome.ended = lane.ended;
    outcome.position = lane.position;
    outcome.state = lane.state;
    outcome.drafts.assign(lane.drafts.begin(), lane.drafts.begin() + lane.draft_count);
  }
  step.outcome.lanes = std::span(step.outcomes).first(step.works);
  step.outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void HostStepper::start_lanes(Step& step) {
  for (size_t i = 0; i < step.works; ++i) {
    const Step::Work& work = step.work[i];
    Lane& lane = lanes_[static_cast<size_t>(work.plan.lane)];
    if (work.starts) lane.start(step.starts[i], limits_.vocabulary);
    const auto first = static_cast<size_t>(work.plan.first_page);
    const std::span<const int32_t> pages = step.pages_of(work);
    if (!pages.empty()) {
      FF_ASSERT(first <= lane.pages.size());
      if (lane.pages.size() < first + pages.size()) lane.pages.resize(first + pages.size());
      std::copy(pages.begin(), pages.end(), lane.pages.begin() + static_cast<std::ptrdiff_t>(first));
    }
  }
}

// Gives each live lane its rows.
ops::StepShape HostStepper::lay_out(Step& step) {
  entries_.clear();
  row_tokens_.clear();
  logit_rows_.clear();
  ops::StepShape shape;
  for (size_t i = 0; i < step.works; ++i) {
    const Step::Work& work = step.work[i];
    Lane& lane = lanes_[static_cast<size_t>(work.plan.lane)];
    if (lane.ended) continue;
    Entry entry;
    entry.work = i;
    entry.lane = &lane;
    entry.first = static_cast<int32_t>(row_tokens_.size());
    entry.first_logit = static_cast<int32_t>(logit_rows_.size());
    entry.state_in = work.plan.state_in >= 0 ? work.plan.state_in : lane.state;
    const std::span<const int32_t> tokens = step.tokens_of(work);
    if (tokens.empty()) {
      // No more rows than the lane may still choose tokens.
      const int64_t most = std::min<int64_t>(work.plan.drafts, lane.draft_count);
      entry.count = static_cast<int32_t>(std::min<int64_t>(1 + most, lane.max_output - lane.outputs));
      entry.position = lane.position;
      entry.chooses = true;
      row_tokens_.push_back(lane.last_token);
      row_tokens_.insert(row_tokens_.end(), lane.drafts.begin(), lane.drafts.begin() + entry.count - 1);
      entry.logits = entry.count;
    } else {
      entry.count = static_cast<int32_t>(tokens.size());
      entry.position = work.plan.position;
      entry.chooses = work.plan.next < 0;
      row_tokens_.insert(row_tokens_.end(), tokens.begin(), tokens.end());
      entry.logits = work.plan.prompt_logprobs >= 0 ? entry.count : entry.chooses ? 1 : 0;
    }
    for (int32_t row = entry.count - entry.logits; row < entry.count; ++row) logit_rows_.push_back(entry.first + row);
    FF_ASSERT(entry.position + entry.count <= static_cast<int64_t>(lane.pages.size()) * limits_.page_size);
    FF_ASSERT(entry.position == 0 || entry.state_in >= 0);
    if (work.plan.feed_drafter) shape.feed_drafter = true;
    if (entry.chooses && work.plan.new_drafts > 0) {
      ++shape.lanes;
      shape.drafts = std::max<int64_t>(shape.drafts, work.plan.new_drafts);
    }
    entries_.push_back(entry);
  }
  FF_ASSERT(static_cast<int64_t>(row_tokens_.size()) <= limits_.rows);
  FF_ASSERT(static_cast<int64_t>(logit_rows_.size()) <= limits_.logit_rows);
  row_tokens_.resize(static_cast<size_t>(round_up(static_cast<int64_t>(row_tokens_.size()), parts_.row_bucket)), 0);
  shape.rows = static_cast<int64_t>(row_tokens_.size());
  shape.logit_rows = static_cast<int64_t>(logit_rows_.size());
  shape.lanes = drafting_rows(shape.lanes);
  return shape;
}

void HostStepper::begin_trunk() {
  sequences_.clear();
  for (const Entry& entry : entries_) {
    const std::span<const int32_t> out = step_->states_of(step_->work[entry.work]);
    const bool each = out.size() > 1 && step_->work[entry.work].token_count == 0;
    const size_t slots = each ? static_cast<size_t>(entry.count) : 1;
    sequences_.push_back(
        {entry.first, entry.count, entry.position, entry.state_in, out.first(slots), entry.lane->pages});
  }
  parts_.bind({row_tokens_, sequences_, logit_rows_}, StepPart::kTrunk);
}

void HostStepper::gather_logit_rows(const Tensor& x, const Tensor& out) { parts_.gather(x, logit_rows_, out); }

// fn(index, sampler) for each of `count` entries, on the pool's threads where there are several.
template <typename F>
void HostStepper::for_entries(size_t count, F&& fn) {
  if (count <= 1) {
    if (count == 1) fn(size_t{0}, samplers_[0]);
    return;
  }
  std::atomic<size_t> next{0};
  parts_.pool->share([&](int thread) {
    for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) fn(i, samplers_[static_cast<size_t>(thread)]);
  });
}

void HostStepper::choose(const Tensor& computed) {
  for (const Entry& entry : entries_) {
    if (entry.chooses && entry.lane->request.constrained) wait_for_masks(entry);
  }
  const bool reports = std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return step_->work[entry.work].plan.prompt_logprobs >= 0;
  });
  if (parts_.choose && !reports && choose_where_logits_are(computed)) return;
  const Tensor logits = logit_rows_.empty() ? computed : parts_.fetch(computed);
  FF_ASSERT(logits.cols == limits_.vocabulary && logits.rows >= static_cast<int64_t>(logit_rows_.size()));
  for_entries(entries_.size(), [&](size_t i, Sampler& sampler) {
    Entry& entry = entries_[i];
    try {
      if (step_->work[entry.work].plan.prompt_logprobs >= 0) report_prompt(entry, logits, sampler);
      choose_for(entry, [&](int32_t row) { return chosen_on_host(entry, row, logits, sampler); });
    } catch (const Error& error) {
      step_->outcomes[entry.work].error = error.what();
      entry.lane->ended = true;
    }
    move_on(entry);
  });
}

// All rows at once, each as if the drafts before it had been chosen: what is taken of them is decided afterwards.
bool HostStepper::choose_where_logits_are(const Tensor& logits) {
  choices_.clear();
  for (const Entry& entry : entries_) {
    if (!entry.chooses) continue;
    const Lane& lane = *entry.lane;
    for (int32_t i = 0; i <= verified_rows(entry); ++i) {
      if (lane.request.constrained && mask_of(entry, i).empty()) break;
      const bool goes_on = step_->work[entry.work].token_count == 0;
      choices_.push_back({entry.first_logit + (goes_on ? i : entry.logits - 1), choice_of(entry, i, lane.outputs + i)});
    }
  }
  const std::span<std::string> errors = std::span(errors_).first(choices_.size());
  std::fill(errors.begin(), errors.end(), std::string());
  if (!choices_.empty() && !parts_.choose(logits, choices_, std::span(chosen_).first(choices_.size()), errors)) {
    return false;
  }
  size_t first = 0;
  for (Entry& entry : entries_) {
    size_t rows = 0;
    while (first + rows < choices_.size() && &choices_[first + rows].choice.params == &entry.lane->request.sampling) {
      ++rows;
    }
    try {
      choose_for(entry, [&](int32_t i) {
        const size_t at = first + static_cast<size_t>(i);
        if (!errors_[at].empty()) fail("{}", errors_[at]);
        return std::move(chosen_[at]);
      });
    } catch (const Error& error) {
      step_->outcomes[entry.work].error = error.what();
      entry.lane->ended = true;
    }
    first += rows;
    move_on(entry);
  }
  return true;
}

// The rows whose tokens were chosen are the lane's now; the first is in any case.
void HostStepper::move_on(Entry& entry) {
  const std::span<const int32_t> slots = step_->states_of(step_->work[entry.work]);
  const size_t chosen = step_->outcomes[entry.work].tokens.size();
  const bool goes_on = step_->work[entry.work].token_count == 0;
  const size_t rows = goes_on ? std::max<size_t>(chosen, 1) : static_cast<size_t>(entry.count);
  entry.lane->position = entry.position + static_cast<int32_t>(rows);
  entry.lane->state = slots[std::min(rows, slots.size()) - 1];
  entry.lane->draft_count = 0;
}

void HostStepper::wait_for_masks(const Entry& entry) {
  std::unique_lock lock(mutex_);
  supplied_.wait(lock, [&] { return stopping_ || step_->work[entry.work].masked; });
}

// Log-probabilities of the tokens that follow the rows of a prompt, where they are known.
void HostStepper::report_prompt(const Entry& entry, const Tensor& logits, Sampler& sampler) {
  const Step::Work& work = step_->work[entry.work];
  const std::span<const int32_t> tokens = step_->tokens_of(work);
  LaneOutcome& outcome = step_->outcomes[entry.work];
  for (int32_t row = 0; row < entry.count; ++row) {
    const bool last = row + 1 == entry.count;
    if (last && work.plan.next < 0) break;
    const int32_t next = last ? work.plan.next : tokens[static_cast<size_t>(row) + 1];
    const std::span<const float> values(logits.f32(entry.first_logit + row), static_cast<size_t>(logits.cols));
    outcome.prompt_logprobs.push_back(
        sampler.logprobs(values, entry.lane->request.defined_tokens, next, work.plan.prompt_logprobs));
  }
}

int32_t HostStepper::verified_rows(const Entry& entry) const {
  return step_->work[entry.work].token_count == 0 ? entry.count - 1 : 0;
}

// Of a constrained lane's i-th row; empty where none was supplied.
std::span<const uint32_t> HostStepper::mask_of(const Entry& entry, int32_t i) const {
  const std::vector<uint32_t>& masks = step_->work[entry.work].masks;
  const auto words = static_cast<size_t>(ceil_div(limits_.vocabulary, 32));
  const size_t begin = static_cast<size_t>(i) * words;
  if (!entry.lane->request.constrained || begin >= masks.size()) return {};
  return std::span(masks).subspan(begin, words);
}

// `index`: output tokens before it.
Choice HostStepper::choice_of(const Entry& entry, int32_t i, int64_t index) const {
  const LaneStartCopy& request = entry.lane->request;
  return {.params = request.sampling,
          .seed = request.seed,
          .index = index,
          .defined_tokens = request.defined_tokens,
          .banned = request.banned_tokens,
          .too_early = index < request.min_output ? request.stop_tokens : std::span<const int32_t>{},
          .mask = mask_of(entry, i),
          .counts = entry.lane->counts.counts()};
}

Chosen HostStepper::chosen_on_host(const Entry& entry, int32_t i, const Tensor& logits, Sampler& sampler) {
  const bool goes_on = step_->work[entry.work].token_count == 0;
  float* row = logits.f32(entry.first_logit + (goes_on ? i : entry.logits - 1));
  // The lane has moved on with the rows before.
  return sampler.choose({row, static_cast<size_t>(logits.cols)}, choice_of(entry, i, entry.lane->outputs));
}

template <typename F>
void HostStepper::choose_for(Entry& entry, F&& chosen_from) {
  if (!entry.chooses) return;
  Lane& lane = *entry.lane;
  LaneOutcome& outcome = step_->outcomes[entry.work];
  const int32_t verified = verified_rows(entry);
  outcome.verified = verified;
  for (int32_t i = 0; i <= verified; ++i) {
    if (lane.request.constrained && mask_of(entry, i).empty()) {
      if (i == 0) lane.ended = true;
      break;
    }
    Chosen chosen = chosen_from(i);
    const bool as_drafted = i < verified && chosen.token == lane.drafts[static_cast<size_t>(i)];
    lane.add_output(chosen.token);
    outcome.tokens.push_back(chosen.token);
    if (lane.request.sampling.logprobs >= 0) outcome.logprobs.push_back(std::move(chosen.logprobs));
    if (as_drafted) ++outcome.accepted;
    if (!as_drafted || lane.ended) break;
  }
}

// ---- drafting

void HostStepper::begin_feed() {
  next_tokens_.assign(row_tokens_.size(), 0);
  for (const Entry& entry : entries_) {
    const Step::Work& work = step_->work[entry.work];
    const std::span<const int32_t> tokens = step_->tokens_of(work), chosen = step_->outcomes[entry.work].tokens;
    const auto at = next_tokens_.begin() + entry.first;
    if (tokens.empty()) {
      std::copy(chosen.begin(), chosen.end(), at);
    } else {
      std::copy(tokens.begin() + 1, tokens.end(), at);
      at[entry.count - 1] = !chosen.empty() ? chosen.front() : std::max(work.plan.next, 0);
    }
  }
  parts_.bind({next_tokens_, sequences_, {}}, StepPart::kFeed);
}

// Lanes that draft, and how much: no further than a next step could verify, nor than the pages reach.
void HostStepper::list_drafters() {
  drafters_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    Lane& lane = *entry.lane;
    const Step::Work& work = step_->work[entry.work];
    lane.wanted_drafts = 0;
    if (step_->outcomes[entry.work].tokens.empty() || lane.ended || work.plan.new_drafts == 0) continue;
    const int64_t positions = static_cast<int64_t>(lane.pages.size()) * limits_.page_size;
    const int64_t most = std::min(lane.max_output - lane.outputs - 1, positions - lane.position + 1);
    lane.wanted_drafts = static_cast<int32_t>(std::clamp<int64_t>(work.plan.new_drafts, 0, std::max<int64_t>(most, 0)));
    if (lane.wanted_drafts > 0) drafters_.push_back(i);
  }
  std::stable_sort(drafters_.begin(), drafters_.end(), [&](size_t a, size_t b) {
    return entries_[a].lane->wanted_drafts > entries_[b].lane->wanted_drafts;
  });
}

int64_t HostStepper::begin_draft(int64_t pass) {
  if (pass == 0) list_drafters();
  next_tokens_.clear();
  sequences_.clear();
  end_rows_.clear();
  for (const size_t i : drafters_) {
    const Entry& entry = entries_[i];
    const Lane& lane = *entry.lane;
    if (lane.wanted_drafts <= pass) break;
    const auto row = static_cast<int32_t>(next_tokens_.size());
    sequences_.push_back({row, 1, lane.position - 1 + static_cast<int32_t>(pass), -1, {}, lane.pages});
    next_tokens_.push_back(pass == 0 ? lane.last_token : lane.drafts[static_cast<size_t>(pass) - 1]);
    end_rows_.push_back(entry.first + lane.position - entry.position - 1);
  }
  const auto rows = static_cast<int64_t>(next_tokens_.size());
  if (rows == 0) return 0;
  next_tokens_.resize(static_cast<size_t>(drafting_rows(rows)), 0);
  parts_.bind({next_tokens_, sequences_, {}}, pass == 0 ? StepPart::kFirstDraft : StepPart::kDraft);
  return static_cast<int64_t>(next_tokens_.size());
}

void HostStepper::gather_ends(const Tensor& x, const Tensor& out) {
  // Padding takes the first row again.
  while (static_cast<int64_t>(end_rows_.size()) < out.rows) end_rows_.push_back(end_rows_.front());
  parts_.gather(x, end_rows_, out);
}

void HostStepper::draft(int64_t pass, const Tensor& computed) {
  const auto keep = [&](size_t i, int32_t token) {
    Lane& lane = *entries_[drafters_[i]].lane;
    lane.drafts[static_cast<size_t>(pass)] = token;
    lane.draft_count = static_cast<int32_t>(pass) + 1;
  };
  if (parts_.choose) {
    static const ops::SamplingParams greedy = [] {
      ops::SamplingParams params;
      params.temperature = 0;
      return params;
    }();
    choices_.clear();
    for (size_t i = 0; i < sequences_.size(); ++i) {
      choices_.push_back({static_cast<int64_t>(i),
                          {.params = greedy, .defined_tokens = entries_[drafters_[i]].lane->request.defined_tokens}});
    }
    const std::span<Chosen> chosen = std::span(chosen_).first(choices_.size());
    if (parts_.choose(computed, choices_, chosen, std::span(errors_).first(choices_.size()))) {
      // Where no token can be chosen any draft will do.
      for (size_t i = 0; i < chosen.size(); ++i) keep(i, std::max(chosen[i].token, 0));
      return;
    }
  }
  const Tensor logits = parts_.fetch(computed);
  for_entries(sequences_.size(), [&](size_t i, Sampler&) {
    const Lane& lane = *entries_[drafters_[i]].lane;
    const std::span<const float> row(logits.f32(static_cast<int64_t>(i)), static_cast<size_t>(logits.cols));
    keep(i, Sampler::most_probable(row, lane.request.defined_tokens));
  });
}

}  // namespace

std::unique_ptr<ops::Stepper> make_host_stepper(const ops::StepLimits& limits, HostStepParts parts) {
  return std::make_unique<HostStepper>(limits, std::move(parts));
}

}  // namespace fourfold::cpu
