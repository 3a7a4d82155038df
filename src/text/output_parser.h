// What a model writes, split into reasoning, content and tool calls while it streams.
//
// Reasoning is what stands before </think>; tool calls have the form the Qwen models are trained on:
//
//   <tool_call>
//   <function=NAME>
//   <parameter=KEY>
//   VALUE
//   </parameter>
//   </function>
//   </tool_call>
//
// Values may hold literal tags: a closing tag counts only where the structure goes on or ends behind it. Text that may
// still turn out to be a tag is held back, so that any cut of a text into pieces gives the same result.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/unicode.h"

namespace fourfold::text {

struct OutputEvent {
  enum class Kind {
    kReasoning,          // text
    kContent,            // text
    kToolCallBegin,      // index, id, name
    kToolCallArguments,  // index, text: a fragment; all fragments of a call joined are a JSON object
    kToolCallEnd,        // index, complete
  };
  Kind kind;
  std::string text;
  size_t index = 0;
  std::string id;
  std::string name;
  bool complete = true;  // false when the text ended inside of the call
};

struct OutputParserOptions {
  enum class Reasoning {
    kInside,  // the prompt has opened the block: everything up to </think> is reasoning
    kNone,    // the prompt has closed it, or the model has none: everything is content, and nothing is looked for
    kMaybe,   // the model may open the block itself, at the very start
  };
  Reasoning reasoning = Reasoning::kNone;
  // The request's tools (OpenAI form). Tool calls are looked for only where there are some; their schemas say how
  // values are converted.
  Json tools = Json::array();
  // Makes the ids of calls; by default "call_" and 24 random hexadecimal digits.
  std::function<std::string()> make_id;
};

class OutputParser {
 public:
  explicit OutputParser(OutputParserOptions options);

  // The next piece of text, of any length. Neighbouring events of one kind are joined.
  std::vector<OutputEvent> push(std::string_view text);
  // The end of the text. Nothing may be pushed afterwards.
  std::vector<OutputEvent> finish();

  // Calls begun so far; with at least one, the finish reason is tool_calls.
  size_t tool_call_count() const { return calls_; }

 private:
  enum class State { kStart, kReasoning, kContent, kArguments, kValue, kAfterFunction };
  enum class Answer { kNo, kYes, kUnknown };

  bool step();
  bool step_start();
  bool step_reasoning();
  bool step_content();
  bool step_arguments();
  bool step_value();
  bool step_after_function();
  void emit(OutputEvent::Kind kind, std::string_view text);
  void emit_content(std::string_view text);
  void consume(size_t bytes);
  void begin_call(std::string name);
  void end_call(bool complete);
  void add_parameter(std::string_view value);
  const Json* parameters_of_call() const;  // their schema; null when the tool has none

  Answer at(size_t position, std::string_view tag) const;
  size_t skip_space(size_t position) const;
  Answer implicit_end(size_t position) const;
  Answer call_begins(size_t position, size_t& name_begin, size_t& name_end) const;
  Answer closes_tool_call(size_t position) const;
  Answer closes_function(size_t position) const;
  Answer closes_parameter(size_t position) const;

  OutputParserOptions options_;
  bool parse_tools_;
  Utf8Stream utf8_;
  std::vector<OutputEvent> events_;
  State state_;
  std::string buffer_;    // not decided yet
  size_t scanned_ = 0;    // of buffer_: known to hold no tag of the present state
  bool final_ = false;    // the text has ended
  bool relaxed_ = false;  // it has ended with no closing tag in its right place: take the first
  std::string blank_;     // white space that is content only if more than white space follows
  bool content_seen_ = false;
  size_t calls_ = 0;
  std::string name_;
  std::string key_;
  std::vector<std::string> keys_;
};

// All of a text at once.
struct ParsedOutput {
  struct Call {
    std::string id, name, arguments;
    bool complete = true;
  };
  std::string reasoning, content;
  std::vector<Call> calls;
};
ParsedOutput parse_output(std::string_view text, OutputParserOptions options);

// A parameter's text as JSON (in Python's json.dumps form), converted by its schema; null when there is none.
// `document` is what the schema's references lead into, the schema itself when it is null.
std::string convert_parameter(const std::string& text, const Json* schema, const Json* document = nullptr);

}  // namespace fourfold::text
