// From the engine's thread to the network's: all that one step has for its streams goes over at once.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "serve/http_server.h"

namespace fourfold::serve {

// Gathers whose events are to be taken. One piece of work is posted for all of them, so that a step wakes one thread
// once, and not one for each stream.
class Deliveries {
 public:
  // `work` is done on the exchange's line of work after the next pass(). From any thread.
  void add(std::shared_ptr<Exchange> exchange, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    gathered_.push_back({std::move(exchange), std::move(work)});
  }

  void pass() {
    std::vector<Delivery> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(gathered_);
      gathered_.reserve(all.size());
    }
    if (all.empty()) return;
    const std::shared_ptr<Exchange> first = all.front().exchange;
    first->post([all = std::move(all)] {
      for (const Delivery& one : all) one.exchange->dispatch(one.work);
    });
  }

 private:
  struct Delivery {
    std::shared_ptr<Exchange> exchange;
    std::function<void()> work;
  };

  std::mutex mutex_;
  std::vector<Delivery> gathered_;
};

}  // namespace fourfold::serve
