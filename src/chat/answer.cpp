#include "chat/answer.h"

#include <utility>

#include "base/check.h"
#include "chat/chat_text.h"
#include "chat/stop_strings.h"
#include "text/tokenizer.h"

namespace fourfold::chat {
namespace {

using text::OutputEvent;
using Kind = OutputEvent::Kind;

text::OutputParserOptions parser_options(const AnswerOptions& options) {
  text::OutputParserOptions out;
  out.reasoning = options.reasoning;
  if (options.tools.is_array()) out.tools = options.tools;
  out.make_id = options.make_call_id;
  return out;
}

bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// White space at the beginning of a part is dropped, and at its end held back until more follows.
class PartTrimmer {
 public:
  std::string push(std::string_view text) {
    std::string out;
    for (const char c : text) {
      if (is_blank(c)) {
        if (begun_) held_ += c;
      } else {
        out += held_;
        out += c;
        held_.clear();
        begun_ = true;
      }
    }
    return out;
  }

 private:
  std::string held_;
  bool begun_ = false;
};

}  // namespace

Json ToolCall::parsed_arguments() const {
  try {
    JsonLimits limits;
    limits.reject_duplicate_keys = false;
    return parse_json(arguments, "the arguments of a tool call", limits);
  } catch (const Error&) {
    return arguments;
  }
}

Json Answer::message() const {
  Json out = {{"role", "assistant"}, {"content", content}};
  if (!reasoning.empty()) out["reasoning_content"] = reasoning;
  for (const ToolCall& call : calls) {
    out["tool_calls"].push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return out;
}

struct AnswerStream::State {
  State(const ChatText& chat, AnswerOptions given)
      : text(chat),
        options(std::move(given)),
        detokenizer(chat.tokenizer()),
        parser(parser_options(options)),
        stops(options.stop) {
    answer.closed = options.reasoning != Reasoning::kInside;
  }

  // Content up to a stop string, trimmed. White space in front is no content that could hold a stop string.
  void add_content(std::string_view piece, bool last, std::vector<OutputEvent>& out) {
    if (!options.plain && !content_begun) {
      while (!piece.empty() && is_blank(piece.front())) piece.remove_prefix(1);
      content_begun = !piece.empty();
    }
    std::string certain = stops.push(piece);
    if (last && !stops.found()) certain += stops.flush();
    if (!options.plain) certain = content.push(certain);
    emit(Kind::kContent, std::move(certain), out);
  }

  void emit(Kind kind, std::string piece, std::vector<OutputEvent>& out) {
    if (piece.empty()) return;
    (kind == Kind::kContent ? answer.content : answer.reasoning) += piece;
    OutputEvent event{};
    event.kind = kind;
    event.text = std::move(piece);
    out.push_back(std::move(event));
  }

  void take(std::vector<OutputEvent> events, std::vector<OutputEvent>& out) {
    for (OutputEvent& event : events) {
      if (stops.found()) return;
      switch (event.kind) {
        case Kind::kReasoning:
          answer.closed = false;
          emit(Kind::kReasoning, reasoning.push(event.text), out);
          continue;
        case Kind::kContent:
          answer.closed = true;
          add_content(event.text, false, out);
          continue;
        case Kind::kToolCallBegin:
          add_content("", true, out);  // a stop string does not go on behind a call
          answer.calls.push_back({event.id, event.name, "", false});
          answer.closed = false;
          break;
        case Kind::kToolCallArguments:
          answer.calls[event.index].arguments += event.text;
          break;
        case Kind::kToolCallEnd:
          answer.calls[event.index].complete = event.complete;
          answer.closed = event.complete;
          break;
      }
      out.push_back(std::move(event));
    }
  }

  void push_text(const std::string& piece, std::vector<OutputEvent>& out) {
    all += piece;
    if (options.plain) {
      answer.closed = true;
      add_content(piece, false, out);
      return;
    }
    take(parser.push(piece), out);
  }

  const ChatText& text;
  AnswerOptions options;
  text::Detokenizer detokenizer;
  text::OutputParser parser;
  StopFilter stops;
  PartTrimmer reasoning, content;
  bool content_begun = false;
  Answer answer;
  std::string all;
};

AnswerStream::AnswerStream(const ChatText& text, AnswerOptions options)
    : state_(std::make_unique<State>(text, std::move(options))) {}
AnswerStream::~AnswerStream() = default;
AnswerStream::AnswerStream(AnswerStream&&) noexcept = default;
AnswerStream& AnswerStream::operator=(AnswerStream&&) noexcept = default;

std::vector<OutputEvent> AnswerStream::push(int32_t token) {
  std::vector<OutputEvent> out;
  if (state_->text.is_stop(token) || state_->stops.found()) return out;
  state_->push_text(state_->detokenizer.push(token), out);
  return out;
}

std::vector<OutputEvent> AnswerStream::finish() {
  std::vector<OutputEvent> out;
  if (state_->stops.found()) return out;
  state_->push_text(state_->detokenizer.flush(), out);
  if (!state_->options.plain) state_->take(state_->parser.finish(), out);
  state_->add_content("", true, out);
  // The reasoning may have been closed with nothing behind it.
  if (state_->all.find("</think>") != std::string::npos && state_->answer.calls.empty()) state_->answer.closed = true;
  return out;
}

const std::optional<std::string>& AnswerStream::stop() const { return state_->stops.found(); }
const Answer& AnswerStream::answer() const { return state_->answer; }
const std::string& AnswerStream::text() const { return state_->all; }

}  // namespace fourfold::chat
