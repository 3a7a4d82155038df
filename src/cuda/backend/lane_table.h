// Lanes as the device has them (HostStepParts::move_lanes): where each stands, in a table on the device, which one
// kernel moves on behind a choice of tokens, and carries into the tables of what follows, which it copies.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/step/host_stepper.h"
#include "cuda/backend/memory.h"
#include "cuda/backend/step_tables.h"
#include "kernels/step/lanes_args.h"

namespace fourfold::cuda {

class LaneTable {
 public:
  explicit LaneTable(Card& card) : card_(card), uploads_(card, kUploadBlocks) {}

  // For so many lanes and rows of a step, with the kernel of lanes_source(). `counts`: of tokens, [lanes][vocabulary],
  // of lanes with penalties (step::SampleArgs::counts).
  void reserve(int64_t lanes, int64_t rows, const Kernel& kernel, const cuda::Buffer& counts, int64_t vocabulary);
  // For the next flush(), behind a choice: `chosen` are its tokens; `tables` those of the step.
  void move(std::span<const cpu::MovedLane> lanes, const StepTables& tables, const int* chosen);
  // Drafting passes begin; and behind the choice of drafts of each.
  void begin_passes() { passes_ = 0; }
  void drafted(const int* chosen);

  // For the next flush(): into the tables of the batch bound last; into rows to gather; into rows to choose for.
  void carry(std::span<const cpu::CarriedLane> lanes, const StepTables& tables);
  void gather_ends(std::span<const int32_t> lanes, int64_t rows, DeviceAddress table);
  void sample(int32_t lane, int row, DeviceAddress samples);
  // Whether there is something for it.
  bool waits() const { return args_.move.count > 0 || !pending_.empty(); }
  // Copies the tables as well, behind the move: what is launched from here on finds them as they should be. `kernel`:
  // of TableCopies.
  void flush(TableCopies& copies, const Kernel& kernel, Overlap overlap);
  void drop() {
    pending_.clear();
    args_.move.count = 0;
  }

  Uploads& uploads() { return uploads_; }

 private:
  // Two steps, each with a move and what it carries into a trunk, a feed and drafting passes.
  static constexpr size_t kUploadBlocks = 2 * (3 + ops::kMaxDrafts);
  void add(const step::CarryLane& carry) { pending_.push_back(carry); }
  void launch_pending(const step::TablesArgs& tables, Overlap overlap);

  Card& card_;
  Uploads uploads_;
  int* counts_ = nullptr;
  int64_t vocabulary_ = 0;
  cuda::Buffer states_;
  const Kernel* kernel_ = nullptr;
  std::vector<step::CarryLane> pending_;
  std::vector<step::MoveLane> moved_;
  std::vector<int> stops_;
  step::LanesArgs args_ = {};
  size_t passes_ = 0;  // whose drafts are known
};

}  // namespace fourfold::cuda
