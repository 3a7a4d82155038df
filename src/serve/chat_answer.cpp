#include "serve/chat_answer.h"

#include "serve/token_text.h"

namespace fourfold::serve {

using Kind = text::OutputEvent::Kind;

namespace {

std::string event_line(const Json& json) { return "data: " + dump(json) + "\n\n"; }

Json content_of(const text::OutputEvent& event, const std::string& text) {
  if (event.kind == Kind::kReasoning) return {{"reasoning", text}, {"reasoning_content", text}};
  if (event.kind == Kind::kContent) return {{"content", text}};
  return {{"tool_calls", Json::array({{{"index", event.index}, {"function", {{"arguments", text}}}}})}};
}

}  // namespace

ChatAnswer::ChatAnswer(const chat::ChatText& text, ChatAnswerOptions options)
    : text_(text), options_(std::move(options)) {
  if (const auto id = text.tokenizer().find("</think>")) think_end_ = *id;
  for (int64_t i = 0; i < options_.fields.answers; ++i) {
    choices_.push_back(Choice{.stream = chat::AnswerStream(text, options_.answer),
                              .logprobs = {},
                              .stop_reason = {},
                              .finish = {},
                              .reasoning = options_.answer.reasoning == chat::Reasoning::kInside});
  }
}

void ChatAnswer::begin(std::string&) {}

bool ChatAnswer::token(size_t index, const engine::Event& event, std::string& out) {
  Choice& choice = choices_[index];
  ++choice.tokens;
  const bool end = options_.fields.ends(event.token, text_);
  if (choice.reasoning) {
    ++choice.reasoning_tokens;
    choice.reasoning = event.token != think_end_ && !end;
  }
  if (options_.fields.stream && !choice.begun) {
    choice.begun = true;
    delta(index, {{"role", "assistant"}, {"content", ""}}, nullptr, out);
  }
  if (end) {
    // The token that ends the turn is nobody's business; one that the request named is.
    if (!text_.is_stop(event.token)) choice.stop_reason = event.token;
    return true;
  }
  if (options_.logprobs && !event.logprobs.empty()) {
    const text::Tokenizer& tokenizer = text_.tokenizer();
    Json entry = token_logprob(tokenizer, event.logprobs.front());
    Json top = Json::array();
    for (size_t i = 1; i < event.logprobs.size(); ++i) top.push_back(token_logprob(tokenizer, event.logprobs[i]));
    entry["top_logprobs"] = std::move(top);
    if (!choice.logprobs.empty()) choice.logprobs += ',';
    choice.logprobs += dump(entry);
  }
  emit(index, choice.stream.push(event.token), out);
  if (choice.stream.stop()) {
    choice.stop_reason = *choice.stream.stop();
    return false;
  }
  return !choice.one_call;
}

void ChatAnswer::emit(size_t index, const std::vector<text::OutputEvent>& events, std::string& out) {
  Choice& choice = choices_[index];
  for (const text::OutputEvent& event : events) {
    if (choice.one_call) return;
    if (event.kind == Kind::kToolCallEnd && !options_.parallel_calls) choice.one_call = true;
    if (!options_.fields.stream) continue;
    switch (event.kind) {
      case Kind::kReasoning:
        if (options_.include_reasoning) text_delta(index, event, out);
        break;
      case Kind::kContent:
      case Kind::kToolCallArguments:
        text_delta(index, event, out);
        break;
      case Kind::kToolCallBegin:
        delta(index,
              {{"tool_calls", Json::array({{{"index", event.index},
                                            {"id", event.id},
                                            {"type", "function"},
                                            {"function", {{"name", event.name}, {"arguments", ""}}}}})}},
              nullptr, out);
        break;
      case Kind::kToolCallEnd:
        break;
    }
  }
}

// A piece of text: where nothing but the text differs from the piece before, the rest of the line is there already.
void ChatAnswer::text_delta(size_t index, const text::OutputEvent& event, std::string& out) {
  Choice& choice = choices_[index];
  if (!choice.logprobs.empty() || options_.fields.continuous_usage) {
    return delta(index, content_of(event, event.text), nullptr, out);
  }
  if (choice.line.empty() || choice.line_kind != event.kind || choice.line_call != event.index) {
    std::string line;
    delta(index, content_of(event, TextLine::place()), nullptr, line);
    choice.line.set(line);
    choice.line_kind = event.kind;
    choice.line_call = event.index;
  }
  choice.line.append(event.text, out);
}

void ChatAnswer::delta(size_t index, Json content, const std::string* finish, std::string& out) {
  Choice& choice = choices_[index];
  Json one = {{"index", index}, {"delta", std::move(content)}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
  if (!choice.logprobs.empty()) one["logprobs"] = {{"content", Json::array({json_mark(index)})}};
  if (finish != nullptr) {
    one["finish_reason"] = *finish;
    one["stop_reason"] = choice.stop_reason;
  }
  Json chunk = {{"id", options_.id},
                {"object", "chat.completion.chunk"},
                {"created", options_.created},
                {"model", options_.model},
                {"choices", Json::array({std::move(one)})}};
  if (options_.fields.continuous_usage) {
    chunk["usage"] = usage();
  } else if (options_.fields.include_usage) {
    chunk["usage"] = nullptr;
  }
  const std::string line = event_line(chunk);
  if (choice.logprobs.empty()) {
    out += line;
    return;
  }
  out += put_in(line, [&](size_t) { return std::string_view(choice.logprobs); });
  choice.logprobs.clear();
}

std::string ChatAnswer::finish(size_t index, const engine::Event& event, std::string& out) {
  Choice& choice = choices_[index];
  cached_tokens_ = std::max(cached_tokens_, event.cached_tokens);
  drafted_ += event.drafted;
  accepted_ += event.accepted;
  if (!choice.one_call) emit(index, choice.stream.finish(), out);
  const bool length = event.reason == engine::FinishReason::kLength || event.reason == engine::FinishReason::kDeadline;
  const bool calls = !choice.stream.answer().calls.empty();
  choice.finish = length && !choice.stream.stop() ? "length" : calls ? "tool_calls" : "stop";
  if (options_.fields.stream) {
    Json content = Json::object();
    if (!choice.begun) content = {{"role", "assistant"}, {"content", ""}};
    delta(index, std::move(content), &choice.finish, out);
  }
  return choice.finish;
}

Json ChatAnswer::usage() const {
  int64_t output = 0, reasoning = 0;
  for (const Choice& choice : choices_) {
    output += choice.tokens;
    reasoning += choice.reasoning_tokens;
  }
  return {{"prompt_tokens", options_.prompt_tokens},
          {"completion_tokens", output},
          {"total_tokens", options_.prompt_tokens + output},
          {"prompt_tokens_details", {{"cached_tokens", cached_tokens_}}},
          {"completion_tokens_details",
           {{"reasoning_tokens", reasoning},
            {"accepted_prediction_tokens", accepted_},
            {"rejected_prediction_tokens", drafted_ - accepted_}}}};
}

void ChatAnswer::complete(std::string& out) {
  if (!options_.fields.stream) return;
  if (options_.fields.include_usage) {
    out += event_line({{"id", options_.id},
                       {"object", "chat.completion.chunk"},
                       {"created", options_.created},
                       {"model", options_.model},
                       {"choices", Json::array()},
                       {"usage", usage()}});
  }
  out += "data: [DONE]\n\n";
}

std::string ChatAnswer::whole() const {
  Json choices = Json::array();
  for (size_t index = 0; index < choices_.size(); ++index) {
    const Choice& choice = choices_[index];
    const chat::Answer& answer = choice.stream.answer();
    Json message = {{"role", "assistant"}, {"content", answer.content}, {"refusal", nullptr}};
    if (options_.include_reasoning) {
      const Json reasoning = answer.reasoning.empty() ? Json() : Json(answer.reasoning);
      message["reasoning"] = reasoning;
      message["reasoning_content"] = reasoning;
    }
    if (!answer.calls.empty()) {
      if (answer.content.empty()) message["content"] = nullptr;
      Json calls = Json::array();
      for (const chat::ToolCall& call : answer.calls) {
        calls.push_back({{"id", call.id},
                         {"type", "function"},
                         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
        if (!options_.parallel_calls) break;
      }
      message["tool_calls"] = std::move(calls);
    }
    choices.push_back({{"index", index},
                       {"message", std::move(message)},
                       {"logprobs", options_.logprobs ? Json({{"content", Json::array({json_mark(index)})}}) : Json()},
                       {"finish_reason", choice.finish},
                       {"stop_reason", choice.stop_reason}});
  }
  const Json answer = {{"id", options_.id},
                       {"object", "chat.completion"},
                       {"created", options_.created},
                       {"model", options_.model},
                       {"choices", std::move(choices)},
                       {"usage", usage()},
                       {"system_fingerprint", nullptr}};
  return put_in(dump(answer), [&](size_t index) { return std::string_view(choices_[index].logprobs); });
}

std::string ChatAnswer::failure(const ApiError& error) const {
  return event_line(error.body(ErrorForm::kOpenAi)) + "data: [DONE]\n\n";
}

}  // namespace fourfold::serve
