#include "serve/message_thread.h"

#include <fmt/format.h>

#include <utility>

#include "base/check.h"

namespace fourfold::serve {
namespace {

// What a thread has from the request that began it.
constexpr const char* kOfThread[] = {"system", "tools"};

}  // namespace

MessageThread::MessageThread(const Fields& fields, const Json& request, ResponseStore& store)
    : request_(request), store_(store) {
  const Json* thread = fields.object("thread");
  if (thread == nullptr) return;
  static constexpr FieldRule kRules[] = {{"type", Treatment::kHonoured}, {"previous_message_id", Treatment::kHonoured}};
  const Fields inner(*thread, kRules, "thread.");
  const std::string type = inner.string("type", 64).value_or("");
  if (type != "create" && type != "continue") {
    inner.refuse("type", fmt::format("is '{}', wanted create or continue", printable(type)));
  }
  kept_ = true;
  if (type == "create") return;
  const auto previous = inner.string("previous_message_id", 256);
  if (!previous) inner.refuse("previous_message_id", "is missing, the id of the message to go on from is wanted");
  for (const char* name : kOfThread) {
    if (fields.find(name) != nullptr) fields.refuse(name, "is the thread's, and cannot be given again");
  }
  const Json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    fields.refuse("messages", "is missing or empty, the messages behind the previous one are wanted");
  }
  const auto stored = store_.find(*previous);
  if (!stored) {
    ApiError error(404, fmt::format("there is no thread with the message {}, or not any more", printable(*previous)));
    error.param = "thread.previous_message_id";
    error.code = "thread_not_found";
    throw error;
  }
  joined_ = request_;
  joined_.update(stored->response);
  joined_["messages"] = stored->messages;
  for (const Json& message : *messages) joined_["messages"].push_back(message);
}

std::function<void(const Json&)> MessageThread::keeper(const std::string& id) const {
  if (!kept_) return nullptr;
  StoredResponse thread{request().at("messages"), Json::object()};
  for (const char* name : kOfThread) {
    if (const auto found = request().find(name); found != request().end()) thread.response[name] = *found;
  }
  return [&store = store_, id, thread = std::move(thread)](const Json& content) {
    StoredResponse stored = thread;
    stored.messages.push_back({{"role", "assistant"}, {"content", content}});
    store.put(id, std::move(stored));
  };
}

}  // namespace fourfold::serve
