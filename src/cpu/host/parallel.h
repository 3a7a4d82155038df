// Loops over rows and items on a thread pool.
#pragma once

#include <cstdint>

#include "base/threads.h"

namespace fourfold::cpu {

// fn(begin, end) over [0, n): on the calling thread when n items of about so many nanoseconds are not worth a parallel
// region.
template <typename F>
void for_each(ThreadPool& pool, int64_t n, double nanoseconds_each, F&& fn) {
  constexpr double kSerialBelow = 4000.0;
  if (n <= 0) return;
  if (pool.size() == 1 || static_cast<double>(n) * nanoseconds_each < kSerialBelow) {
    fn(int64_t{0}, n);
    return;
  }
  int64_t grain = n / (4 * pool.size());
  const auto least = static_cast<int64_t>(kSerialBelow / 4 / (nanoseconds_each > 0 ? nanoseconds_each : 1));
  if (grain < least) grain = least;
  if (grain < 1) grain = 1;
  pool.parallel_for(n, grain, fn);
}

// fn(thread, item) over [0, n) in parallel, each thread with items that follow each other.
template <typename F>
void for_ranges(ThreadPool& pool, int64_t n, F&& fn) {
  pool.parallel_ranges(n, 1, [&](int thread, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(thread, i);
  });
}

}  // namespace fourfold::cpu
