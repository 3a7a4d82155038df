#include "serve/messages_answer.h"

#include <utility>

namespace fourfold::serve {

using Kind = text::OutputEvent::Kind;

namespace {

std::string event_line(const Json& json) {
  return fmt::format("event: {}\ndata: {}\n\n", json["type"].get<std::string>(), dump(json));
}

}  // namespace

MessagesAnswer::MessagesAnswer(const chat::ChatText& text, MessagesAnswerOptions options)
    : text_(text), options_(std::move(options)), stream_(text, options_.answer) {}

// Input is what was computed: the rest came from the cache.
Json MessagesAnswer::usage() const {
  return {{"input_tokens", options_.prompt_tokens - cached_tokens_},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", cached_tokens_},
          {"output_tokens", tokens_}};
}

void MessagesAnswer::begin(std::string& out) {
  out += event_line({{"type", "message_start"},
                     {"message",
                      {{"id", options_.id},
                       {"type", "message"},
                       {"role", "assistant"},
                       {"model", options_.model},
                       {"content", Json::array()},
                       {"stop_reason", nullptr},
                       {"stop_sequence", nullptr},
                       {"usage", usage()}}}});
  out += heartbeat();
}

std::string MessagesAnswer::heartbeat() const { return event_line({{"type", "ping"}}); }

bool MessagesAnswer::token(size_t, const engine::Event& event, std::string& out) {
  ++tokens_;
  if (options_.fields.ends(event.token, text_)) return true;
  emit(stream_.push(event.token), out);
  return !stream_.stop() && !one_call_;
}

void MessagesAnswer::open(Block block, Json start, std::string& out) {
  close(out);
  block_ = block;
  line_.clear();
  out += event_line({{"type", "content_block_start"}, {"index", blocks_++}, {"content_block", std::move(start)}});
}

void MessagesAnswer::text_delta(const char* type, const char* name, const std::string& text, std::string& out) {
  if (line_.empty()) {
    std::string line;
    delta({{"type", type}, {name, TextLine::place()}}, line);
    line_.set(line);
  }
  line_.append(text, out);
}

void MessagesAnswer::delta(Json content, std::string& out) {
  out += event_line({{"type", "content_block_delta"}, {"index", blocks_ - 1}, {"delta", std::move(content)}});
}

void MessagesAnswer::close(std::string& out) {
  if (block_ == Block::kNone) return;
  // Clients send thinking back with its signature, and want one.
  if (block_ == Block::kThinking) delta({{"type", "signature_delta"}, {"signature", options_.id}}, out);
  out += event_line({{"type", "content_block_stop"}, {"index", blocks_ - 1}});
  block_ = Block::kNone;
}

void MessagesAnswer::emit(const std::vector<text::OutputEvent>& events, std::string& out) {
  for (const text::OutputEvent& event : events) {
    if (one_call_) return;
    if (event.kind == Kind::kToolCallEnd && !options_.parallel_calls) one_call_ = true;
    if (!options_.fields.stream) continue;
    switch (event.kind) {
      case Kind::kReasoning:
        if (block_ != Block::kThinking) {
          open(Block::kThinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}}, out);
        }
        text_delta("thinking_delta", "thinking", event.text, out);
        break;
      case Kind::kContent:
        if (block_ != Block::kText) open(Block::kText, {{"type", "text"}, {"text", ""}}, out);
        text_delta("text_delta", "text", event.text, out);
        break;
      case Kind::kToolCallBegin:
        open(Block::kToolUse, {{"type", "tool_use"}, {"id", event.id}, {"name", event.name}, {"input", Json::object()}},
             out);
        break;
      case Kind::kToolCallArguments:
        text_delta("input_json_delta", "partial_json", event.text, out);
        break;
      case Kind::kToolCallEnd:
        close(out);
        break;
    }
  }
}

std::string MessagesAnswer::finish(size_t, const engine::Event& event, std::string& out) {
  cached_tokens_ = event.cached_tokens;
  if (!one_call_) emit(stream_.finish(), out);
  const bool length = event.reason == engine::FinishReason::kLength || event.reason == engine::FinishReason::kDeadline;
  if (stream_.stop()) {
    stop_reason_ = "stop_sequence";
    stop_sequence_ = *stream_.stop();
  } else if (length) {
    stop_reason_ = "max_tokens";
  } else {
    stop_reason_ = stream_.answer().calls.empty() ? "end_turn" : "tool_use";
  }
  return stop_reason_ == "max_tokens" ? "length" : stop_reason_ == "tool_use" ? "tool_calls" : "stop";
}

void MessagesAnswer::complete(std::string& out) {
  if (options_.done) options_.done(content());
  if (!options_.fields.stream) return;
  close(out);
  out += event_line({{"type", "message_delta"},
                     {"delta", {{"stop_reason", stop_reason_}, {"stop_sequence", stop_sequence_}}},
                     {"usage", usage()}});
  out += event_line({{"type", "message_stop"}});
}

Json MessagesAnswer::content() const {
  const chat::Answer& answer = stream_.answer();
  Json content = Json::array();
  if (!answer.reasoning.empty()) {
    content.push_back({{"type", "thinking"}, {"thinking", answer.reasoning}, {"signature", options_.id}});
  }
  if (!answer.content.empty()) content.push_back({{"type", "text"}, {"text", answer.content}});
  for (const chat::ToolCall& call : answer.calls) {
    Json input = call.parsed_arguments();
    if (!input.is_object()) input = {{"arguments", call.arguments}};
    content.push_back({{"type", "tool_use"}, {"id", call.id}, {"name", call.name}, {"input", std::move(input)}});
    if (!options_.parallel_calls) break;
  }
  return content;
}

std::string MessagesAnswer::whole() const {
  return dump({{"id", options_.id},
               {"type", "message"},
               {"role", "assistant"},
               {"model", options_.model},
               {"content", content()},
               {"stop_reason", stop_reason_},
               {"stop_sequence", stop_sequence_},
               {"usage", usage()}});
}

std::string MessagesAnswer::failure(const ApiError& error) const {
  return event_line(error.body(ErrorForm::kAnthropic));
}

}  // namespace fourfold::serve
