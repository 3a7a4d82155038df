#include "engine/stream.h"

namespace fourfold::engine {
namespace {

class Stream final : public EventStream {
 public:
  Stream(uint64_t id, std::shared_ptr<Channel> channel, std::shared_ptr<Wakeup> wakeup)
      : id_(id), channel_(std::move(channel)), wakeup_(std::move(wakeup)) {}
  ~Stream() override { cancel(); }

  std::optional<Event> next(std::chrono::milliseconds timeout) override { return channel_->take(timeout); }
  uint64_t id() const override { return id_; }
  void cancel() override {
    if (channel_->cancel()) wakeup_->signal();
  }

 private:
  uint64_t id_;
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Wakeup> wakeup_;
};

}  // namespace

void Wakeup::signal() {
  {
    const std::lock_guard lock(mutex_);
    signalled_ = true;
  }
  condition_.notify_one();
}

void Wakeup::wait() {
  std::unique_lock lock(mutex_);
  condition_.wait(lock, [&] { return signalled_; });
  signalled_ = false;
}

void Wakeup::clear() {
  const std::lock_guard lock(mutex_);
  signalled_ = false;
}

void Channel::push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  condition_.notify_all();
  if (notify_) notify_();
}

std::optional<Event> Channel::take(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (events_.empty() && timeout.count() > 0) {
    condition_.wait_for(lock, timeout, [&] { return !events_.empty(); });
  }
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

std::unique_ptr<EventStream> make_stream(uint64_t id, std::shared_ptr<Channel> channel,
                                         std::shared_ptr<Wakeup> wakeup) {
  return std::make_unique<Stream>(id, std::move(channel), std::move(wakeup));
}

}  // namespace fourfold::engine
