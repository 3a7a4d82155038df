// Answers that later requests may go on from, by id: in memory, bounded, the oldest go first.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/json.h"

namespace fourfold::serve {

struct StoredResponse {
  Json messages;  // the conversation up to and with the answer, without instructions
  Json response;  // as it was answered; of a message thread, the fields that requests which go on leave out
};

// May be used from many threads.
class ResponseStore {
 public:
  explicit ResponseStore(size_t max_responses = 1000, size_t max_bytes = size_t{64} << 20)
      : max_responses_(max_responses), max_bytes_(max_bytes) {}

  void put(const std::string& id, StoredResponse response);
  std::shared_ptr<const StoredResponse> find(const std::string& id) const;  // null: unknown, or gone
  bool remove(const std::string& id);

 private:
  struct Entry {
    std::string id;
    size_t bytes;
    std::shared_ptr<const StoredResponse> response;
  };
  void drop(std::list<Entry>::iterator entry);

  const size_t max_responses_, max_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // the oldest first
  std::unordered_map<std::string, std::list<Entry>::iterator> places_;
  size_t bytes_ = 0;
};

}  // namespace fourfold::serve
