#include "model/ranked_stepper.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/console.h"

namespace fourfold::model {
namespace {

using std::chrono::milliseconds;

// Between looks at ranks while one is waited for.
constexpr milliseconds kSlice{20};
// Of a process whose step hangs, as `serve` ends.
constexpr int kStuckStatus = 4;
// For ranks to end their step once the group has failed.
constexpr milliseconds kGrace{1000};

class RankedStepper final : public ops::Stepper {
 public:
  RankedStepper(std::shared_ptr<ranks::Group> group, std::vector<std::unique_ptr<ops::Stepper>> steppers)
      : group_(std::move(group)), steppers_(std::move(steppers)), outcomes_(steppers_.size()) {}

  // A thread that is in a call which never returns cannot be ended, and what it holds not be freed. A process that
  // waits for it is one that nobody can use and that keeps its memory: it ends here.
  ~RankedStepper() override {
    for (milliseconds waited{0}; !stuck_.empty(); waited += kSlice) {
      std::erase_if(stuck_, [&](size_t rank) { return steppers_[rank]->ended(stuck_ticket_, kSlice); });
      if (stuck_.empty() || waited < group_->patience()) continue;
      eprint("fourfold: {}; rank {} does not come back, the process ends\n", group_->cause(), stuck_[0]);
      std::_Exit(kStuckStatus);
    }
  }
  RankedStepper(const RankedStepper&) = delete;
  RankedStepper& operator=(const RankedStepper&) = delete;

  const ops::StepLimits& limits() const override { return steppers_[0]->limits(); }

  ops::Ticket launch(const ops::StepPlan& plan) override {
    const ops::Ticket ticket = next_++;
    if (broken_) return ticket;  // its outcome is the cause
    for (const auto& stepper : steppers_) FF_ASSERT(stepper->launch(plan) == ticket);
    return ticket;
  }

  void supply_masks(ops::Ticket ticket, int32_t lane, std::span<const uint32_t> rows) override {
    if (broken_) return;
    for (const auto& stepper : steppers_) stepper->supply_masks(ticket, lane, rows);
  }

  const ops::StepOutcome& wait(ops::Ticket ticket) override {
    if (!broken_) collect(ticket);
    if (!broken_) compare();
    if (!broken_) return *outcomes_[0];
    failure_ = {};
    failure_.error = group_->cause();
    return failure_;
  }

  bool ended(ops::Ticket ticket, milliseconds patience) override {
    return broken_ || std::all_of(steppers_.begin(), steppers_.end(),
                                  [&](const auto& stepper) { return stepper->ended(ticket, patience); });
  }

 private:
  // The outcomes of all ranks. Where one does not end while others have, nobody else finds out: it is in no meeting.
  void collect(ops::Ticket ticket) {
    std::fill(outcomes_.begin(), outcomes_.end(), nullptr);
    size_t left = steppers_.size();
    milliseconds waited{0}, failed{0};  // since the first rank ended; since the group failed
    while (left > 0) {
      bool first = true;  // of those that have not ended: waited for
      for (size_t rank = 0; rank < steppers_.size(); ++rank) {
        if (outcomes_[rank] != nullptr) continue;
        if (!steppers_[rank]->ended(ticket, first ? kSlice : milliseconds(0))) {
          if (first) {
            if (left < steppers_.size()) waited += kSlice;
            if (group_->failed()) failed += kSlice;
          }
          first = false;
          continue;
        }
        outcomes_[rank] = &steppers_[rank]->wait(ticket);
        --left;
        if (!outcomes_[rank]->error.empty()) group_->fail(static_cast<int64_t>(rank), outcomes_[rank]->error);
      }
      if (left > 0 && waited >= group_->patience() && !group_->failed()) {
        const auto stuck = std::find(outcomes_.begin(), outcomes_.end(), nullptr) - outcomes_.begin();
        group_->fail(stuck, fmt::format("has not ended its step {:.1f} s after another rank",
                                        std::chrono::duration<double>(waited).count()));
      }
      if (left == 0 || failed < kGrace) continue;
      // A rank is gone; nobody asks its stepper for steps any more.
      for (size_t rank = 0; rank < steppers_.size(); ++rank) {
        if (outcomes_[rank] == nullptr) stuck_.push_back(rank);
      }
      stuck_ticket_ = ticket;
      break;
    }
    broken_ = group_->failed();
  }

  // Ranks compute with the same bits, so they choose the same tokens. Where they have not, what is in their caches is
  // not of one sequence.
  void compare() {
    const auto same = [](const ops::LaneOutcome& a, const ops::LaneOutcome& b) {
      return a.tokens == b.tokens && a.drafts == b.drafts && a.position == b.position && a.state == b.state &&
             a.ended == b.ended;
    };
    for (size_t rank = 1; rank < outcomes_.size(); ++rank) {
      if (std::equal(outcomes_[0]->lanes.begin(), outcomes_[0]->lanes.end(), outcomes_[rank]->lanes.begin(),
                     outcomes_[rank]->lanes.end(), same)) {
        continue;
      }
      group_->fail(static_cast<int64_t>(rank), "it chose other tokens than rank 0");
      broken_ = true;
    }
  }

  std::shared_ptr<ranks::Group> group_;
  std::vector<std::unique_ptr<ops::Stepper>> steppers_;
  std::vector<const ops::StepOutcome*> outcomes_;  // of the step last waited for, by rank
  ops::StepOutcome failure_;
  ops::Ticket next_ = 1;
  bool broken_ = false;
  std::vector<size_t> stuck_;  // ranks that were given up in this step
  ops::Ticket stuck_ticket_ = 0;
};

}  // namespace

std::unique_ptr<ops::Stepper> make_ranked_stepper(std::shared_ptr<ranks::Group> group,
                                                  std::vector<std::unique_ptr<ops::Stepper>> steppers) {
  return std::make_unique<RankedStepper>(std::move(group), std::move(steppers));
}

}  // namespace fourfold::model
