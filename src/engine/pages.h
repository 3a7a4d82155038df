// The pages of the key/value cache: which are free, and who holds the others.
//
// A page may have several holders: running requests (each counts once) and the prefix cache (each place in its tree
// counts once). It is free when nobody holds it. Positions of a page that somebody else may read are *sealed*: they are
// never written again, whereas the request that took the page goes on filling the positions behind them.
//
// Invariants: a page is free exactly when it has no holder; free() + used() == total(); only_cached() counts the used
// pages that no running request holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fourfold::engine {

class PageAllocator {
 public:
  // `pages` pages of `page_size` positions each.
  PageAllocator(int64_t pages, int64_t page_size);

  int64_t page_size() const { return page_size_; }
  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return total() - free(); }
  int64_t cached() const { return cached_; }            // pages that the prefix cache holds
  int64_t only_cached() const { return only_cached_; }  // of them, those that no running request holds

  // Pages that hold `positions` positions.
  int64_t pages_for(int64_t positions) const { return (positions + page_size_ - 1) / page_size_; }

  // ---- running requests

  // Appends new pages to `pages` until it holds `positions` positions. All or nothing: false, and no change, when too
  // few are free (PrefixCache::reclaim() frees some).
  bool grow(std::vector<int32_t>& pages, int64_t positions);
  // One more running request has the page as its own, whose positions are all filled: a fork, a hit.
  void share(int32_t page);
  // One more running request reads the page, in order to copy its first positions.
  void hold(int32_t page);
  void release(int32_t page);
  // Gives all of `pages` back and empties it.
  void release(std::vector<int32_t>& pages);

  // Whether a running request that holds the page may write its positions from `offset` on.
  bool writable(int32_t page, int64_t offset) const;

  // ---- the prefix cache

  // Another place of the tree holds the page, of which the first `positions` positions are filled.
  void cache(int32_t page, int64_t positions);
  // True when the page became free.
  bool uncache(int32_t page);

  int64_t holders(int32_t page) const;  // running requests
  int64_t places(int32_t page) const;   // of the tree

  // Asserts the invariants; linear in the number of pages.
  void check() const;

 private:
  struct Page {
    int32_t holders = 0;  // running requests
    int32_t places = 0;   // of the prefix cache's tree
    int32_t sealed = 0;   // positions [0, sealed) are not written again
  };
  Page& used_page(int32_t page);
  bool free_if_unused(int32_t page);

  int64_t page_size_;
  int64_t cached_ = 0, only_cached_ = 0;
  std::vector<int32_t> free_;  // the last one is handed out first
  std::vector<Page> pages_;
};

}  // namespace fourfold::engine
