// A fork-join thread pool for compute: a decode step has hundreds of short parallel regions, so workers spin for a
// while before they sleep, and a region costs well under a microsecond while they are awake.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace fourfold {

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
    run_erased(&fn, [](void* context, int thread) { (*static_cast<std::remove_reference_t<F>*>(context))(thread); });
  }

  // Calls fn(begin, end) over disjoint pieces of [0, n), at most `grain` long, handed out as threads become free.
  template <typename F>
  void parallel_for(int64_t n, int64_t grain, F&& fn) {
    if (size() == 1 || n <= grain) {
      for (int64_t begin = 0; begin < n; begin += grain) fn(begin, begin + grain < n ? begin + grain : n);
      return;
    }
    std::atomic<int64_t> next{0};
    run([&](int) {
      for (;;) {
        const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= n) return;
        fn(begin, begin + grain < n ? begin + grain : n);
      }
    });
  }

  // FOURFOLD_THREADS, or the processors this process may run on.
  static int default_threads();

 private:
  using Entry = void (*)(void* context, int thread);
  void run_erased(void* context, Entry entry);
  void work(int thread);
  void execute(int thread);

  std::vector<std::thread> workers_;
  void* context_ = nullptr;
  Entry entry_ = nullptr;
  std::atomic<uint64_t> epoch_{0};  // counts regions; a worker that sees it move has work
  std::atomic<int> pending_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
};

}  // namespace fourfold
