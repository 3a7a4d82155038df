#include "serve/responses_answer.h"

#include <utility>

namespace fourfold::serve {

using Kind = text::OutputEvent::Kind;

namespace {

std::string event_line(const Json& json) {
  return fmt::format("event: {}\ndata: {}\n\n", json["type"].get<std::string>(), dump(json));
}

Json text_part(const std::string& text) {
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
}

}  // namespace

ResponsesAnswer::ResponsesAnswer(const chat::ChatText& text, ResponsesAnswerOptions options)
    : text_(text),
      options_(std::move(options)),
      stream_(text, options_.answer),
      reasoning_(options_.answer.reasoning == chat::Reasoning::kInside) {
  if (const auto id = text.tokenizer().find("</think>")) think_end_ = *id;
}

void ResponsesAnswer::event(Json event, std::string& out) {
  if (!options_.fields.stream) return;
  event["sequence_number"] = sequence_++;
  out += event_line(event);
}

Json ResponsesAnswer::usage() const {
  return {{"input_tokens", options_.prompt_tokens},
          {"input_tokens_details", {{"cached_tokens", cached_tokens_}}},
          {"output_tokens", tokens_},
          {"output_tokens_details", {{"reasoning_tokens", reasoning_tokens_}}},
          {"total_tokens", options_.prompt_tokens + tokens_}};
}

Json ResponsesAnswer::response(const char* status) const {
  Json out = options_.response;
  out["status"] = status;
  out["output"] = output_;
  const bool ended = std::string_view(status) != "in_progress";
  if (length_) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
  out["usage"] = ended ? usage() : Json();
  return out;
}

void ResponsesAnswer::begin(std::string& out) {
  for (const char* type : {"response.created", "response.in_progress"}) {
    event({{"type", type}, {"response", response("in_progress")}}, out);
  }
}

bool ResponsesAnswer::token(size_t, const engine::Event& token, std::string& out) {
  ++tokens_;
  const bool end = options_.fields.ends(token.token, text_);
  if (reasoning_) {
    ++reasoning_tokens_;
    reasoning_ = token.token != think_end_ && !end;
  }
  if (end) return true;
  emit(stream_.push(token.token), out);
  return !stream_.stop() && !one_call_;
}

Json ResponsesAnswer::in_place() const {
  return {{"item_id", output_.back()["id"]}, {"output_index", output_.size() - 1}};
}

void ResponsesAnswer::open(Item kind, Json item, std::string& out) {
  close(true, out);
  open_ = kind;
  piece_.clear();
  line_.clear();
  item["status"] = "in_progress";
  output_.push_back(std::move(item));
  event({{"type", "response.output_item.added"}, {"output_index", output_.size() - 1}, {"item", output_.back()}}, out);
  if (kind != Item::kMessage) return;
  Json added = in_place();
  added["type"] = "response.content_part.added";
  added["content_index"] = 0;
  added["part"] = text_part("");
  event(std::move(added), out);
}

void ResponsesAnswer::delta(const char* type, const std::string& piece, std::string& out) {
  piece_ += piece;
  if (!options_.fields.stream) return;
  if (line_.empty()) {
    Json json = in_place();
    json["type"] = type;
    if (open_ != Item::kCall) json["content_index"] = 0;
    if (open_ == Item::kMessage) json["logprobs"] = Json::array();
    json["delta"] = TextLine::place();
    std::string line = event_line(json);
    line.resize(line.rfind('}'));
    line_.set(line);
  }
  line_.append(piece, out);
  out += fmt::format(",\"sequence_number\":{}}}\n\n", sequence_++);
}

void ResponsesAnswer::close(bool complete, std::string& out) {
  if (open_ == Item::kNone) return;
  Json& item = output_.back();
  item["status"] = complete ? "completed" : "incomplete";
  Json done = in_place();
  if (open_ == Item::kCall) {
    item["arguments"] = piece_;
    done["type"] = "response.function_call_arguments.done";
    done["name"] = item["name"];
    done["arguments"] = piece_;
    event(std::move(done), out);
  } else {
    const bool message = open_ == Item::kMessage;
    const Json part = message ? text_part(piece_) : Json{{"type", "reasoning_text"}, {"text", piece_}};
    item["content"] = Json::array({part});
    done["type"] = message ? "response.output_text.done" : "response.reasoning_text.done";
    done["content_index"] = 0;
    done["text"] = piece_;
    if (message) done["logprobs"] = Json::array();
    event(std::move(done), out);
    if (message) {
      Json ended = in_place();
      ended["type"] = "response.content_part.done";
      ended["content_index"] = 0;
      ended["part"] = part;
      event(std::move(ended), out);
    }
  }
  event({{"type", "response.output_item.done"}, {"output_index", output_.size() - 1}, {"item", item}}, out);
  open_ = Item::kNone;
}

void ResponsesAnswer::emit(const std::vector<text::OutputEvent>& events, std::string& out) {
  for (const text::OutputEvent& event : events) {
    if (one_call_) return;
    switch (event.kind) {
      case Kind::kReasoning:
        if (open_ != Item::kReasoning) {
          open(
              Item::kReasoning,
              {{"id", random_id("rs_")}, {"type", "reasoning"}, {"summary", Json::array()}, {"content", Json::array()}},
              out);
        }
        delta("response.reasoning_text.delta", event.text, out);
        break;
      case Kind::kContent:
        if (open_ != Item::kMessage) {
          open(Item::kMessage,
               {{"id", random_id("msg_")}, {"type", "message"}, {"role", "assistant"}, {"content", Json::array()}},
               out);
        }
        delta("response.output_text.delta", event.text, out);
        break;
      case Kind::kToolCallBegin:
        open(Item::kCall,
             {{"id", random_id("fc_")},
              {"type", "function_call"},
              {"call_id", event.id},
              {"name", event.name},
              {"arguments", ""}},
             out);
        break;
      case Kind::kToolCallArguments:
        delta("response.function_call_arguments.delta", event.text, out);
        break;
      case Kind::kToolCallEnd:
        close(event.complete, out);
        one_call_ = !options_.parallel_calls;
        break;
    }
  }
}

std::string ResponsesAnswer::finish(size_t, const engine::Event& end, std::string& out) {
  cached_tokens_ = end.cached_tokens;
  if (!one_call_) emit(stream_.finish(), out);
  const bool limit = end.reason == engine::FinishReason::kLength || end.reason == engine::FinishReason::kDeadline;
  length_ = limit && !stream_.stop();
  close(!length_, out);
  return length_ ? "length" : stream_.answer().calls.empty() ? "stop" : "tool_calls";
}

void ResponsesAnswer::complete(std::string& out) {
  const Json ended = response(length_ ? "incomplete" : "completed");
  if (options_.done) {
    Json message = stream_.answer().message();
    if (!options_.parallel_calls && message.contains("tool_calls") && message["tool_calls"].size() > 1) {
      message["tool_calls"] = Json::array({message["tool_calls"][0]});
    }
    options_.done(message, ended);
  }
  event({{"type", length_ ? "response.incomplete" : "response.completed"}, {"response", ended}}, out);
}

std::string ResponsesAnswer::whole() const { return dump(response(length_ ? "incomplete" : "completed")); }

std::string ResponsesAnswer::failure(const ApiError& error) const {
  Json failed = response("failed");
  failed["error"] = {{"code", error.code.empty() ? "server_error" : error.code}, {"message", error.what()}};
  return event_line({{"type", "response.failed"}, {"response", failed}, {"sequence_number", sequence_}});
}

}  // namespace fourfold::serve
