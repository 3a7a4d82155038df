#include "text/output_parser.h"

#include <algorithm>
#include <random>

#include "base/check.h"
#include "text/schema_type.h"

namespace fourfold::text {
namespace {

constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>";
constexpr std::string_view kCall = "<tool_call>", kCallEnd = "</tool_call>";
constexpr std::string_view kFunction = "<function=", kFunctionEnd = "</function>", kFunctionSpace = "<function ";
constexpr std::string_view kParameter = "<parameter=", kParameterEnd = "</parameter>";
constexpr size_t kMaxGap = 1024;  // white space between tags
constexpr size_t kMaxName = 256;  // of a function or parameter
constexpr size_t kMaxCalls = 1024;

bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f' || c == '\v'; }

std::string random_id() {
  thread_local std::mt19937_64 random{std::random_device{}()};
  std::string id = "call_";
  for (int i = 0; i < 24; ++i) id += "0123456789abcdef"[random() & 15];
  return id;
}

}  // namespace

OutputParser::OutputParser(OutputParserOptions options) : options_(std::move(options)) {
  using Reasoning = OutputParserOptions::Reasoning;
  parse_tools_ = options_.tools.is_array() && !options_.tools.empty();
  state_ = options_.reasoning == Reasoning::kNone ? State::kContent : State::kStart;
  if (!options_.make_id) options_.make_id = random_id;
}

std::vector<OutputEvent> OutputParser::push(std::string_view text) {
  FF_ASSERT(!final_);
  buffer_ += utf8_.append(text);
  while (step()) {
  }
  return std::exchange(events_, {});
}

std::vector<OutputEvent> OutputParser::finish() {
  if (!final_) {
    buffer_ += utf8_.flush();
    final_ = true;
    while (step()) {
    }
  }
  return std::exchange(events_, {});
}

void OutputParser::emit(OutputEvent::Kind kind, std::string_view text) {
  if (text.empty()) return;
  const size_t index = kind == OutputEvent::Kind::kToolCallArguments ? calls_ - 1 : 0;
  if (!events_.empty() && events_.back().kind == kind && events_.back().index == index) {
    events_.back().text += text;
    return;
  }
  OutputEvent event{};
  event.kind = kind;
  event.text = text;
  event.index = index;
  event.complete = true;
  events_.push_back(std::move(event));
}

// White space alone is no content: neither before the first call nor between calls.
void OutputParser::emit_content(std::string_view text) {
  if (!content_seen_) {
    const auto solid = std::find_if_not(text.begin(), text.end(), is_blank);
    if (solid == text.end()) {
      blank_ += text;
      return;
    }
    content_seen_ = true;
    emit(OutputEvent::Kind::kContent, std::exchange(blank_, {}));
  }
  emit(OutputEvent::Kind::kContent, text);
}

void OutputParser::consume(size_t bytes) {
  buffer_.erase(0, bytes);
  scanned_ = 0;
}

// Whether a tag stands at a position; unknown while the text may still grow into it.
OutputParser::Answer OutputParser::at(size_t position, std::string_view tag) const {
  const std::string_view rest = std::string_view(buffer_).substr(position);
  if (rest.starts_with(tag)) return Answer::kYes;
  return !final_ && tag.starts_with(rest) ? Answer::kUnknown : Answer::kNo;
}

size_t OutputParser::skip_space(size_t position) const {
  const size_t limit = std::min(buffer_.size(), position + kMaxGap);
  while (position < limit && is_blank(buffer_[position])) ++position;
  return position;
}

bool OutputParser::step() {
  switch (state_) {
    case State::kStart:
      return step_start();
    case State::kReasoning:
      return step_reasoning();
    case State::kContent:
      return step_content();
    case State::kArguments:
      return step_arguments();
    case State::kValue:
      return step_value();
    case State::kAfterFunction:
      return step_after_function();
  }
  return false;
}

// A leading <think>, with the white space before it.
bool OutputParser::step_start() {
  const bool inside = options_.reasoning == OutputParserOptions::Reasoning::kInside;
  const size_t begin = skip_space(0);
  const Answer answer = begin >= kMaxGap ? Answer::kNo : at(begin, kThink);
  if (answer == Answer::kUnknown || (begin == buffer_.size() && !final_ && begin < kMaxGap)) return false;
  if (answer == Answer::kYes) consume(begin + kThink.size());
  state_ = inside || answer == Answer::kYes ? State::kReasoning : State::kContent;
  return true;
}

// <tool_call> ends the reasoning where a function follows.
OutputParser::Answer OutputParser::implicit_end(size_t position) const {
  const Answer tag = at(position, kCall);
  if (tag != Answer::kYes) return tag;
  const size_t next = skip_space(position + kCall.size());
  const Answer a = at(next, kFunction), b = at(next, kFunctionSpace);
  if (a == Answer::kYes || b == Answer::kYes) return Answer::kYes;
  return a == Answer::kUnknown || b == Answer::kUnknown ? Answer::kUnknown : Answer::kNo;
}

bool OutputParser::step_reasoning() {
  using Kind = OutputEvent::Kind;
  for (size_t p = buffer_.find('<'); p != std::string::npos; p = buffer_.find('<', p + 1)) {
    const Answer end = at(p, kThinkEnd), call = implicit_end(p);
    if (end == Answer::kYes || call == Answer::kYes) {
      emit(Kind::kReasoning, std::string_view(buffer_).substr(0, p));
      consume(end == Answer::kYes ? p + kThinkEnd.size() : p);
      state_ = State::kContent;
      return true;
    }
    if (end == Answer::kUnknown || call == Answer::kUnknown) {
      emit(Kind::kReasoning, std::string_view(buffer_).substr(0, p));
      consume(p);
      return false;
    }
  }
  emit(Kind::kReasoning, buffer_);
  consume(buffer_.size());
  return false;
}

// "<tool_call> <function=NAME>" or a function without its opening tag.
OutputParser::Answer OutputParser::call_begins(size_t position, size_t& name_begin, size_t& name_end) const {
  size_t function = position;
  if (const Answer tag = at(position, kCall); tag != Answer::kNo) {
    if (tag == Answer::kUnknown) return tag;
    function = skip_space(position + kCall.size());
  }
  if (const Answer tag = at(function, kFunction); tag != Answer::kYes) return tag;
  name_begin = function + kFunction.size();
  for (size_t i = name_begin; i < buffer_.size(); ++i) {
    const char c = buffer_[i];
    if (c == '>') {
      name_end = i;
      return i > name_begin ? Answer::kYes : Answer::kNo;
    }
    if (is_blank(c) || std::string_view("{}<\"'").find(c) != std::string_view::npos || i - name_begin >= kMaxName) {
      return Answer::kNo;
    }
  }
  return final_ ? Answer::kNo : Answer::kUnknown;
}

bool OutputParser::step_content() {
  if (!parse_tools_) {
    emit_content(buffer_);
    consume(buffer_.size());
    return false;
  }
  for (size_t p = buffer_.find('<'); p != std::string::npos; p = buffer_.find('<', p + 1)) {
    size_t name_begin = 0, name_end = 0;
    const Answer begins = calls_ < kMaxCalls ? call_begins(p, name_begin, name_end) : Answer::kNo;
    if (begins == Answer::kNo) continue;
    emit_content(std::string_view(buffer_).substr(0, p));
    if (begins == Answer::kUnknown) {
      consume(p);
      return false;
    }
    blank_.clear();
    begin_call(buffer_.substr(name_begin, name_end - name_begin));
    consume(name_end + 1);
    state_ = State::kArguments;
    return true;
  }
  emit_content(buffer_);
  consume(buffer_.size());
  return false;
}

void OutputParser::begin_call(std::string name) {
  OutputEvent event{};
  event.kind = OutputEvent::Kind::kToolCallBegin;
  event.index = calls_++;
  event.id = options_.make_id();
  event.name = name;
  event.complete = true;
  events_.push_back(std::move(event));
  name_ = std::move(name);
  keys_.clear();
}

void OutputParser::end_call(bool complete) {
  emit(OutputEvent::Kind::kToolCallArguments, keys_.empty() ? "{}" : "}");
  OutputEvent event{};
  event.kind = OutputEvent::Kind::kToolCallEnd;
  event.index = calls_ - 1;
  event.complete = complete;
  events_.push_back(std::move(event));
  content_seen_ = false;
}

// Between parameters. What is no tag is dropped.
bool OutputParser::step_arguments() {
  for (size_t p = buffer_.find('<'); p != std::string::npos; p = buffer_.find('<', p + 1)) {
    const Answer parameter = at(p, kParameter), function_end = at(p, kFunctionEnd), call_end = at(p, kCallEnd);
    if (function_end == Answer::kYes || call_end == Answer::kYes) {
      end_call(true);
      consume(p + (function_end == Answer::kYes ? kFunctionEnd.size() : kCallEnd.size()));
      state_ = function_end == Answer::kYes ? State::kAfterFunction : State::kContent;
      return true;
    }
    if (parameter == Answer::kYes) {
      const size_t begin = p + kParameter.size();
      const size_t end = buffer_.find_first_of(">\n", begin);
      if (end == std::string::npos && !final_ && buffer_.size() - begin <= kMaxName) {
        consume(p);
        return false;
      }
      if (end == std::string::npos || buffer_[end] == '\n' || end == begin || end - begin > kMaxName) continue;
      key_ = buffer_.substr(begin, end - begin);
      consume(end + 1);
      state_ = State::kValue;
      return true;
    }
    // The next call begins: this one was never closed.
    size_t unused_begin = 0, unused_end = 0;
    const Answer next = call_begins(p, unused_begin, unused_end);
    if (next == Answer::kYes) {
      end_call(true);
      consume(p);
      state_ = State::kContent;
      return true;
    }
    if (parameter == Answer::kUnknown || function_end == Answer::kUnknown || call_end == Answer::kUnknown ||
        next == Answer::kUnknown) {
      consume(p);
      return false;
    }
  }
  consume(buffer_.size());
  if (final_) {
    end_call(false);
    state_ = State::kContent;
    return true;
  }
  return false;
}

// "</tool_call>" counts when another call or the end follows.
OutputParser::Answer OutputParser::closes_tool_call(size_t position) const {
  if (const Answer tag = at(position, kCallEnd); tag != Answer::kYes) return tag;
  if (relaxed_) return Answer::kYes;
  const size_t next = skip_space(position + kCallEnd.size());
  if (next == buffer_.size()) return final_ ? Answer::kYes : Answer::kUnknown;
  return at(next, kCall);
}

// "</function>" counts when "</tool_call>", the next call or the end follows.
OutputParser::Answer OutputParser::closes_function(size_t position) const {
  if (const Answer tag = at(position, kFunctionEnd); tag != Answer::kYes) return tag;
  if (relaxed_) return Answer::kYes;
  const size_t next = skip_space(position + kFunctionEnd.size());
  if (next == buffer_.size()) return final_ ? Answer::kYes : Answer::kUnknown;
  Answer out = Answer::kNo;
  for (const Answer answer : {closes_tool_call(next), at(next, kCall), at(next, kFunction)}) {
    if (answer == Answer::kYes) return answer;
    if (answer == Answer::kUnknown) out = answer;
  }
  return out;
}

// "</parameter>" counts when the next parameter (at the start of a line), the end of the function or the end follows.
OutputParser::Answer OutputParser::closes_parameter(size_t position) const {
  if (const Answer tag = at(position, kParameterEnd); tag != Answer::kYes) return tag;
  const size_t next = skip_space(position + kParameterEnd.size());
  if (next == buffer_.size()) return final_ ? Answer::kYes : Answer::kUnknown;
  Answer out = Answer::kNo;
  const Answer parameter = buffer_[next - 1] == '\n' ? at(next, kParameter) : Answer::kNo;
  for (const Answer answer : {parameter, closes_function(next), closes_tool_call(next)}) {
    if (answer == Answer::kYes) return answer;
    if (answer == Answer::kUnknown) out = answer;
  }
  return out;
}

bool OutputParser::step_value() {
  for (size_t p = buffer_.find('<', scanned_); p != std::string::npos; p = buffer_.find('<', p + 1)) {
    const Answer closed = closes_parameter(p);
    // Without its closing tag a value ends at the next parameter or at the end of the function.
    const Answer parameter = p > 0 && buffer_[p - 1] == '\n' ? at(p, kParameter) : Answer::kNo;
    const Answer function_end = closes_function(p), call_end = closes_tool_call(p);
    if (closed == Answer::kYes || parameter == Answer::kYes || function_end == Answer::kYes ||
        call_end == Answer::kYes) {
      add_parameter(std::string_view(buffer_).substr(0, p));
      consume(closed == Answer::kYes ? p + kParameterEnd.size() : p);
      state_ = State::kArguments;
      return true;
    }
    if (closed == Answer::kUnknown || parameter == Answer::kUnknown || function_end == Answer::kUnknown ||
        call_end == Answer::kUnknown) {
      scanned_ = p;
      return false;
    }
  }
  if (!final_) {
    scanned_ = buffer_.size();
    return false;
  }
  if (!relaxed_) {
    // No tag stands where the structure wants it: other text follows the calls. Take the first that could close.
    relaxed_ = true;
    scanned_ = 0;
    return true;
  }
  add_parameter(buffer_);
  consume(buffer_.size());
  state_ = State::kArguments;
  return true;
}

bool OutputParser::step_after_function() {
  const size_t next = skip_space(0);
  const Answer closed = next >= kMaxGap ? Answer::kNo : at(next, kCallEnd);
  if (closed == Answer::kUnknown) return false;
  if (closed == Answer::kYes) consume(next + kCallEnd.size());
  state_ = State::kContent;
  return true;
}

const Json* OutputParser::parameters_of_call() const {
  const auto member = [](const Json* object, const char* name) -> const Json* {
    if (object == nullptr || !object->is_object()) return nullptr;
    const auto found = object->find(name);
    return found == object->end() ? nullptr : &*found;
  };
  for (const Json& tool : options_.tools) {
    const Json* function = member(&tool, "function");
    if (function == nullptr) function = &tool;
    const Json* name = member(function, "name");
    if (name == nullptr || !name->is_string() || name->get_ref<const std::string&>() != name_) continue;
    return member(function, "parameters");
  }
  return nullptr;
}

void OutputParser::add_parameter(std::string_view value) {
  // A key that comes again cannot change what has been sent: the first value stays.
  if (std::find(keys_.begin(), keys_.end(), key_) != keys_.end()) return;
  if (value.starts_with('\n')) value.remove_prefix(1);
  if (value.ends_with('\n')) value.remove_suffix(1);
  std::string fragment = keys_.empty() ? "{" : ", ";
  fragment += convert_parameter(key_, nullptr);
  fragment += ": ";
  const Json* const parameters = parameters_of_call();
  const Json* const schema = parameters != nullptr ? property_schema(*parameters, key_) : nullptr;
  fragment += convert_parameter(std::string(value), schema, parameters);
  keys_.push_back(key_);
  emit(OutputEvent::Kind::kToolCallArguments, fragment);
}

ParsedOutput parse_output(std::string_view text, OutputParserOptions options) {
  OutputParser parser(std::move(options));
  ParsedOutput out;
  std::vector<OutputEvent> events = parser.push(text);
  for (OutputEvent& event : parser.finish()) events.push_back(std::move(event));
  for (const OutputEvent& event : events) {
    using Kind = OutputEvent::Kind;
    switch (event.kind) {
      case Kind::kReasoning:
        out.reasoning += event.text;
        break;
      case Kind::kContent:
        out.content += event.text;
        break;
      case Kind::kToolCallBegin:
        out.calls.push_back({event.id, event.name, "", true});
        break;
      case Kind::kToolCallArguments:
        out.calls[event.index].arguments += event.text;
        break;
      case Kind::kToolCallEnd:
        out.calls[event.index].complete = event.complete;
        break;
    }
  }
  return out;
}

}  // namespace fourfold::text
