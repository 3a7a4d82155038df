#include "ranks/threads.h"

#include <utility>

namespace fourfold::ranks {

Threads::Threads(std::shared_ptr<Group> group) : group_(std::move(group)) {
  for (int64_t rank = 0; rank < group_->ranks(); ++rank) threads_.emplace_back([this, rank] { work(rank); });
}

Threads::~Threads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Threads::run(const std::function<void(int64_t)>& fn, const std::function<void()>& failed) {
  std::unique_lock lock(mutex_);
  work_ = &fn;
  failed_ = failed ? &failed : nullptr;
  busy_ = static_cast<int64_t>(threads_.size());
  ++runs_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return busy_ == 0; });
  work_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Threads::work(int64_t rank) {
  uint64_t seen = 0;
  for (;;) {
    const std::function<void(int64_t)>* fn = nullptr;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || runs_ != seen; });
      if (runs_ == seen) return;
      seen = runs_;
      fn = work_;
    }
    std::exception_ptr error;
    std::string cause;
    try {
      (*fn)(rank);
    } catch (const std::exception& thrown) {
      error = std::current_exception();
      cause = thrown.what();
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = error;
      }
      group_->fail(rank, cause);  // the others fail by it, so they come later
      if (failed_ != nullptr) (*failed_)();
    }
    {
      const std::lock_guard lock(mutex_);
      --busy_;
    }
    changed_.notify_all();
  }
}

}  // namespace fourfold::ranks
