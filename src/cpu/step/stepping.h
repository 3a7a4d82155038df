// The host's stepper behind host_stepper.h: what its two halves share. host_stepper.cpp has the host's side and the
// thread that takes one step after the other, step_body.cpp what happens within a step.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/math.h"
#include "cpu/step/host_stepper.h"
#include "cpu/step/lane.h"

namespace fourfold::cpu::stepping {

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
  int32_t draft_list = 0;
  std::vector<LaneStartCopy> starts;  // by index of the work
  std::vector<int32_t> tokens, pages, states;
  std::vector<LaneOutcome> outcomes;
  ops::StepOutcome outcome;
  bool done = false;

  std::span<const int32_t> tokens_of(const Work& w) const { return std::span(tokens).subspan(w.tokens, w.token_count); }
  std::span<const int32_t> pages_of(const Work& w) const { return std::span(pages).subspan(w.pages, w.page_count); }
  std::span<const int32_t> states_of(const Work& w) const { return std::span(states).subspan(w.states, w.state_count); }
};

// A work of a step whose lane is live: its rows.
struct Entry {
  size_t work = 0;  // index into Step::work, and of its outcome
  Lane* lane = nullptr;
  int32_t first = 0, count = 0;
  int32_t first_logit = 0, logits = 0;  // among the rows whose logits are computed
  int32_t position = 0;                 // of the first row
  int32_t state_in = 0;
  bool chooses = false;
  bool goes_on = false;   // from the lane's own state
  bool puts_off = false;  // ops::Sequence has it
  bool carried = false;   // it begins where the backend's lane is: `position` is the furthest that this may be
  int32_t verified = 0;   // drafts on its rows
  int32_t drafts = 0;     // passes made for it, where they are made before its tokens are known
  int32_t end_position = 0, end_state = 0;  // of the lane, after the step
  ops::StateUpdates end_updates;
};

// A row of a prompt whose log-probabilities are asked for.
struct Reported {
  size_t entry = 0;  // index into Run::entries
  int32_t row = 0;   // of the entry
};

// A step that was begun.
struct Run {
  Step* step = nullptr;
  std::vector<Entry> entries;
  std::vector<Reported> reported;  // in the order of rows
  size_t reports = 0;              // of them, whose logits were asked for,
  size_t reports_known = 0;        // and which the host knows: all but the last group
  std::vector<int32_t> row_tokens, logit_rows;
  std::vector<CarriedRow> carried;
  std::vector<RowChoice> choices;  // what the backend was asked to choose
  bool asked = false;              // it was, and the answer was not collected
  std::vector<Chosen> chosen;      // the answer
  std::vector<std::string> errors;
  std::string failed;            // there is none: why
  bool needs_tokens = false;     // what follows the choice in its body depends on it
  bool ahead = false;            // the backend moves its lanes on: nothing in its body waits for tokens
  std::vector<size_t> drafters;  // indices of entries, those with most drafts to make first
  std::vector<int64_t> passes;   // whose drafts the host does not know yet
  bool under_way = false;        // all of it is launched, and its tokens are not known
  bool prepared = false;         // StepOutcome::prepared
  std::chrono::steady_clock::time_point begun;
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
  int64_t begin_report() override;
  void gather_reported(const Tensor& x, const Tensor& out) override;
  void report(const Tensor& logits) override;
  void gather_logit_rows(const Tensor& x, const Tensor& out) override;
  void choose(const Tensor& logits) override;
  void begin_feed() override;
  int64_t begin_draft(int64_t pass) override;
  void gather_ends(const Tensor& x, const Tensor& out) override;
  void draft(int64_t pass, const Tensor& logits) override;

 private:
  void run();
  Step* next_step();
  std::optional<bool> follows(bool there) const;
  bool may_follow(const Step& step) const;
  void begin(Run& run, Step& step);
  void settle(const std::string& failed = {});
  void finish(Run& run);
  void end(Run& run);
  void start_lanes(Step& step);
  std::span<const int32_t> slots_of(const Run& run, const Entry& entry) const;
  void make_states(const Run& run);
  ops::StepShape lay_out(Run& run);
  void wait_for_masks(const Entry& entry);
  // chosen(i): from the lane's i-th row; `counted`: the backend has counted those that are taken.
  template <typename F>
  void choose_for(Step& step, Entry& entry, bool counted, F&& chosen);
  CountedTokens counted_of(const Entry& entry, int32_t i, int32_t number) const;
  Chosen chosen_on_host(const Entry& entry, int32_t i, const Tensor& logits, Sampler& sampler);
  Choice choice_of(const Entry& entry, int32_t i, int64_t index) const;
  std::span<const uint32_t> mask_of(const Step& step, const Entry& entry, int32_t i) const;
  bool choose_later(const Tensor& logits);
  void leave_open(Run& run);
  std::span<Chosen> collect();
  void take_answer(Run& run);
  void look_at_ends(Run& run);
  void take_choices(Run& run);
  void move_on(const Step& step, Entry& entry);
  RowChoice report_of(const Reported& reported, int64_t row) const;
  void bind_reported(std::span<const Reported> reported);
  void take_reports(std::span<Chosen> chosen);
  void report_on_host(const Tensor& logits);
  bool keeps_lanes() const { return parts_.move_lanes != nullptr; }
  bool may_run_ahead(const Step& step) const;
  bool may_carry(const Step::Work& work) const;
  void carry_entry(const Step::Work& work, Entry& entry) const;
  void rebase(Run& run);
  void carry_trunk();
  void move_ahead();
  void feed_ahead();
  void bind_draft(int64_t pass, std::span<const CarriedRow> carried);
  void list_drafters();
  void list_drafters_ahead();
  int64_t begin_draft_ahead(int64_t pass);
  void keep_draft(Run& run, size_t drafter, int64_t pass, int32_t token);
  void take_drafts(Run& run);
  void drop_draft(Run& run);
  int64_t drafting_rows(int64_t lanes) const { return std::min(round_up(lanes, parts_.row_bucket), limits_.lanes); }
  // fn(index, sampler) for each of `count` entries, on the pool's threads where there are several.
  template <typename F>
  void for_entries(size_t count, F&& fn) {
    if (count <= 1) {
      if (count == 1) fn(size_t{0}, samplers_[0]);
      return;
    }
    std::atomic<size_t> next{0};
    parts_.pool->share([&](int thread) {
      for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1))
        fn(i, samplers_[static_cast<size_t>(thread)]);
    });
  }

  const ops::StepLimits limits_;
  const HostStepParts parts_;

  // Of the stepper's thread.
  std::vector<Lane> lanes_;
  std::vector<Sampler> samplers_;  // one a thread
  std::array<Run, 2> runs_;        // the one whose body runs, and the one before it
  Run* run_ = nullptr;             // whose body runs
  Run* open_ = nullptr;            // the one before, while its tokens are not known
  std::chrono::steady_clock::time_point last_end_;
  std::vector<int32_t> next_tokens_, end_rows_;
  std::vector<CarriedRow> carried_drafts_;
  std::vector<MovedLane> moved_;
  std::vector<CarriedLane> carried_lanes_;
  std::vector<size_t> uncollected_;  // of the choose_later() that were not collected: choices of each
  std::vector<RowChoice> draft_choices_, report_choices_;
  std::vector<int32_t> reported_rows_;
  std::vector<ops::LogitRows> reported_of_;
  std::vector<Chosen> chosen_;
  std::vector<std::string> errors_;
  std::vector<ops::Sequence> sequences_;
  std::vector<PutOffState> put_off_;  // states of lanes that have begun anew since
  std::vector<PutOffState> to_make_;
  std::vector<Lane*> left_;              // whose states were put off, and which the step does not go on from
  std::vector<int32_t> written_, read_;  // slots, by a step

  // Shared.
  std::mutex mutex_;
  std::condition_variable launched_, finished_, supplied_;
  std::array<Step, ops::kInFlight + 1> steps_;  // a ring: one more than under way, for the outcome last waited for
  ops::Ticket next_ticket_ = 1, next_run_ = 1, next_wait_ = 1;
  bool stopping_ = false;

  std::thread thread_;  // last: it starts when all else is there

  Step& step_of(ops::Ticket ticket) { return steps_[ticket % steps_.size()]; }
};

}  // namespace fourfold::cpu::stepping
