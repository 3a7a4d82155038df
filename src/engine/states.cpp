#include "engine/states.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::engine {

SlotAllocator::SlotAllocator(int64_t slots) : taken_(static_cast<size_t>(slots)) {
  for (int64_t slot = slots - 1; slot >= 0; --slot) free_.push_back(static_cast<int32_t>(slot));
}

int32_t SlotAllocator::take() {
  if (free_.empty()) return -1;
  const int32_t slot = free_.back();
  free_.pop_back();
  FF_ASSERT(!taken_[slot]);
  taken_[slot] = true;
  ++used_;
  return slot;
}

void SlotAllocator::release(int32_t slot) {
  FF_ASSERT(slot >= 0 && slot < total() && taken_[slot]);
  taken_[slot] = false;
  --used_;
  free_.push_back(slot);
}

void SlotAllocator::check() const {
  FF_ASSERT(free() + used() == total());
  FF_ASSERT(std::count(taken_.begin(), taken_.end(), true) == used_);
  for (const int32_t slot : free_) FF_ASSERT(!taken_[slot]);
}

}  // namespace fourfold::engine
