#include "engine/pages.h"

#include <algorithm>

#include "base/check.h"

namespace fourfold::engine {

PageAllocator::PageAllocator(int64_t pages, int64_t page_size)
    : page_size_(page_size), pages_(static_cast<size_t>(pages)) {
  FF_ASSERT(pages >= 0 && page_size > 0);
  free_.reserve(static_cast<size_t>(pages));
  for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

PageAllocator::Page& PageAllocator::used_page(int32_t page) {
  FF_ASSERT(page >= 0 && page < total());
  Page& p = pages_[static_cast<size_t>(page)];
  FF_ASSERT(p.holders > 0 || p.places > 0);
  return p;
}

bool PageAllocator::free_if_unused(int32_t page) {
  Page& p = pages_[static_cast<size_t>(page)];
  if (p.holders > 0 || p.places > 0) return false;
  p.sealed = 0;
  free_.push_back(page);
  return true;
}

bool PageAllocator::grow(std::vector<int32_t>& pages, int64_t positions) {
  const int64_t more = pages_for(positions) - static_cast<int64_t>(pages.size());
  if (more > free()) return false;
  for (int64_t i = 0; i < more; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    Page& p = pages_[static_cast<size_t>(page)];
    FF_ASSERT(p.holders == 0 && p.places == 0 && p.sealed == 0);
    p.holders = 1;
    pages.push_back(page);
  }
  return true;
}

void PageAllocator::hold(int32_t page) {
  Page& p = used_page(page);
  if (p.holders++ == 0) --only_cached_;
}

void PageAllocator::share(int32_t page) {
  hold(page);
  pages_[static_cast<size_t>(page)].sealed = static_cast<int32_t>(page_size_);
}

void PageAllocator::release(int32_t page) {
  Page& p = used_page(page);
  FF_ASSERT(p.holders > 0);
  if (--p.holders == 0 && p.places > 0) ++only_cached_;
  free_if_unused(page);
}

void PageAllocator::release(std::vector<int32_t>& pages) {
  // In reverse, so that a sequence that comes back gets the same pages in the same order.
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) release(*page);
  pages.clear();
}

bool PageAllocator::writable(int32_t page, int64_t offset) const {
  FF_ASSERT(page >= 0 && page < total());
  const Page& p = pages_[static_cast<size_t>(page)];
  return p.holders > 0 && offset >= p.sealed;
}

void PageAllocator::cache(int32_t page, int64_t positions) {
  Page& p = used_page(page);
  FF_ASSERT(positions > 0 && positions <= page_size_);
  if (p.places++ == 0) {
    ++cached_;
    FF_ASSERT(p.holders > 0);
  }
  p.sealed = std::max(p.sealed, static_cast<int32_t>(positions));
}

bool PageAllocator::uncache(int32_t page) {
  Page& p = used_page(page);
  FF_ASSERT(p.places > 0);
  if (--p.places == 0) {
    --cached_;
    if (p.holders == 0) --only_cached_;
  }
  return free_if_unused(page);
}

int64_t PageAllocator::holders(int32_t page) const { return pages_.at(static_cast<size_t>(page)).holders; }
int64_t PageAllocator::places(int32_t page) const { return pages_.at(static_cast<size_t>(page)).places; }

void PageAllocator::check() const {
  int64_t used_pages = 0, cached_pages = 0, only_cached_pages = 0;
  for (const Page& p : pages_) {
    FF_ASSERT(p.holders >= 0 && p.places >= 0 && p.sealed >= 0 && p.sealed <= page_size_);
    const bool is_used = p.holders > 0 || p.places > 0;
    FF_ASSERT(is_used || p.sealed == 0);
    FF_ASSERT(p.places == 0 || p.sealed > 0);
    used_pages += is_used ? 1 : 0;
    cached_pages += p.places > 0 ? 1 : 0;
    only_cached_pages += p.places > 0 && p.holders == 0 ? 1 : 0;
  }
  FF_ASSERT(used_pages == used() && cached_pages == cached_ && only_cached_pages == only_cached_);
  std::vector<bool> seen(pages_.size());
  for (const int32_t page : free_) {
    const Page& p = pages_.at(static_cast<size_t>(page));
    FF_ASSERT(p.holders == 0 && p.places == 0 && !seen[static_cast<size_t>(page)]);
    seen[static_cast<size_t>(page)] = true;
  }
}

}  // namespace fourfold::engine
