#include "chat/conversation.h"

#include <algorithm>
#include <array>

namespace fourfold::chat {
namespace {

constexpr std::string_view kBillingHeader = "x-anthropic-billing-header:";

template <typename... Args>
[[noreturn]] void refuse(std::string field, fmt::format_string<Args...> format, Args&&... args) {
  throw FieldError(std::move(field), fmt::format(format, std::forward<Args>(args)...));
}

bool is_system(const std::string& role) { return role == "system" || role == "developer"; }

}  // namespace

std::string part_text(const Json& part, const std::string& field) {
  if (part.is_string()) return part.get<std::string>();
  if (!part.is_object()) refuse(field, "is {}, a part with a type is wanted", json_kind(part));
  std::string type = "text";
  if (const auto found = part.find("type"); found != part.end()) {
    if (!found->is_string()) refuse(field + ".type", "is {}, a string is wanted", json_kind(*found));
    type = found->get<std::string>();
  }
  constexpr std::array<std::string_view, 5> kTexts = {"text", "input_text", "output_text", "summary_text",
                                                      "reasoning_text"};
  const char* key = type == "refusal" ? "refusal" : "text";
  if (type != "refusal" && std::find(kTexts.begin(), kTexts.end(), type) == kTexts.end()) {
    const bool image = type.find("image") != std::string::npos;
    refuse(field, "is {} '{}', but the model reads text only", image ? "an image of type" : "of type", printable(type));
  }
  const auto text = part.find(key);
  if (text == part.end()) refuse(field + "." + key, "is missing, a string is wanted");
  if (!text->is_string()) refuse(field + "." + key, "is {}, a string is wanted", json_kind(*text));
  return text->get<std::string>();
}

namespace {

// Without the lines that begin with kBillingHeader.
std::string without_billing_header(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    const std::string_view line = text.substr(0, newline == std::string_view::npos ? text.size() : newline + 1);
    if (!line.starts_with(kBillingHeader)) out += line;
    text.remove_prefix(line.size());
  }
  return out;
}

// Part by part: what follows the line in the next part must not be taken for its end.
std::string content_text(const Json& message, const std::string& field, bool system) {
  const auto found = message.find("content");
  if (found == message.end() || found->is_null()) return "";
  const auto clean = [&](std::string text) { return system ? without_billing_header(text) : text; };
  if (found->is_string()) return clean(found->get<std::string>());
  const std::string name = field + ".content";
  if (!found->is_array()) refuse(name, "is {}, a string, an array of parts or null is wanted", json_kind(*found));
  std::string text;
  for (size_t i = 0; i < found->size(); ++i) text += clean(part_text((*found)[i], fmt::format("{}[{}]", name, i)));
  return text;
}

Json normalised_arguments(const Json& arguments) {
  if (arguments.is_object()) return arguments;
  if (arguments.is_null()) return Json::object();
  if (!arguments.is_string()) return {{"arguments", arguments}};
  const std::string& text = arguments.get_ref<const std::string&>();
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) return Json::object();
  try {
    JsonLimits limits;
    limits.reject_duplicate_keys = false;
    Json parsed = parse_json(text, "arguments", limits);
    if (parsed.is_object()) return parsed;
    if (parsed.is_null()) return Json::object();
  } catch (const Error&) {
  }
  return {{"arguments", text}};
}

Json normalised_calls(const Json& calls, const std::string& field) {
  if (!calls.is_array()) refuse(field, "is {}, an array is wanted", json_kind(calls));
  Json out = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string name = fmt::format("{}[{}]", field, i);
    if (!calls[i].is_object()) refuse(name, "is {}, an object is wanted", json_kind(calls[i]));
    Json call = calls[i];
    const auto function = call.find("function");
    if (function != call.end() && !function->is_object()) {
      refuse(name + ".function", "is {}, an object is wanted", json_kind(*function));
    }
    Json& inner = function == call.end() ? call : *function;
    const auto called = inner.find("name");
    const std::string path = function == call.end() ? name : name + ".function";
    if (called == inner.end() || !called->is_string()) {
      refuse(path + ".name", "is {}, a string is wanted", called == inner.end() ? "missing" : json_kind(*called));
    }
    const auto arguments = inner.find("arguments");
    inner["arguments"] = arguments == inner.end() ? Json::object() : normalised_arguments(*arguments);
    out.push_back(std::move(call));
  }
  return out;
}

// All but the content.
Json normalised_fields(const Json& message, const std::string& field) {
  Json out = Json::object();
  const Json* reasoning = nullptr;
  for (const char* key : {"reasoning_content", "reasoning"}) {
    const auto found = message.find(key);
    if (found == message.end() || found->is_null()) continue;
    if (!found->is_string()) refuse(field + "." + key, "is {}, a string is wanted", json_kind(*found));
    if (reasoning == nullptr) reasoning = &*found;
  }
  for (const auto& [key, value] : message.items()) {
    if (value.is_null() && key != "content") continue;
    if (key == "reasoning" || key == "reasoning_content") continue;
    if (key == "tool_calls") {
      Json calls = normalised_calls(value, field + ".tool_calls");
      if (!calls.empty()) out[key] = std::move(calls);
    } else {
      out[key] = value;
    }
  }
  if (reasoning != nullptr) out["reasoning_content"] = *reasoning;
  return out;
}

}  // namespace

Conversation Conversation::from_json(const Json& json, std::string_view name) {
  text::ChatRequest request = text::ChatRequest::from_json(json, name);
  Conversation out;
  out.messages = std::move(request.messages);
  out.tools = std::move(request.tools);
  out.documents = std::move(request.documents);
  out.variables = std::move(request.variables);
  return out;
}

Json normalise(const Json& messages) {
  if (!messages.is_array()) refuse("messages", "is {}, an array is wanted", json_kind(messages));
  if (messages.empty()) refuse("messages", "is empty, at least one message is wanted");
  Json system;
  std::string instructions;
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    const std::string field = fmt::format("messages[{}]", i);
    if (!message.is_object()) refuse(field, "is {}, an object is wanted", json_kind(message));
    const auto role = message.find("role");
    if (role == message.end()) refuse(field + ".role", "is missing, a string is wanted");
    if (!role->is_string()) refuse(field + ".role", "is {}, a string is wanted", json_kind(*role));
    const bool instructs = is_system(role->get_ref<const std::string&>());
    std::string content = content_text(message, field, instructs);
    Json fields = normalised_fields(message, field);
    if (!instructs) {
      fields["content"] = std::move(content);
      out.push_back(std::move(fields));
      continue;
    }
    if (system.is_null()) system = std::move(fields);
    if (content.empty()) continue;
    if (!instructions.empty()) instructions += "\n\n";
    instructions += content;
  }
  if (system.is_null()) return out;
  system["role"] = "system";
  system["content"] = std::move(instructions);
  out.insert(out.begin(), std::move(system));
  return out;
}

text::ChatRequest template_request(const Conversation& conversation) {
  text::ChatRequest request;
  request.messages = normalise(conversation.messages);
  request.tools = conversation.tools;
  request.documents = conversation.documents;
  request.variables = conversation.variables;
  request.add_generation_prompt = conversation.add_generation_prompt;
  return request;
}

}  // namespace fourfold::chat
