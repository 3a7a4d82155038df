// The slots of recurrent state: which are free, and how many hold each of the others: the request whose state it is,
// the prefix cache, requests whose next step reads it. A slot with several holders may be read, not written.
//
// Invariants: a slot is free exactly when it has no holder; free() + used() == total().
#pragma once

#include <cstdint>
#include <vector>

namespace fourfold::engine {

class SlotAllocator {
 public:
  explicit SlotAllocator(int64_t slots);

  int64_t total() const { return static_cast<int64_t>(holders_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return total() - free(); }

  int32_t take();            // -1 when none is free
  void share(int32_t slot);  // one more holder
  void release(int32_t slot);
  int64_t holders(int32_t slot) const;
  bool writable(int32_t slot) const { return holders(slot) == 1; }

  void check() const;  // asserts the invariants

 private:
  std::vector<int32_t> free_;
  std::vector<int32_t> holders_;
};

}  // namespace fourfold::engine
