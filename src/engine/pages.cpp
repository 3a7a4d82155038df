#include "engine/pages.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::engine {

PageAllocator::PageAllocator(int64_t pages, int64_t page_size)
    : page_size_(page_size), taken_(static_cast<size_t>(pages)) {
  FF_ASSERT(pages >= 0 && page_size > 0);
  free_.reserve(static_cast<size_t>(pages));
  for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

bool PageAllocator::grow(std::vector<int32_t>& pages, int64_t positions) {
  const int64_t more = pages_for(positions) - static_cast<int64_t>(pages.size());
  if (more > free()) return false;
  for (int64_t i = 0; i < more; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    FF_ASSERT(!taken_[page]);
    taken_[page] = true;
    ++used_;
    pages.push_back(page);
  }
  return true;
}

void PageAllocator::release(std::vector<int32_t>& pages) {
  // In reverse, so that a sequence that comes back gets the same pages in the same order.
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
    FF_ASSERT(*page >= 0 && *page < total() && taken_[*page]);
    taken_[*page] = false;
    --used_;
    free_.push_back(*page);
  }
  pages.clear();
}

void PageAllocator::check() const {
  FF_ASSERT(free() + used() == total());
  FF_ASSERT(std::count(taken_.begin(), taken_.end(), true) == used_);
  for (const int32_t page : free_) FF_ASSERT(!taken_[page]);
}

}  // namespace fourfold::engine
