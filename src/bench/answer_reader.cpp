#include "bench/answer_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace fourfold::bench {
namespace {

constexpr size_t kMaxLine = 4 << 20;

int64_t count_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number_integer()) return -1;
  const auto value = found->get<int64_t>();
  return value >= 0 && value < (int64_t{1} << 40) ? value : -1;
}

size_t text_bytes(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get_ref<const std::string&>().size() : 0;
}

bool is_plain(char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; }

}  // namespace

int64_t RequestRecord::delivered() const {
  if (!good()) return 0;
  return output_tokens >= 0 ? output_tokens : static_cast<int64_t>(pieces.size());
}

void AnswerReader::feed(std::string_view bytes, double time) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    if (line_.size() + std::min(end, bytes.size()) > kMaxLine) {
      if (record_.good()) record_.error = "a line of the stream of more than 4 MiB";
      return;
    }
    line_ += bytes.substr(0, end);
    if (end == std::string_view::npos) return;
    bytes.remove_prefix(end + 1);
    if (line_.ends_with('\r')) line_.pop_back();
    line(line_, time);
    line_.clear();
  }
}

// Every event of these APIs is one line of data; comments and other fields say nothing here.
void AnswerReader::line(std::string_view line, double time) {
  constexpr std::string_view kData = "data:";
  if (!line.starts_with(kData) || !record_.good()) return;
  line.remove_prefix(kData.size());
  if (line.starts_with(' ')) line.remove_prefix(1);
  if (line == "[DONE]") {
    done_ = true;
    return;
  }
  if (like_before(line, time)) return;
  try {
    event(line, time);
  } catch (const Error& error) {
    record_.error = error.what();
  }
}

void AnswerReader::event(std::string_view data, double time) {
  JsonLimits limits;
  limits.reject_duplicate_keys = false;
  const Json json = parse_json(data, "an event of the stream", limits);
  if (!json.is_object()) fail("an event of the stream is {}, wanted an object", json_kind(json));
  if (const auto error = json.find("error"); error != json.end() && !error->is_null()) {
    const auto message = error->is_object() ? error->find("message") : error->end();
    const bool words = error->is_object() && message != error->end() && message->is_string();
    fail("the server says: {}", printable(words ? message->get_ref<const std::string&>() : error->dump(), 200));
  }
  if (const auto found = json.find("usage"); found != json.end() && found->is_object()) usage(*found);
  const auto choices = json.find("choices");
  if (choices == json.end() || !choices->is_array() || choices->empty()) return;
  const Json& choice = choices->front();
  if (!choice.is_object()) fail("a choice is {}, wanted an object", json_kind(choice));
  size_t content = text_bytes(choice, "text"), other = 0;
  if (const auto delta = choice.find("delta"); delta != choice.end() && delta->is_object()) {
    content += text_bytes(*delta, "content");
    // Both names carry the same text where both are sent.
    other += std::max(text_bytes(*delta, "reasoning"), text_bytes(*delta, "reasoning_content"));
    if (const auto calls = delta->find("tool_calls"); calls != delta->end() && calls->is_array()) {
      for (const Json& call : *calls) {
        const auto function = call.is_object() ? call.find("function") : call.end();
        if (!call.is_object() || function == call.end() || !function->is_object()) continue;
        other += text_bytes(*function, "name") + text_bytes(*function, "arguments");
      }
    }
  }
  if (content + other > 0) piece(content, other, time);
  if (const auto finish = choice.find("finish_reason"); finish != choice.end() && finish->is_string()) {
    record_.finish = finish->get<std::string>();
  } else if (const auto found = json.find("usage"); found == json.end() || found->is_null()) {
    learn(data, choice, content, other);
  }
}

void AnswerReader::piece(size_t content, size_t other, double time) {
  if (record_.first < 0) record_.first = time;
  if (content > 0 && record_.first_content < 0) record_.first_content = time;
  record_.pieces.push_back(time);
  record_.bytes += static_cast<int64_t>(content + other);
}

// Most events of a stream are the one before with another text. Those are not parsed: a client that takes a processor
// from the server measures itself.
bool AnswerReader::like_before(std::string_view data, double time) {
  if (before_.empty() || data.size() <= before_.size() + after_.size() || !data.starts_with(before_) ||
      !data.ends_with(after_)) {
    return false;
  }
  const std::string_view text = data.substr(before_.size(), data.size() - before_.size() - after_.size());
  // Escapes, and what is not ASCII, are for the parser.
  if (!std::all_of(text.begin(), text.end(), is_plain)) return false;
  piece(text.size(), 0, time);
  return true;
}

// Of an event that was one text of the answer, and nothing else: what stands around it, if that can be told.
void AnswerReader::learn(std::string_view data, const Json& choice, size_t content, size_t other) {
  before_.clear();
  const Json* delta = choice.contains("delta") ? &choice["delta"] : &choice;
  const char* name = delta == &choice ? "text" : "content";
  if (content == 0 || other > 0 || !delta->is_object() || text_bytes(*delta, name) != content) return;
  const std::string& text = delta->at(name).get_ref<const std::string&>();
  if (text.empty() || !std::all_of(text.begin(), text.end(), is_plain)) return;
  const std::string quoted = fmt::format("\"{}\"", text);
  const size_t at = data.find(quoted);
  if (at == std::string_view::npos || data.find(quoted, at + 1) != std::string_view::npos) return;
  before_ = data.substr(0, at + 1);
  after_ = data.substr(at + quoted.size() - 1);
}

void AnswerReader::usage(const Json& usage) {
  record_.prompt_tokens = count_of(usage, "prompt_tokens");
  record_.output_tokens = count_of(usage, "completion_tokens");
  if (const auto details = usage.find("prompt_tokens_details"); details != usage.end() && details->is_object()) {
    record_.cached_tokens = count_of(*details, "cached_tokens");
  }
  if (const auto details = usage.find("completion_tokens_details"); details != usage.end() && details->is_object()) {
    record_.reasoning_tokens = count_of(*details, "reasoning_tokens");
  }
}

void AnswerReader::finish() {
  if (!record_.good()) return;
  if (record_.pieces.empty()) {
    record_.error = "an answer without text";
  } else if (record_.finish.empty()) {
    record_.error = "a stream that ended without a finish_reason";
  } else if (!done_) {
    record_.error = "a stream that ended without [DONE]";
  }
}

}  // namespace fourfold::bench
