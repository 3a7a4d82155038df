// The pages of the key/value cache: which are free and which belong to a sequence.
//
// Invariants: every page is either free or taken, exactly once; free() + used() == total().
#pragma once

#include <cstdint>
#include <vector>

namespace fourfold::engine {

class PageAllocator {
 public:
  // `pages` pages of `page_size` positions each.
  PageAllocator(int64_t pages, int64_t page_size);

  int64_t page_size() const { return page_size_; }
  int64_t total() const { return static_cast<int64_t>(taken_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return used_; }

  // Pages that hold `positions` positions.
  int64_t pages_for(int64_t positions) const { return (positions + page_size_ - 1) / page_size_; }

  // Appends pages to `pages` until it holds `positions` positions. All or nothing: false, and no change, when too few
  // are free.
  bool grow(std::vector<int32_t>& pages, int64_t positions);
  // Gives all of `pages` back and empties it.
  void release(std::vector<int32_t>& pages);

  // Asserts the invariants; linear in the number of pages.
  void check() const;

 private:
  int64_t page_size_;
  int64_t used_ = 0;
  std::vector<int32_t> free_;  // the last one is handed out first
  std::vector<bool> taken_;
};

}  // namespace fourfold::engine
