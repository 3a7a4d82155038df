// Times the operations of a step by kind. The step is recorded once whole and once for each kind with every other
// operation left out, and each recording is replayed: so kernels are timed as they run in service, weights cold, the
// next kernel's start overlapping the end of the one before.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/backend/memory.h"
#include "cuda/backend/timeline.h"
#include "ops/cost.h"
#include "ops/ops.h"

namespace fourfold::cuda {

class OpTimer {
 public:
  explicit OpTimer(Card& card) : card_(card) {}

  // `run` calls forward and what ends it.
  ops::OperationTimes measure(const std::function<void()>& run);

  // Of a whole step alone: the median of so many rounds of so many replays.
  double step(const std::function<void()>& run, int rounds, int replays) { return time_of(run, rounds, replays); }

  // `run` once with the times between its operations.
  CardTimeline timeline(const std::function<void()>& run);

  // Within these, by the backend:
  void begin_recording() { recording_.emplace(card_.stream); }
  // An operation is to be launched: false if it is left out.
  bool takes(std::string_view name, const ops::Cost& cost);
  bool one_operation() const { return !only_.empty(); }

 private:
  double time_of(const std::function<void()>& run, int rounds, int replays);
  void stamp();

  Card& card_;
  std::string only_;  // empty: all of them
  bool listing_ = false;
  std::vector<ops::OperationTime> seen_;
  std::optional<Recording> recording_;

  const Kernel* stamp_ = nullptr;  // within timeline()
  Buffer times_;                   // ns
  int stamps_ = 0;
  std::vector<TimelineSpan> spans_;
};

}  // namespace fourfold::cuda
