// Threads for what takes longer than the network's may wait: parsing, rendering, tokenising.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fourfold::serve {

class Workers {
 public:
  Workers(int threads, size_t max_queued);
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // False when as much as may is waiting, or after stop(). Work does not throw.
  bool submit(std::function<void()> work);
  // Ends what is being done, and drops the rest.
  void stop();

 private:
  void run();

  const size_t max_queued_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fourfold::serve
