#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <fstream>
#include <utility>

#include "base/check.h"
#include "base/env.h"
#include "base/math.h"

namespace fourfold {
namespace {

// About 50 us of spinning, then yielding: longer than the gaps between the operations of one step, short enough that a
// machine with fewer processors than threads still makes progress.
constexpr int kSpins = 4000;
constexpr int kYields = 200;

// Those this process may run on; empty where the system does not tell.
std::vector<int> allowed_processors() {
  cpu_set_t set;
  std::vector<int> processors;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return processors;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) processors.push_back(i);
  }
  return processors;
}

}  // namespace

std::vector<int> helpful_processors(const std::vector<int>& processors, const std::string& root) {
  const auto capacity = [&](int processor) {
    std::ifstream file(root + "sys/devices/system/cpu/cpu" + std::to_string(processor) + "/cpu_capacity");
    int64_t value = 0;
    return file >> value ? value : int64_t{0};
  };
  int64_t largest = 0;
  for (const int processor : processors) largest = std::max(largest, capacity(processor));
  std::vector<int> helpful;
  for (const int processor : processors) {
    const int64_t own = capacity(processor);
    if (own == 0 || 2 * own >= largest) helpful.push_back(processor);
  }
  return helpful;
}

namespace {

// Where a pool leaves out little processors, its workers keep away from them: one there would be waited for. Empty:
// they run anywhere.
std::vector<int> processors_of_workers(size_t threads) {
  const std::vector<int> allowed = allowed_processors();
  std::vector<int> helpful = helpful_processors(allowed);
  if (helpful.size() == allowed.size() || threads > helpful.size()) return {};
  return helpful;
}

void stay_on(const std::vector<int>& processors) {
  if (processors.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) CPU_SET(processor, &set);
  ::sched_setaffinity(0, sizeof(set), &set);  // only a wish
}

}  // namespace

int ThreadPool::default_threads() {
  const int available = std::max(1, static_cast<int>(helpful_processors(allowed_processors()).size()));
  if (const auto value = env("FOURFOLD_THREADS")) {
    int threads = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), threads);
    if (error != std::errc() || end != value->data() + value->size() || threads < 1 || threads > 1024) {
      fail("FOURFOLD_THREADS is '{}', wanted a number from 1 to 1024", printable(*value));
    }
    return threads;
  }
  return available;
}

ThreadPool::ThreadPool(int threads)
    : ranges_(static_cast<size_t>(threads > 0 ? threads : default_threads())), states_(ranges_.size() - 1) {
  const std::vector<int> processors = processors_of_workers(ranges_.size());
  for (int i = 1; i < static_cast<int>(ranges_.size()); ++i) {
    workers_.emplace_back([this, i, processors] {
      stay_on(processors);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::execute(int thread) {
  try {
    entry_(context_, thread);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

bool ThreadPool::take(int thread, int64_t grain, bool front, int64_t& begin, int64_t& end) {
  std::atomic<uint64_t>& bounds = ranges_[static_cast<size_t>(thread)].bounds;
  uint64_t now = bounds.load(std::memory_order_relaxed);
  for (;;) {
    begin = static_cast<int64_t>(now >> 32);
    end = static_cast<int64_t>(now & 0xffffffff);
    if (begin >= end) return false;
    int64_t count = std::clamp<int64_t>((end - begin + 3) / 4, 1, grain);
    if (count > 1) count = std::min({round_up(count, 2), grain, end - begin});
    const uint64_t rest = front ? pack(begin + count, end) : pack(begin, end - count);
    if (bounds.compare_exchange_weak(now, rest, std::memory_order_relaxed)) {
      if (front) {
        end = begin + count;
      } else {
        begin = end - count;
      }
      return true;
    }
  }
}

void ThreadPool::run_erased(void* context, Entry entry, bool everyone) {
  if (workers_.empty()) {
    entry(context, 0);
    return;
  }
  context_ = context;
  entry_ = entry;
  const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  epoch_.store(epoch, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  execute(0);
  int spin = 0;
  for (Worker& worker : states_) {
    uint64_t before = epoch - 1;
    if (!everyone && worker.begun.compare_exchange_strong(before, epoch, std::memory_order_acq_rel)) continue;
    for (; worker.done.load(std::memory_order_acquire) != epoch; ++spin) {
      if (spin < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::work(int thread) {
  Worker& state = states_[static_cast<size_t>(thread - 1)];
  uint64_t seen = 0;
  for (;;) {
    uint64_t now = 0;
    for (int spin = 0;; ++spin) {
      now = epoch_.load(std::memory_order_acquire);
      if (now != seen) break;
      if (spin < kSpins) {
        relax();
      } else if (spin < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    seen = now;
    if (stop_.load()) return;
    // Region `now` has not ended while this worker is neither in it nor left out of it, so what follows belongs to it.
    uint64_t before = now - 1;
    if (!state.begun.compare_exchange_strong(before, now, std::memory_order_acq_rel)) continue;
    execute(thread);
    state.done.store(now, std::memory_order_release);
  }
}

}  // namespace fourfold
