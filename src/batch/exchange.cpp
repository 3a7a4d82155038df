#include "batch/exchange.h"

namespace fourfold::batch {

void WorkLine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void WorkLine::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void WorkLine::post_at(Clock::time_point time, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    later_.emplace(time, std::move(work));
  }
  wake_.notify_one();
}

void WorkLine::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      while (!stopping_ && queue_.empty()) {
        if (later_.empty()) {
          wake_.wait(lock);
        } else if (later_.begin()->first > Clock::now()) {
          const auto next = later_.begin()->first;
          wake_.wait_until(lock, next);
        } else {
          queue_.push_back(std::move(later_.begin()->second));
          later_.erase(later_.begin());
        }
      }
      if (stopping_) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

MemoryExchange::~MemoryExchange() {
  serve::HttpResponse dropped;
  dropped.status = 500;
  respond(std::move(dropped));
}

void MemoryExchange::post(std::function<void()> work) {
  line_.post([self = shared_from_this(), work = std::move(work)] { work(); });
}

void MemoryExchange::respond(serve::HttpResponse response) {
  const auto gone = std::exchange(gone_, nullptr);  // may hold this exchange
  if (const auto done = std::exchange(done_, nullptr)) done(std::move(response));
}

void MemoryExchange::begin(int status, serve::Headers headers) {
  response_.status = status;
  response_.headers = std::move(headers);
}

void MemoryExchange::abort() {
  response_.status = 500;
  respond(std::move(response_));
}

void MemoryExchange::after(std::chrono::milliseconds time, std::function<void()> call) {
  const int64_t mine = ++timer_;
  line_.post_at(WorkLine::Clock::now() + time, [weak = weak_from_this(), mine, call = std::move(call)] {
    const auto self = weak.lock();
    if (self && self->timer_ == mine) call();
  });
}

}  // namespace fourfold::batch
