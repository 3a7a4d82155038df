// Where the time goes while a model is loaded onto a device; `fourfold bench load` shows it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fourfold::cuda {

// Nanoseconds.
struct LoadTimes {
  using Sum = std::atomic<int64_t>;
  Sum allocating{0};    // memory of the device
  Sum page_locking{0};  // memory of the host, by whichever thread
  Sum small_copies{0};  // tables beside weights: the caller waits for them
  Sum caller_waits{0};  // the caller, for the feed: its queue is full, or everything is wanted
  Sum ending{0};        // giving back what was only for loading
  // Of the feed's time; what is left is its own work.
  Sum feed_idle{0};    // there is nothing to read, because nobody has said what
  Sum feed_reads{0};   // files are read and not there yet
  Sum feed_copies{0};  // all blocks are on their way to the device
  Sum feed_memory{0};  // there are no blocks yet
  std::atomic<int64_t> blocks{0};

  void reset() {
    for (Sum* sum : {&allocating, &page_locking, &small_copies, &caller_waits, &ending, &feed_idle, &feed_reads,
                     &feed_copies, &feed_memory, &blocks}) {
      *sum = 0;
    }
  }
};

// Adds the time in which it is there.
class LoadWatch {
 public:
  explicit LoadWatch(LoadTimes::Sum& sum) : sum_(sum) {}
  ~LoadWatch() { sum_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count(); }
  LoadWatch(const LoadWatch&) = delete;
  LoadWatch& operator=(const LoadWatch&) = delete;

 private:
  LoadTimes::Sum& sum_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace fourfold::cuda
