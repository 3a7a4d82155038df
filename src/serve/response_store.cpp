#include "serve/response_store.h"

#include "serve/api_error.h"

namespace fourfold::serve {

void ResponseStore::put(const std::string& id, StoredResponse response) {
  // What values take in memory beside their text is about as much again.
  const size_t bytes = 2 * (dump(response.messages).size() + dump(response.response).size());
  auto shared = std::make_shared<const StoredResponse>(std::move(response));
  const std::lock_guard lock(mutex_);
  if (bytes > max_bytes_) return;
  if (const auto place = places_.find(id); place != places_.end()) drop(place->second);
  entries_.push_back({id, bytes, std::move(shared)});
  places_[id] = std::prev(entries_.end());
  bytes_ += bytes;
  while (entries_.size() > max_responses_ || bytes_ > max_bytes_) drop(entries_.begin());
}

std::shared_ptr<const StoredResponse> ResponseStore::find(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto place = places_.find(id);
  return place == places_.end() ? nullptr : place->second->response;
}

bool ResponseStore::remove(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto place = places_.find(id);
  if (place == places_.end()) return false;
  drop(place->second);
  return true;
}

void ResponseStore::drop(std::list<Entry>::iterator entry) {
  bytes_ -= entry->bytes;
  places_.erase(entry->id);
  entries_.erase(entry);
}

}  // namespace fourfold::serve
