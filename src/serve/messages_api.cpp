#include "serve/messages_api.h"

#include <memory>
#include <utility>

#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/message_thread.h"
#include "serve/messages_answer.h"
#include "serve/routes.h"
#include "serve/structured.h"

namespace fourfold::serve {
namespace {

using enum Treatment;

constexpr FieldRule kOwnRules[] = {
    {"messages", kHonoured, "text, thinking, tool_use, tool_result; images and documents are refused"},
    {"max_tokens", kHonoured, "1 or more, cut to what the context leaves; may be left out"},
    {"system", kHonoured, "a text or blocks of text"},
    {"tools", kHonoured, "those with an input_schema; Anthropic's own, which have a type, are left out"},
    {"tool_choice", kHonoured, "auto, none, any, tool by its name; disable_parallel_tool_use"},
    {"thinking", kHonoured, "enabled with budget_tokens, adaptive, disabled; without it, as the template does"},
    {"output_config", kHonoured, "effort, a variable of the template; format: json_schema"},
    {"output_format", kHonoured, "the same as output_config.format, by its older name"},
    {"stop_sequences", kHonoured, "up to 64; they sleep inside of thinking and of calls"},
    {"thread", kHonoured,
     "create, or continue with previous_message_id: the server holds the conversation; in memory, 1,000 messages and "
     "64 MiB, the oldest go first"},
    {"seed", kHonoured, ""},
    {"chat_template_kwargs", kHonoured, "variables of the template"},
    {"metadata", kIgnored},
    {"service_tier", kIgnored},
    {"context_management", kIgnored},
    {"betas", kIgnored},
    {"n", kRefused, "a request has one answer"},
    {"stop", kRefused, "use stop_sequences"},
    {"stream_options", kRefused, "a stream always has its usage"},
    {"container", kRefused, "nothing is run here"},
    {"mcp_servers", kRefused, "the server calls no tools"},
};
constexpr auto kFields = join_rules(kOwnRules, kGenerationRules);

constexpr size_t kMaxMessages = 100'000, kMaxTools = 2048, kMaxName = 256;

std::string type_of(const Json& block, const std::string& place) {
  if (!block.is_object()) refuse(place, fmt::format("is {}, a block is wanted", json_kind(block)));
  return string_of(block, "type", place);
}

[[noreturn]] void refuse_block(const std::string& type, const std::string& place) {
  refuse(place, fmt::format("is of type {}, but the model reads text only", printable(type, 60)));
}

std::string block_text(const Json& block, const std::string& place) {
  const std::string type = type_of(block, place);
  if (type != "text") refuse_block(type, place);
  return string_of(block, "text", place);
}

// A text, or blocks of text joined.
std::string text_of(const Json& content, const std::string& place, const char* between = "") {
  if (content.is_null()) return "";
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) refuse(place, fmt::format("is {}, a text or blocks are wanted", json_kind(content)));
  std::string out;
  for (size_t i = 0; i < content.size(); ++i) {
    if (i > 0) out += between;
    out += block_text(content[i], fmt::format("{}[{}]", place, i));
  }
  return out;
}

// The texts of a user's message and the results of tools in it, in their order.
void add_user(const Json& content, const std::string& place, Json& out) {
  if (!content.is_array() || content.empty()) {
    out.push_back({{"role", "user"}, {"content", text_of(content, place)}});
    return;
  }
  Json parts = Json::array();
  const auto flush = [&] {
    if (!parts.empty()) out.push_back({{"role", "user"}, {"content", std::exchange(parts, Json::array())}});
  };
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& block = content[i];
    const std::string name = fmt::format("{}[{}]", place, i);
    const std::string type = type_of(block, name);
    if (type == "text") {
      parts.push_back({{"type", "text"}, {"text", string_of(block, "text", name)}});
    } else if (type == "tool_result") {
      flush();
      const auto result = block.find("content");
      const std::string text = result == block.end() ? "" : text_of(*result, name + ".content", "\n");
      out.push_back({{"role", "tool"}, {"tool_call_id", string_of(block, "tool_use_id", name)}, {"content", text}});
    } else {
      refuse_block(type, name);
    }
  }
  flush();
}

void add_assistant(const Json& content, const std::string& place, Json& out) {
  Json message = {{"role", "assistant"}, {"content", ""}};
  if (!content.is_array()) {
    message["content"] = text_of(content, place);
    out.push_back(std::move(message));
    return;
  }
  std::string text, reasoning;
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& block = content[i];
    const std::string name = fmt::format("{}[{}]", place, i);
    const std::string type = type_of(block, name);
    if (type == "text") {
      text += string_of(block, "text", name);
    } else if (type == "thinking") {
      reasoning += string_of(block, "thinking", name);
    } else if (type == "tool_use") {
      const auto input = block.find("input");
      message["tool_calls"].push_back({{"id", string_of(block, "id", name)},
                                       {"type", "function"},
                                       {"function",
                                        {{"name", string_of(block, "name", name)},
                                         {"arguments", input == block.end() ? Json::object() : *input}}}});
    } else if (type != "redacted_thinking") {  // written by another model, and readable by none here
      refuse_block(type, name);
    }
  }
  message["content"] = text;
  if (!reasoning.empty()) message["reasoning_content"] = reasoning;
  out.push_back(std::move(message));
}

// In the form of the chat API. Anthropic's own tools have a type and no schema: clients offer them to every server.
Json read_tools(const Fields& fields) {
  Json out = Json::array();
  const Json* tools = fields.array("tools", kMaxTools);
  if (tools == nullptr) return nullptr;
  for (size_t i = 0; i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const std::string place = fmt::format("tools[{}]", i);
    if (!tool.is_object()) refuse(place, fmt::format("is {}, an object is wanted", json_kind(tool)));
    const auto schema = tool.find("input_schema");
    if (schema == tool.end()) {
      if (tool.contains("type") && tool["type"] != "custom") continue;
      refuse(place, "has no input_schema");
    }
    if (!schema->is_object()) refuse(place + ".input_schema", "is no object");
    const std::string& name = string_of(tool, "name", place);
    if (name.empty() || name.size() > kMaxName) refuse(place, fmt::format("has no name of 1 to {} bytes", kMaxName));
    Json function = {{"name", name}};
    if (tool.contains("description") && tool["description"].is_string()) function["description"] = tool["description"];
    function["parameters"] = *schema;
    if (tool.contains("strict")) function["strict"] = tool["strict"];
    out.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return out.empty() ? Json() : out;
}

// The tools that may be called, and what is said of calls.
Json offered_tools(const Fields& fields, ToolChoice& out) {
  Json tools = read_tools(fields);
  out.strict = take_strict(tools);
  out.parameters = ".input_schema";
  const Json* choice = fields.object("tool_choice");
  if (choice == nullptr) return tools;
  const std::string type = type_of(*choice, "tool_choice");
  if (const auto single = choice->find("disable_parallel_tool_use"); single != choice->end())
    out.parallel = *single != true;
  if (type == "none") return nullptr;
  if (type == "any") {
    out.kind = ToolChoice::Kind::kRequired;
  } else if (type == "tool") {
    out.kind = ToolChoice::Kind::kNamed;
    out.name = named_tool(*choice, tools, "tool_choice.name");
  } else if (type != "auto") {
    refuse("tool_choice", fmt::format("is of type {}, wanted auto, none, any or tool", printable(type, 60)));
  }
  if (type != "auto" && !tools.is_array()) refuse("tool_choice", "asks for a call, but there are no tools");
  return tools;
}

// What thinking says: on or off, and for how many tokens.
std::optional<int64_t> read_thinking(const Fields& fields, Json& variables) {
  const Json* thinking = fields.object("thinking");
  if (thinking == nullptr) return std::nullopt;
  static constexpr FieldRule kRules[] = {{"type", kHonoured}, {"budget_tokens", kHonoured}, {"display", kIgnored}};
  const Fields inner(*thinking, kRules, "thinking.");
  const std::string type = inner.string("type", 64).value_or("");
  const auto budget = inner.integer("budget_tokens", 1, kMaxTokens);
  if (type != "enabled" && type != "adaptive" && type != "disabled") {
    inner.refuse("type", fmt::format("is '{}', wanted enabled, adaptive or disabled", printable(type)));
  }
  variables["enable_thinking"] = type != "disabled";
  return type == "disabled" ? std::nullopt : budget;
}

struct Asked {
  chat::Conversation conversation;
  std::optional<int64_t> budget;
  ToolChoice choice;
  Structure structure;
};

Asked read(const Fields& fields) {
  Asked asked;
  Json& out = asked.conversation.messages;
  if (const Json* system = fields.find("system")) {
    // Block by block: the line that changes with each request stands in one of its own.
    if (system->is_array()) {
      for (size_t i = 0; i < system->size(); ++i) {
        out.push_back({{"role", "system"}, {"content", block_text((*system)[i], fmt::format("system[{}]", i))}});
      }
    } else {
      out.push_back({{"role", "system"}, {"content", text_of(*system, "system")}});
    }
  }
  const Json* messages = fields.array("messages", kMaxMessages);
  if (messages == nullptr) fields.refuse("messages", "is missing, an array of messages is wanted");
  if (messages->empty()) fields.refuse("messages", "is empty, at least one message is wanted");
  for (size_t i = 0; i < messages->size(); ++i) {
    const Json& message = (*messages)[i];
    const std::string place = fmt::format("messages[{}]", i);
    if (!message.is_object()) refuse(place, fmt::format("is {}, an object is wanted", json_kind(message)));
    const std::string& role = string_of(message, "role", place);
    const auto found = message.find("content");
    const Json content = found == message.end() ? Json() : *found;
    if (role == "user") {
      add_user(content, place + ".content", out);
    } else if (role == "assistant") {
      add_assistant(content, place + ".content", out);
    } else if (role == "system") {
      out.push_back({{"role", "system"}, {"content", text_of(content, place + ".content")}});
    } else {
      refuse(place + ".role", fmt::format("is {}, wanted user, assistant or system", printable(role, 60)));
    }
  }
  read_template_variables(fields, asked.conversation.variables);
  asked.conversation.tools = offered_tools(fields, asked.choice);
  asked.budget = read_thinking(fields, asked.conversation.variables);
  if (const Json* config = fields.object("output_config")) {
    static constexpr FieldRule kRules[] = {{"effort", kHonoured}, {"format", kHonoured, "json_schema"}};
    const Fields inner(*config, kRules, "output_config.");
    if (const auto effort = inner.string("effort", 64)) asked.conversation.variables["reasoning_effort"] = *effort;
    if (const Json* format = inner.find("format"))
      asked.structure = Structure::of_format(*format, "output_config.format");
  }
  if (const Json* format = fields.find("output_format")) {
    if (asked.structure.asked()) fields.refuse("output_format", "stands beside output_config.format");
    asked.structure = Structure::of_format(*format, "output_format");
  }
  asked.structure.add_calls(asked.conversation.tools, asked.choice);
  return asked;
}

}  // namespace

std::span<const FieldRule> messages_fields() { return kFields; }

chat::Conversation read_messages(const Fields& fields) { return read(fields).conversation; }

void messages(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kFields);
  const ServedModel& model = incoming.model;
  model.text->require_template();
  const MessageThread thread(incoming.fields, incoming.body, service.stored_threads());
  const Fields fields(thread.request(), kFields);

  MessagesAnswerOptions options;
  options.fields = GenerationFields::read(fields, model);
  options.fields.max_tokens = fields.integer("max_tokens", 1, kMaxTokens);
  options.fields.set_stop(fields, "stop_sequences");
  const Asked asked = read(fields);
  asked.structure.require_end(fields, options.fields);
  chat::Prompt prompt = render(asked.conversation, model, *call);
  options.answer.reasoning = prompt.reasoning;
  options.answer.tools = asked.conversation.tools;
  options.answer.stop = options.fields.stop;
  asked.structure.read_by(options.answer);
  options.answer.make_call_id = [] { return random_id("toolu_"); };
  options.parallel_calls = asked.choice.parallel;
  options.prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
  options.id = random_id("msg_");
  options.model = model.name();
  options.done = thread.keeper(options.id);

  std::vector<GenerationJob::Part> parts = thinking_parts(options.fields.request(std::move(prompt), model, *call), 1,
                                                          asked.budget, *model.text, options.answer.reasoning);
  const bool stream = options.fields.stream;
  const chat::Reasoning reasoning = options.answer.reasoning;
  start_generation(service, call, asked.structure, reasoning, std::move(parts),
                   std::make_unique<MessagesAnswer>(*model.text, std::move(options)), stream);
}

void count_message_tokens(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kFields);
  const ServedModel& model = incoming.model;
  model.text->require_template();
  const MessageThread thread(incoming.fields, incoming.body, service.stored_threads());
  const Fields fields(thread.request(), kFields);
  const auto count = static_cast<int64_t>(render(read_messages(fields), model, *call).tokens.size());
  service.respond(call, json_response({{"input_tokens", count}}));
}

}  // namespace fourfold::serve
