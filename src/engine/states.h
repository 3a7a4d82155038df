// The slots of recurrent state: which are free and which belong to a running sequence.
//
// Invariants: every slot is either free or taken, exactly once; free() + used() == total().
#pragma once

#include <cstdint>
#include <vector>

namespace fourfold::engine {

class SlotAllocator {
 public:
  explicit SlotAllocator(int64_t slots);

  int64_t total() const { return static_cast<int64_t>(taken_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return used_; }

  int32_t take();  // -1 when none is free
  void release(int32_t slot);

  void check() const;  // asserts the invariants

 private:
  int64_t used_ = 0;
  std::vector<int32_t> free_;
  std::vector<bool> taken_;
};

}  // namespace fourfold::engine
