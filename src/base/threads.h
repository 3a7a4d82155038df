// A fork-join thread pool for compute: a decode step has hundreds of short parallel regions, so workers spin for a
// while before they sleep, and a region costs well under a microsecond while they are awake.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace fourfold {

// In a loop that waits for another thread.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // some 15 ns; `yield` costs nothing and waits for nothing
#else
  std::this_thread::yield();
#endif
}

// Of processors (numbers as Linux has them) those with at least half of the largest capacity, or of unknown capacity:
// threads take pieces of work from each other, so a slower processor helps until everyone waits for its last piece.
// `root`: where sys/devices/system/cpu is, with a slash at its end.
std::vector<int> helpful_processors(const std::vector<int>& processors, const std::string& root = "/");

class ThreadPool {
 public:
  // `threads` includes the calling thread; 0 means default_threads().
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs fn(thread) once on each thread, thread = 0 .. size()-1, and returns when all are done. The first exception is
  // rethrown on the caller. Not reentrant: one region at a time.
  template <typename F>
  void run(F&& fn) {
    run_erased(&fn, call<F>, true);
  }

  // As run(), for work that threads take from each other until there is none: threads that have not begun when the
  // caller is done are left out. On a machine with other work, nobody waits for a thread that has no processor.
  template <typename F>
  void share(F&& fn) {
    run_erased(&fn, call<F>, false);
  }
  // Calls fn(begin, end) over disjoint pieces of [0, n), at most `grain` long, handed out as threads become free.
  template <typename F>
  void parallel_for(int64_t n, int64_t grain, F&& fn) {
    if (size() == 1 || n <= grain) {
      for (int64_t begin = 0; begin < n; begin += grain) fn(begin, begin + grain < n ? begin + grain : n);
      return;
    }
    std::atomic<int64_t> next{0};
    share([&](int) {
      for (;;) {
        const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= n) return;
        fn(begin, begin + grain < n ? begin + grain : n);
      }
    });
  }

  // fn(thread, begin, end) over disjoint pieces of [0, n), at most `grain` long. Each thread begins with a range of its
  // own, [split(t), split(t + 1)), and takes its pieces from the front in order, so that it reads memory in one stream;
  // the last pieces are smaller; pieces have an even length, or one item, where `grain` and what is left allow it. A
  // thread that is done takes pieces from the back of the others' ranges.
  // split(0) = 0, split(size()) = n < 2^32, and it never falls.
  template <typename S, typename F>
  void parallel_ranges(int64_t n, int64_t grain, S&& split, F&& fn) {
    const int threads = size();
    if (threads == 1 || n <= 1) {
      for (int64_t begin = 0; begin < n; begin += grain) fn(0, begin, begin + grain < n ? begin + grain : n);
      return;
    }
    for (int t = 0; t < threads; ++t) {
      ranges_[static_cast<size_t>(t)].bounds.store(pack(split(t), split(t + 1)), std::memory_order_relaxed);
    }
    share([&](int thread) {
      int64_t begin = 0;
      int64_t end = 0;
      while (take(thread, grain, true, begin, end)) fn(thread, begin, end);
      for (int i = 1; i < threads; ++i) {
        while (take((thread + i) % threads, grain, false, begin, end)) fn(thread, begin, end);
      }
    });
  }
  // Ranges of the same length.
  template <typename F>
  void parallel_ranges(int64_t n, int64_t grain, F&& fn) {
    parallel_ranges(
        n, grain, [&](int t) { return n * t / size(); }, fn);
  }

  // FOURFOLD_THREADS, or the processors this process may run on that help (helpful_processors()).
  static int default_threads();

 private:
  // What threads write lies this far apart: lines of arm64 processors are 64 or 128 bytes.
#if defined(__aarch64__)
  static constexpr size_t kLine = 128;
#else
  static constexpr size_t kLine = 64;
#endif
  using Entry = void (*)(void* context, int thread);
  template <typename F>
  static void call(void* context, int thread) {
    (*static_cast<std::remove_reference_t<F>*>(context))(thread);
  }
  void run_erased(void* context, Entry entry, bool everyone);
  void work(int thread);
  void execute(int thread);

  // What is left of a thread's range: first item in the high half, end in the low one.
  struct alignas(kLine) Range {
    std::atomic<uint64_t> bounds{0};
  };
  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }
  // Takes at most `grain` items, and at most a quarter of what is left, from one end of a thread's range.
  bool take(int thread, int64_t grain, bool front, int64_t& begin, int64_t& end);

  // The last region that a worker began or was left out of, and the last one that it finished.
  struct alignas(kLine) Worker {
    std::atomic<uint64_t> begun{0};
    std::atomic<uint64_t> done{0};
  };

  std::vector<Range> ranges_;
  std::vector<Worker> states_;  // of thread 1 on
  std::vector<std::thread> workers_;
  void* context_ = nullptr;
  Entry entry_ = nullptr;
  std::atomic<uint64_t> epoch_{0};  // counts regions; a worker that sees it move has work
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
};

}  // namespace fourfold
