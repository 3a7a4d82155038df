#include "text/chat_template.h"

#include <algorithm>

#include "base/file.h"
#include "text/unicode.h"

namespace fourfold::text {

using jinja::Value;

namespace {

constexpr uint64_t kMaxTemplate = 4u << 20;
constexpr uint64_t kMaxConfig = 64u << 20;

// transformers drops keys without a value, and gives reasoning under all the names that templates read.
Json prepare_message(const Json& message, const ChatRequest& request) {
  Json out = Json::object();
  const Json* reasoning = nullptr;
  for (const char* field : {"reasoning_content", "thinking", "reasoning"}) {
    const auto found = message.find(field);
    if (reasoning == nullptr && found != message.end() && !found->is_null()) reasoning = &*found;
  }
  if (reasoning != nullptr) out["thinking"] = *reasoning;
  for (const auto& [key, value] : message.items()) {
    if (!value.is_null()) out[key] = value;
  }
  if (reasoning != nullptr) out["reasoning_content"] = *reasoning;
  const auto calls = out.find("tool_calls");
  if (!request.parse_arguments || calls == out.end() || !calls->is_array()) return out;
  for (Json& call : *calls) {
    if (!call.is_object()) continue;
    Json* function = call.contains("function") && call["function"].is_object() ? &call["function"] : &call;
    const auto arguments = function->find("arguments");
    if (arguments == function->end() || !arguments->is_string()) continue;
    Json parsed;
    try {
      JsonLimits limits;
      limits.reject_duplicate_keys = false;
      parsed = parse_json(arguments->get_ref<const std::string&>(), "arguments", limits);
    } catch (const Error&) {
    }
    *arguments = parsed.is_object() ? std::move(parsed) : Json::object();
  }
  return out;
}

// "bos_token" and its kind: a string, or an object with "content".
void read_special_tokens(const Json& config, std::map<std::string, std::string>& out) {
  if (!config.is_object()) return;
  const auto add = [&](const std::string& name, const Json& value) {
    if (value.is_string()) {
      out.try_emplace(name, value.get<std::string>());
    } else if (value.is_object() && value.contains("content") && value["content"].is_string()) {
      out.try_emplace(name, value["content"].get<std::string>());
    }
  };
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    if (const auto found = config.find(name); found != config.end()) add(name, *found);
  }
  for (const char* more : {"model_specific_special_tokens", "extra_special_tokens"}) {
    const auto found = config.find(more);
    if (found == config.end() || !found->is_object()) continue;
    for (const auto& [name, value] : found->items()) add(name, value);
  }
}

}  // namespace

JinjaTemplate::JinjaTemplate(std::string_view source, std::string name) : name_(std::move(name)) {
  if (source.size() > kMaxTemplate) {
    fail("{}: a template of {} bytes, at most {} are accepted", name_, source.size(), kMaxTemplate);
  }
  if (!is_valid_utf8(source)) fail("{}: the template is not valid UTF-8", name_);
  tree_ = std::make_shared<const jinja::Tree>(jinja::parse_template(source, name_));
}

std::string JinjaTemplate::render(const std::vector<std::pair<std::string, Value>>& variables,
                                  const jinja::Limits& limits, std::optional<std::time_t> now) const {
  jinja::Interpreter interpreter(*tree_, limits, now);
  try {
    return interpreter.render(variables);
  } catch (const jinja::RaisedByTemplate& raised) {
    throw TemplateError(fmt::format("{}: line {}: the template refuses the conversation: {}", name_, interpreter.line(),
                                    printable(raised.message, 400)),
                        true);
  } catch (const Error& error) {
    throw TemplateError(fmt::format("{}: line {}: {}", name_, interpreter.line(), error.what()), false);
  }
}

ChatRequest ChatRequest::from_json(const Json& json, std::string_view name) {
  ChatRequest request;
  if (json.is_array()) {
    request.messages = json;
    return request;
  }
  if (!json.is_object()) {
    fail("{}: {} at the top, an object with 'messages' or an array of messages is wanted", name, json_kind(json));
  }
  if (!json.contains("messages")) fail("{}: 'messages' is missing", name);
  for (const auto& [key, value] : json.items()) {
    if (key == "messages") {
      request.messages = value;
    } else if (key == "tools") {
      request.tools = value;
    } else if (key == "documents") {
      request.documents = value;
    } else if (key == "add_generation_prompt" || key == "parse_arguments") {
      if (!value.is_boolean()) fail("{}: '{}' is {}, true or false is wanted", name, key, json_kind(value));
      (key == "parse_arguments" ? request.parse_arguments : request.add_generation_prompt) = value.get<bool>();
    } else {
      request.variables[key] = value;
    }
  }
  return request;
}

ChatTemplate ChatTemplate::from_source(std::string_view source, std::string name, const Json& special_tokens) {
  ChatTemplate out;
  out.name_ = name;
  out.templates_.emplace("default", JinjaTemplate(source, std::move(name)));
  read_special_tokens(special_tokens, out.special_tokens_);
  return out;
}

ChatTemplate ChatTemplate::from_file(const std::filesystem::path& path) {
  return from_source(read_file(path, kMaxTemplate), path.string());
}

ChatTemplate ChatTemplate::from_directory(const std::filesystem::path& directory, Absence absence) {
  namespace fs = std::filesystem;
  ChatTemplate out;
  out.name_ = directory.string();
  JsonLimits limits;
  limits.max_bytes = kMaxConfig;
  limits.reject_duplicate_keys = false;
  Json config;
  const fs::path config_path = directory / "tokenizer_config.json";
  if (name_taken(config_path)) {
    config = parse_json_file(config_path, limits);
    read_special_tokens(config, out.special_tokens_);
  }
  if (name_taken(directory / "special_tokens_map.json")) {
    read_special_tokens(parse_json_file(directory / "special_tokens_map.json", limits), out.special_tokens_);
  }
  const auto add = [&](const std::string& name, std::string_view source, const fs::path& path) {
    out.templates_.emplace(name, JinjaTemplate(source, path.string()));
  };
  if (name_taken(directory / "chat_template.jinja")) {
    add("default", read_file(directory / "chat_template.jinja", kMaxTemplate), directory / "chat_template.jinja");
  }
  if (directory_exists(directory / "additional_chat_templates")) {
    for (const auto& entry : fs::directory_iterator(directory / "additional_chat_templates")) {
      if (entry.path().extension() == ".jinja") {
        add(entry.path().stem().string(), read_file(entry.path(), kMaxTemplate), entry.path());
      }
    }
  }
  if (out.templates_.empty() && config.is_object() && config.contains("chat_template")) {
    const Json& given = config["chat_template"];
    if (given.is_string()) {
      add("default", given.get_ref<const std::string&>(), config_path);
    } else if (given.is_array()) {
      for (const Json& entry : given) {
        if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() ||
            !entry.contains("template") || !entry["template"].is_string()) {
          fail("{}: an entry of 'chat_template' must be an object with the strings 'name' and 'template'",
               config_path.string());
        }
        add(entry["name"].get<std::string>(), entry["template"].get_ref<const std::string&>(), config_path);
      }
    } else if (!given.is_null()) {
      fail("{}: 'chat_template' is {}, a string or an array is wanted", config_path.string(), json_kind(given));
    }
  }
  if (out.templates_.empty() && name_taken(directory / "chat_template.json")) {
    const fs::path path = directory / "chat_template.json";
    const Json file = parse_json_file(path, limits);
    if (!file.is_object() || !file.contains("chat_template") || !file["chat_template"].is_string()) {
      fail("{}: an object with the string 'chat_template' is wanted", path.string());
    }
    add("default", file["chat_template"].get_ref<const std::string&>(), path);
  }
  if (absence == Absence::kRefused) out.require();
  return out;
}

void ChatTemplate::require() const {
  if (!templates_.empty()) return;
  fail("{}: no chat template: neither chat_template.jinja nor 'chat_template' in tokenizer_config.json", name_);
}

std::string ChatTemplate::render(const ChatRequest& request, const jinja::Limits& limits,
                                 std::optional<std::time_t> now) const {
  require();
  if (!request.messages.is_array()) fail("'messages' is {}, an array is wanted", json_kind(request.messages));
  if (request.messages.empty()) fail("'messages' is empty, at least one message is wanted");
  for (const auto& [what, value] : {std::pair("tools", &request.tools), std::pair("documents", &request.documents)}) {
    if (!value->is_array() && !value->is_null()) fail("'{}' is {}, an array is wanted", what, json_kind(*value));
    for (size_t i = 0; i < value->size(); ++i) {
      if (!(*value)[i].is_object()) fail("'{}[{}]' is {}, an object is wanted", what, i, json_kind((*value)[i]));
    }
  }
  if (!request.variables.is_object()) fail("the template variables must be an object");
  Json messages = Json::array();
  for (const Json& message : request.messages) {
    if (!message.is_object()) {
      fail("'messages[{}]' is {}, an object is wanted", messages.size(), json_kind(message));
    }
    messages.push_back(prepare_message(message, request));
  }
  std::vector<std::pair<std::string, Value>> variables;
  for (const auto& [name, token] : special_tokens_) variables.emplace_back(name, Value::string(token));
  for (const auto& [name, value] : request.variables.items()) variables.emplace_back(name, jinja::from_json(value));
  variables.emplace_back("messages", jinja::from_json(messages));
  variables.emplace_back("tools", jinja::from_json(request.tools));
  variables.emplace_back("documents", jinja::from_json(request.documents));
  variables.emplace_back("add_generation_prompt", Value::boolean(request.add_generation_prompt));

  auto chosen = templates_.find("default");
  if (templates_.size() > 1 || chosen == templates_.end()) {
    if (const auto with_tools = templates_.find("tool_use");
        !request.tools.is_null() && with_tools != templates_.end()) {
      chosen = with_tools;
    }
    if (chosen == templates_.end()) {
      std::string names;
      for (const auto& [name, unused] : templates_) names += (names.empty() ? "" : ", ") + name;
      fail("{}: several chat templates ({}) and none is named default", name_, printable(names, 200));
    }
  }
  return chosen->second.render(variables, limits, now);
}

}  // namespace fourfold::text
