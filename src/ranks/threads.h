// One thread for each rank, for what is not a step: making backends, loading weights, caches, single forward passes. A
// rank's work of this kind is always on its own thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ranks/group.h"

namespace fourfold::ranks {

class Threads {
 public:
  explicit Threads(std::shared_ptr<Group> group);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // fn(rank) on every rank's thread; returns when all are done. What the first rank that throws throws fails the group,
  // so that nobody waits for it, and is rethrown here; `failed` is called as soon as that is certain, for whoever waits
  // elsewhere. One run at a time.
  void run(const std::function<void(int64_t)>& fn, const std::function<void()>& failed = {});

 private:
  void work(int64_t rank);

  std::shared_ptr<Group> group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int64_t)>* work_ = nullptr;
  const std::function<void()>* failed_ = nullptr;
  uint64_t runs_ = 0;
  int64_t busy_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace fourfold::ranks
