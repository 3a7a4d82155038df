#include "cuda/backend/lane_table.h"

#include <cstring>

#include "base/check.h"
#include "cuda/backend/sources.h"

namespace fourfold::cuda {
namespace {

static_assert(step::kMostPasses == ops::kMaxDrafts);

}  // namespace

void LaneTable::reserve(int64_t lanes, int64_t rows, const Kernel& kernel, const cuda::Buffer& counts,
                        int64_t vocabulary) {
  counts_ = counts.as<int>();
  vocabulary_ = vocabulary;
  const MemoryScope scope(card_.device, MemoryKind::kTables);
  states_ = cuda::Buffer(card_.device, static_cast<uint64_t>(lanes) * sizeof(step::LaneState), "lanes");
  states_.fill(card_.stream, 0);
  kernel_ = &kernel;
  args_.carry.states = states_.as<step::LaneState>();
  constexpr uint64_t kStops = 8;  // of a lane; more make room when they come
  uploads_.prepare(static_cast<uint64_t>(lanes) * (sizeof(step::MoveLane) + 2 * sizeof(step::CarryLane) + kStops * 4) +
                   static_cast<uint64_t>(rows) * sizeof(step::CarryLane));
}

void LaneTable::move(std::span<const cpu::MovedLane> lanes, const StepTables& tables, const int* chosen) {
  FF_ASSERT(!waits());
  moved_.clear();
  stops_.clear();
  for (const cpu::MovedLane& m : lanes) {
    FF_ASSERT(m.count <= step::kMostChosen);
    moved_.push_back({m.lane, m.prompt ? -1 : tables.place_of_sequence(m.sequence), m.first, m.count, m.choice,
                      m.position, m.state, static_cast<int>(stops_.size()), static_cast<int>(m.stop_tokens.size()),
                      m.counted ? 1 : 0, m.puts_off ? 1 : 0});
    stops_.insert(stops_.end(), m.stop_tokens.begin(), m.stop_tokens.end());
  }
  const size_t bytes = moved_.size() * sizeof(moved_[0]), stop_bytes = stops_.size() * sizeof(int);
  uint8_t* to = uploads_.prepare(bytes + stop_bytes);
  std::memcpy(to, moved_.data(), bytes);
  if (stop_bytes > 0) std::memcpy(to + bytes, stops_.data(), stop_bytes);
  const auto* at = static_cast<const uint8_t*>(uploads_.take(bytes + stop_bytes).from);
  args_.move = {reinterpret_cast<const step::MoveLane*>(at),
                static_cast<int>(moved_.size()),
                reinterpret_cast<const int*>(at + bytes),
                chosen,
                device_pointer<const int>(tables.tokens),
                device_pointer<const SequenceRows>(tables.sequences),
                device_pointer<const int>(tables.state_out),
                StepTables::kSlotStride,
                states_.as<step::LaneState>(),
                counts_,
                vocabulary_};
  args_.carry.chosen = chosen;
}

void LaneTable::drafted(const int* chosen) {
  FF_ASSERT(passes_ < step::kMostPasses);
  args_.carry.drafts[passes_++] = chosen;
}

void LaneTable::carry(std::span<const cpu::CarriedLane> lanes, const StepTables& tables) {
  using As = cpu::CarriedLane::As;
  args_.carry.tokens = device_pointer<int>(tables.tokens);
  args_.carry.sequences = device_pointer<SequenceRows>(tables.sequences);
  args_.carry.updates = device_pointer<StateUpdates>(tables.updates);
  for (const cpu::CarriedLane& c : lanes) {
    FF_ASSERT(c.as == As::kDrafts || c.count <= step::kMostChosen);
    const auto read = static_cast<size_t>(c.as == As::kGoesOn ? c.count - 1 : c.as == As::kDrafts ? c.pass : 0);
    FF_ASSERT(read <= passes_);
    const step::Carry as = c.as == As::kGoesOn ? step::Carry::kGoesOn
                           : c.as == As::kFed  ? step::Carry::kFed
                                               : step::Carry::kDrafts;
    const int place = c.sequence < 0 ? -1 : tables.place_of_sequence(c.sequence);
    add({as, c.lane, place, c.row, c.count, c.choice, c.drafter, c.pass});
  }
}

void LaneTable::gather_ends(std::span<const int32_t> lanes, int64_t rows, DeviceAddress table) {
  args_.carry.ends = device_pointer<int>(table);
  for (int64_t row = 0; row < rows; ++row) {
    const auto from = static_cast<size_t>(row) < lanes.size() ? static_cast<size_t>(row) : size_t{0};
    add({step::Carry::kEnd, lanes[from], -1, static_cast<int>(row), 1, 0, 0, 0});
  }
}

void LaneTable::sample(int32_t lane, int row, DeviceAddress samples) {
  args_.carry.samples = device_pointer<step::SampleRow>(samples);
  add({step::Carry::kSample, lane, -1, row, 1, 0, 0, 0});
}

void LaneTable::flush(TableCopies& copies, const Kernel& kernel, Overlap overlap) {
  if (args_.move.count > 0 && copies.large()) launch_pending({}, overlap);  // the copy engine must not be ahead of it
  const step::TablesArgs tables = copies.take(kernel, overlap);
  const size_t bytes = pending_.size() * sizeof(pending_[0]);
  if (bytes > 0) {
    std::memcpy(uploads_.prepare(bytes), pending_.data(), bytes);
    args_.carry.lanes = static_cast<const step::CarryLane*>(uploads_.take(bytes).from);
    args_.carry.count = static_cast<int>(pending_.size());
    pending_.clear();
  }
  launch_pending(tables, overlap);
}

void LaneTable::launch_pending(const step::TablesArgs& tables, Overlap overlap) {
  args_.tables = tables;
  launch(card_.stream, *kernel_, {1}, overlap, args_);
  card_.stream.end_overlap();
  args_.move.count = args_.carry.count = 0;
}

}  // namespace fourfold::cuda
