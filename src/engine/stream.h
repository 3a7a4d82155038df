// The two ends of a request's events: the engine thread pushes, the caller's EventStream takes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "engine/engine.h"

namespace fourfold::engine {

// Wakes the engine thread. Shared with the streams, which may outlive the engine.
class Wakeup {
 public:
  void signal();
  // Returns at the first signal since the last return.
  void wait();
  // Takes a pending signal without waiting.
  void clear();

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool signalled_ = false;
};

class Channel {
 public:
  explicit Channel(std::function<void()> notify) : notify_(std::move(notify)) {}

  // Adds an event and calls notify, whose exceptions pass through: the event is there all the same.
  void push(Event event);
  std::optional<Event> take(std::chrono::milliseconds timeout);

  // True once, at the first call.
  bool cancel() { return !cancelled_.exchange(true); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<Event> events_;
  std::function<void()> notify_;
  std::atomic<bool> cancelled_{false};
};

std::unique_ptr<EventStream> make_stream(uint64_t id, std::shared_ptr<Channel> channel, std::shared_ptr<Wakeup> wakeup);

}  // namespace fourfold::engine
