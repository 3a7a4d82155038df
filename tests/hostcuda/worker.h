// The thread of the host driver's cards.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace fourfold::hostcuda {

// One thread that everything on the card runs on: the executor's static shared memory is this thread's own.
class Worker {
 public:
  Worker() : thread_([this] { loop(); }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  // Runs `work` there and waits for it.
  void run(const std::function<void()>& work) {
    std::unique_lock lock(mutex_);
    work_ = &work;
    changed_.notify_all();
    changed_.wait(lock, [this] { return work_ == nullptr; });
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || work_ != nullptr; });
      if (stop_) return;
      (*work_)();
      work_ = nullptr;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace fourfold::hostcuda
