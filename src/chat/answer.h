// Answers: the tokens that a model generates, as reasoning, content and tool calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "text/output_parser.h"

namespace fourfold::chat {

class ChatText;
using Reasoning = text::OutputParserOptions::Reasoning;  // kInside, kNone, kMaybe

struct ToolCall {
  std::string id, name;
  std::string arguments;  // the JSON of an object
  bool complete = true;   // false when the answer ended inside of it

  // The arguments, or the string that they are where they are beyond the limits of JSON.
  Json parsed_arguments() const;
};

// What a generated text says.
struct Answer {
  std::string reasoning, content;
  std::vector<ToolCall> calls;
  bool closed = true;  // false when it ended inside of the reasoning or of a call

  // The assistant's message with which the conversation goes on.
  Json message() const;
};

struct AnswerOptions {
  // How the answer begins: what Prompt::reasoning says.
  Reasoning reasoning = Reasoning::kNone;
  // The request's tools; calls are looked for only where there are some, and are content elsewhere.
  Json tools;
  // They end the content where they occur, and sleep inside of the reasoning and of calls.
  std::vector<std::string> stop;
  // A text that was completed, and no turn of a conversation: all of it is content, white space included.
  bool plain = false;
  // Makes the ids of tool calls; random ones when empty.
  std::function<std::string()> make_call_id;
};

// An answer as its tokens arrive. Events hold whole characters and never a part of a tag or of a stop string; white
// space around reasoning and content, which the turn's form puts there, is left out. All of this is the same however
// the text is cut into tokens.
class AnswerStream {
 public:
  // `text` must outlive it.
  AnswerStream(const ChatText& text, AnswerOptions options);
  ~AnswerStream();
  AnswerStream(AnswerStream&&) noexcept;
  AnswerStream& operator=(AnswerStream&&) noexcept;

  // The events of one more token; none for a stop token, and none once a stop string was found. Events of reasoning and
  // content are pieces to be joined.
  std::vector<text::OutputEvent> push(int32_t token);
  // The rest. Nothing may be pushed afterwards.
  std::vector<text::OutputEvent> finish();

  // The stop string that ended the answer: what is still being generated is not wanted.
  const std::optional<std::string>& stop() const;
  // All events so far; whole after finish().
  const Answer& answer() const;
  // The generated text so far, tags included, stop tokens not.
  const std::string& text() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fourfold::chat
