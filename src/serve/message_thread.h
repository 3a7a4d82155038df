// Conversations of the messages API that the server holds between requests: one that goes on sends what is new
// (Anthropic's beta message-threads-2026-08-12).
#pragma once

#include <functional>
#include <string>

#include "base/json.h"
#include "serve/fields.h"
#include "serve/response_store.h"

namespace fourfold::serve {

class MessageThread {
 public:
  // Reads the field `thread` of a request. An ApiError where it goes on from a message that is not known, or not any
  // more (404, thread_not_found), or brings what the thread has already. `request` and `store` must outlive it.
  MessageThread(const Fields& fields, const Json& request, ResponseStore& store);

  // The request with what the thread holds in front.
  const Json& request() const { return joined_.is_null() ? request_ : joined_; }
  // Keeps the conversation under the answer's id when it is given the answer's blocks. Null where nothing is kept.
  std::function<void(const Json& content)> keeper(const std::string& id) const;

 private:
  const Json& request_;
  ResponseStore& store_;
  Json joined_;
  bool kept_ = false;
};

}  // namespace fourfold::serve
