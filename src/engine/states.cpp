#include "engine/states.h"

#include "base/check.h"

namespace fourfold::engine {

SlotAllocator::SlotAllocator(int64_t slots) : holders_(static_cast<size_t>(slots)) {
  FF_ASSERT(slots >= 0);
  free_.reserve(static_cast<size_t>(slots));
  for (int64_t slot = slots - 1; slot >= 0; --slot) free_.push_back(static_cast<int32_t>(slot));
}

int32_t SlotAllocator::take() {
  if (free_.empty()) return -1;
  const int32_t slot = free_.back();
  free_.pop_back();
  FF_ASSERT(holders_[static_cast<size_t>(slot)] == 0);
  holders_[static_cast<size_t>(slot)] = 1;
  return slot;
}

void SlotAllocator::share(int32_t slot) {
  FF_ASSERT(holders(slot) > 0);
  ++holders_[static_cast<size_t>(slot)];
}

void SlotAllocator::release(int32_t slot) {
  FF_ASSERT(holders(slot) > 0);
  if (--holders_[static_cast<size_t>(slot)] == 0) free_.push_back(slot);
}

int64_t SlotAllocator::holders(int32_t slot) const {
  FF_ASSERT(slot >= 0 && slot < total());
  return holders_[static_cast<size_t>(slot)];
}

void SlotAllocator::check() const {
  int64_t used_slots = 0;
  for (const int32_t count : holders_) {
    FF_ASSERT(count >= 0);
    used_slots += count > 0 ? 1 : 0;
  }
  FF_ASSERT(used_slots == used());
  std::vector<bool> seen(holders_.size());
  for (const int32_t slot : free_) {
    FF_ASSERT(holders(slot) == 0 && !seen[static_cast<size_t>(slot)]);
    seen[static_cast<size_t>(slot)] = true;
  }
}

}  // namespace fourfold::engine
