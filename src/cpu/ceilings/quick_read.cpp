#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "base/threads.h"
#include "cpu/ceilings.h"

namespace fourfold::cpu {

std::optional<double> quick_read_bandwidth(int threads, double most_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const std::span<const ReadLoop> loops = read_loops(best_isa());
  ThreadPool pool(threads);
  // On some virtual machines the first touch of a page is what takes the time.
  constexpr size_t kStep = size_t{2} << 20;
  const auto cache = static_cast<size_t>(std::max(last_level_cache_bytes(), kUnknownCacheBytes));
  const size_t wanted = std::max<size_t>(2 * cache, size_t{128} << 20);
  const size_t piece = ceil_div(static_cast<int64_t>(wanted / static_cast<size_t>(pool.size())), kStep) * kStep;
  const size_t reserved = piece * static_cast<size_t>(pool.size());
  void* memory = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("measuring the memory bandwidth: no {} bytes of memory", reserved);
  ::madvise(memory, reserved, MADV_HUGEPAGE);
  std::vector<size_t> touched(static_cast<size_t>(pool.size()));
  const auto start = Clock::now();
  pool.run([&](int thread) {  // each thread touches its own piece first, so that its pages lie close to it
    auto* mine = static_cast<char*>(memory) + static_cast<size_t>(thread) * piece;
    size_t done = 0;
    while (done < piece && seconds_since(start) < most_seconds) {
      for (size_t i = 0; i < kStep; i += 4096) mine[done + i] = static_cast<char>(i >> 12);
      done += kStep;
    }
    touched[static_cast<size_t>(thread)] = done;
  });
  const size_t bytes = std::accumulate(touched.begin(), touched.end(), size_t{0});
  if (bytes < wanted) {
    ::munmap(memory, reserved);
    return std::nullopt;
  }
  std::atomic<float> sink{0};
  double best = 0;
  for (int repeat = 0; repeat < 4; ++repeat) {
    const ReadLoop read = loops[static_cast<size_t>(repeat) % loops.size()];
    const auto begin = Clock::now();
    pool.run([&](int thread) {
      const char* mine = static_cast<const char*>(memory) + static_cast<size_t>(thread) * piece;
      sink.store(read(mine, static_cast<int64_t>(touched[static_cast<size_t>(thread)])), std::memory_order_relaxed);
    });
    best = std::max(best, static_cast<double>(bytes) / seconds_since(begin));
  }
  ::munmap(memory, reserved);
  return best;
}

}  // namespace fourfold::cpu
