// Chat templates: from messages to the prompt a model sees, with the rules of transformers' apply_chat_template.
//
// Templates come from files only. They run with limits on steps, depth, memory and output (jinja/interpreter.h); what
// exceeds one is an Error like any other mistake of a template, with the name of the file and the line.
#pragma once

#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "text/jinja/interpreter.h"

namespace fourfold::text {

// A mistake while a template runs.
class TemplateError : public Error {
 public:
  TemplateError(const std::string& what, bool raised) : Error(what), raised_(raised) {}
  // Whether the template itself refused the conversation, by raise_exception.
  bool raised() const { return raised_; }

 private:
  bool raised_;
};

struct ChatRequest {
  Json messages = Json::array();
  Json tools;      // array or null
  Json documents;  // array or null
  bool add_generation_prompt = false;
  Json variables = Json::object();  // further variables of the template, such as enable_thinking
  // tool_calls[].function.arguments that are strings of JSON (as the OpenAI API has them) become objects; what does not
  // parse to an object becomes {}. Off, they stay as they are, as in transformers.
  bool parse_arguments = false;

  // {"messages": [...], "tools": [...], "documents": [...], "add_generation_prompt": true, "parse_arguments": false,
  // any further variable}. An array is taken as the messages.
  static ChatRequest from_json(const Json& json, std::string_view name);
};

// One template, compiled.
class JinjaTemplate {
 public:
  JinjaTemplate(std::string_view source, std::string name);
  std::string render(const std::vector<std::pair<std::string, jinja::Value>>& variables,
                     const jinja::Limits& limits = {}, std::optional<std::time_t> now = {}) const;

 private:
  std::string name_;
  std::shared_ptr<const jinja::Tree> tree_;
};

// The template or templates of a checkpoint and its named special tokens.
class ChatTemplate {
 public:
  // A template file alone.
  static ChatTemplate from_file(const std::filesystem::path& path);
  // chat_template.jinja and additional_chat_templates/*.jinja before chat_template of tokenizer_config.json (a string
  // or a list of named ones) before chat_template.json; special tokens from tokenizer_config.json, then
  // special_tokens_map.json. Where there is no template at all, an Error; or, where that is allowed, a ChatTemplate
  // with the special tokens, whose render() is the Error.
  enum class Absence { kRefused, kAllowed };
  static ChatTemplate from_directory(const std::filesystem::path& directory, Absence absence = Absence::kRefused);
  static ChatTemplate from_source(std::string_view source, std::string name,
                                  const Json& special_tokens = Json::object());

  // `now` is the clock of strftime_now; by default the present, in local time.
  std::string render(const ChatRequest& request, const jinja::Limits& limits = {},
                     std::optional<std::time_t> now = {}) const;

  // An Error when there is no template.
  void require() const;

  const std::map<std::string, std::string>& special_tokens() const { return special_tokens_; }

 private:
  std::string name_;
  std::map<std::string, JinjaTemplate> templates_;  // by name; "default" is the usual one
  std::map<std::string, std::string> special_tokens_;
};

}  // namespace fourfold::text
