#include "serve/responses_api.h"

#include <cmath>
#include <ctime>
#include <memory>
#include <utility>

#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/response_store.h"
#include "serve/responses_answer.h"
#include "serve/routes.h"
#include "serve/structured.h"

namespace fourfold::serve {
namespace {

using enum Treatment;

constexpr FieldRule kOwnRules[] = {
    {"input", kHonoured, "a text, or items: messages of text, reasoning, function calls and their outputs"},
    {"instructions", kHonoured, "a system message; not taken over from the previous response"},
    {"previous_response_id", kHonoured, "of a response that was stored; 404 where it is unknown or gone"},
    {"store", kHonoured, "true where it is missing; in memory, 1,000 responses and 64 MiB, the oldest go first"},
    {"max_output_tokens", kHonoured, "1 or more, cut to what the context leaves"},
    {"tools", kHonoured, "of type function; others (namespace, web_search, …) are left out"},
    {"tool_choice", kHonoured, "auto, none, required, a function by its name"},
    {"parallel_tool_calls", kHonoured, "false: the answer ends with its first call"},
    {"reasoning", kHonoured, "effort, a variable of the template; none is enable_thinking: false"},
    {"text", kHonoured, "format: text, json_object, json_schema"},
    {"truncation", kHonoured, "disabled only"},
    {"background", kHonoured, "false only"},
    {"metadata", kHonoured, "given back"},
    {"seed", kHonoured, ""},
    {"stop", kHonoured, "a string or up to 64"},
    {"thinking_token_budget", kHonoured, "after so many tokens the reasoning is closed"},
    {"chat_template_kwargs", kHonoured, "variables of the template"},
    {"include", kIgnored, "reasoning is always in the output"},
    {"user", kIgnored},
    {"service_tier", kIgnored},
    {"safety_identifier", kIgnored},
    {"prompt_cache_key", kIgnored, "prefixes are found without"},
    {"prompt_cache_retention", kIgnored},
    {"client_metadata", kIgnored},
    {"top_logprobs", kIgnored},
    {"max_tool_calls", kIgnored, "of tools that the server calls, and it calls none"},
    {"stream_options", kIgnored},
    {"n", kRefused, "a response is one answer"},
    {"conversation", kRefused, "use previous_response_id"},
    {"prompt", kRefused, "there are no stored prompts; use input"},
};
constexpr auto kFields = join_rules(kOwnRules, kGenerationRules);

constexpr size_t kMaxItems = 100'000, kMaxTools = 2048, kMaxName = 256;

// A text, or parts of one.
std::string text_of(const Json& content, const std::string& place) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) refuse(place, fmt::format("is {}, a text or parts are wanted", json_kind(content)));
  std::string out;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string name = fmt::format("{}[{}]", place, i);
    out += chat::part_text(content[i], name);
  }
  return out;
}

// Reasoning, text and calls that follow each other are one message of the model.
class Messages {
 public:
  void add(const Json& item, const std::string& place) {
    if (!item.is_object()) refuse(place, fmt::format("is {}, an object is wanted", json_kind(item)));
    const bool typed = item.contains("type") && !item["type"].is_null();
    const std::string type = typed ? string_of(item, "type", place) : "message";
    if (type == "message") {
      const std::string& role = string_of(item, "role", place);
      const auto content = item.find("content");
      if (role != "assistant") {
        flush();
        if (content != item.end() && !content->is_null())
          text_of(*content, place + ".content");  // refused by its place
        // Parts stay parts: what stands in one of its own may be left out (chat/conversation.h).
        out_.push_back({{"role", role}, {"content", content == item.end() ? Json() : *content}});
        return;
      }
      if (pending_.contains("tool_calls") || pending_.contains("content")) flush();
      pending()["content"] = content == item.end() ? "" : text_of(*content, place + ".content");
    } else if (type == "reasoning") {
      if (pending_.contains("content") || pending_.contains("tool_calls")) flush();
      const auto content = item.find("content");
      const auto summary = item.find("summary");
      std::string text;
      if (content != item.end() && !content->is_null()) text = text_of(*content, place + ".content");
      if (text.empty() && summary != item.end()) text = text_of(*summary, place + ".summary");
      if (!text.empty()) pending()["reasoning_content"] = text;
    } else if (type == "function_call") {
      const auto arguments = item.find("arguments");
      pending()["tool_calls"].push_back({{"id", string_of(item, "call_id", place)},
                                         {"type", "function"},
                                         {"function",
                                          {{"name", string_of(item, "name", place)},
                                           {"arguments", arguments == item.end() ? Json("{}") : *arguments}}}});
    } else if (type == "function_call_output") {
      flush();
      const auto output = item.find("output");
      out_.push_back({{"role", "tool"},
                      {"tool_call_id", string_of(item, "call_id", place)},
                      {"content", output == item.end() ? "" : text_of(*output, place + ".output")}});
    } else {
      refuse(place, fmt::format("is of type {}, wanted message, reasoning, function_call or function_call_output",
                                printable(type, 60)));
    }
  }

  Json take() {
    flush();
    return std::move(out_);
  }

 private:
  Json& pending() {
    if (pending_.empty()) pending_["role"] = "assistant";
    return pending_;
  }
  void flush() {
    if (!pending_.empty()) out_.push_back(std::exchange(pending_, Json::object()));
  }

  Json out_ = Json::array(), pending_ = Json::object();
};

// In the form of the chat API. Tools that a server would run are offered to every server: they are left out.
Json read_tools(const Fields& fields) {
  Json out = Json::array();
  if (const Json* tools = fields.array("tools", kMaxTools)) {
    for (size_t i = 0; i < tools->size(); ++i) {
      const Json& tool = (*tools)[i];
      const std::string place = fmt::format("tools[{}]", i);
      if (!tool.is_object()) refuse(place, fmt::format("is {}, an object is wanted", json_kind(tool)));
      if (string_of(tool, "type", place) != "function") continue;
      const std::string& name = string_of(tool, "name", place);
      if (name.empty() || name.size() > kMaxName) refuse(place, fmt::format("has no name of 1 to {} bytes", kMaxName));
      Json function = {{"name", name}};
      if (tool.contains("description") && tool["description"].is_string())
        function["description"] = tool["description"];
      if (tool.contains("parameters") && !tool["parameters"].is_null()) {
        if (!tool["parameters"].is_object()) refuse(place + ".parameters", "is no object");
        function["parameters"] = tool["parameters"];
      }
      if (tool.contains("strict")) function["strict"] = tool["strict"];
      out.push_back({{"type", "function"}, {"function", std::move(function)}});
    }
  }
  const Json* choice = fields.find("tool_choice");
  if (choice != nullptr && *choice == "none") return nullptr;
  return out.empty() ? Json() : out;
}

// Beside the tools that read_tools() gives.
ToolChoice read_tool_choice(const Fields& fields, Json& tools) {
  ToolChoice out;
  out.parallel = fields.boolean("parallel_tool_calls").value_or(true);
  out.strict = take_strict(tools);
  out.parameters = ".parameters";
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr || *choice == "auto" || *choice == "none") return out;
  if (*choice == "required") {
    out.kind = ToolChoice::Kind::kRequired;
  } else if (choice->is_object() && choice->value("type", Json()) == "function") {
    out.kind = ToolChoice::Kind::kNamed;
    out.name = named_tool(*choice, tools, "tool_choice.name");
  } else {
    fields.refuse("tool_choice", fmt::format("is {}, wanted auto, none, required or a function by its name",
                                             printable(dump(*choice), 60)));
  }
  if (!tools.is_array()) fields.refuse("tool_choice", "asks for a call, but there are no tools");
  return out;
}

void read_variables(const Fields& fields, Json& variables) {
  read_template_variables(fields, variables);
  if (const Json* reasoning = fields.object("reasoning")) {
    static constexpr FieldRule kRules[] = {
        {"effort", kHonoured}, {"summary", kIgnored}, {"generate_summary", kIgnored}, {"context", kIgnored}};
    const Fields inner(*reasoning, kRules, "reasoning.");
    if (const auto effort = inner.string("effort", 64)) {
      variables["reasoning_effort"] = *effort;
      if (*effort == "none") variables["enable_thinking"] = false;
    }
  }
}

void require_defaults(const Fields& fields) {
  if (fields.boolean("background").value_or(false)) fields.refuse("background", "is true: a response is waited for");
  if (fields.string("truncation", 64).value_or("disabled") != "disabled") {
    fields.refuse("truncation", "is not disabled: a conversation is never cut silently");
  }
}

Structure read_text_format(const Fields& fields) {
  const Json* text = fields.object("text");
  if (text == nullptr) return {};
  static constexpr FieldRule kRules[] = {{"format", kHonoured}, {"verbosity", kIgnored}};
  const Json* format = Fields(*text, kRules, "text.").find("format");
  return format == nullptr ? Structure() : Structure::of_format(*format, "text.format");
}

// 0.7f is 0.7, and not the double that it is.
double shortest(float value) { return std::round(static_cast<double>(value) * 1e6) / 1e6; }

// What a response says of its request.
Json request_part(const Fields& fields, const std::string& id, const ServedModel& model, const GenerationFields& given,
                  const engine::Request& request) {
  const auto or_null = [&](const char* name) {
    const Json* value = fields.find(name);
    return value == nullptr ? Json() : *value;
  };
  const auto or_else = [&](const char* name, Json otherwise) {
    const Json* value = fields.find(name);
    return value == nullptr ? std::move(otherwise) : *value;
  };
  return {{"id", id},
          {"object", "response"},
          {"created_at", static_cast<int64_t>(std::time(nullptr))},
          {"status", "in_progress"},
          {"background", false},
          {"error", nullptr},
          {"incomplete_details", nullptr},
          {"instructions", or_null("instructions")},
          {"max_output_tokens", given.max_tokens ? Json(*given.max_tokens) : Json()},
          {"model", model.name()},
          {"output", Json::array()},
          {"parallel_tool_calls", or_else("parallel_tool_calls", true)},
          {"previous_response_id", or_null("previous_response_id")},
          {"reasoning", or_else("reasoning", {{"effort", nullptr}, {"summary", nullptr}})},
          {"store", or_else("store", true)},
          {"temperature", shortest(request.sampling.temperature)},
          {"text", or_else("text", {{"format", {{"type", "text"}}}})},
          {"tool_choice", or_else("tool_choice", "auto")},
          {"tools", or_else("tools", Json::array())},
          {"top_p", shortest(request.sampling.top_p)},
          {"truncation", "disabled"},
          {"usage", nullptr},
          {"user", or_null("user")},
          {"metadata", or_else("metadata", Json::object())}};
}

}  // namespace

std::span<const FieldRule> responses_fields() { return kFields; }

Json messages_of_items(const Json& input) {
  if (input.is_string()) return Json::array({{{"role", "user"}, {"content", input}}});
  if (!input.is_array()) refuse("input", fmt::format("is {}, a text or items are wanted", json_kind(input)));
  if (input.size() > kMaxItems)
    refuse("input", fmt::format("has {} items, at most {} are taken", input.size(), kMaxItems));
  Messages messages;
  for (size_t i = 0; i < input.size(); ++i) messages.add(input[i], fmt::format("input[{}]", i));
  return messages.take();
}

void responses(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kFields);
  const Fields& fields = incoming.fields;
  const ServedModel& model = incoming.model;
  model.text->require_template();
  require_defaults(fields);
  fields.object("metadata");

  const Json* input = fields.find("input");
  if (input == nullptr) fields.refuse("input", "is missing, a text or items are wanted");
  Json messages = Json::array();
  if (const auto previous = fields.string("previous_response_id", 256)) {
    const auto stored = service.stored_responses().find(*previous);
    if (!stored) {
      ApiError error(404, fmt::format("previous_response_id {} is not known, or not any more", printable(*previous)));
      error.param = "previous_response_id";
      error.code = "previous_response_not_found";
      throw error;
    }
    messages = stored->messages;
  }
  for (Json& message : messages_of_items(*input)) messages.push_back(std::move(message));
  if (messages.empty()) fields.refuse("input", "is empty, at least one item is wanted");

  ResponsesAnswerOptions options;
  options.fields = GenerationFields::read(fields, model);
  options.fields.max_tokens = fields.integer("max_output_tokens", 1, kMaxTokens);
  options.parallel_calls = fields.boolean("parallel_tool_calls").value_or(true);
  const auto budget = fields.integer("thinking_token_budget", 0, kMaxTokens);
  chat::Conversation conversation;
  if (const auto instructions = fields.string("instructions", std::string::npos)) {
    conversation.messages.push_back({{"role", "system"}, {"content", *instructions}});
  }
  for (const Json& message : messages) conversation.messages.push_back(message);
  conversation.tools = read_tools(fields);
  const ToolChoice choice = read_tool_choice(fields, conversation.tools);
  read_variables(fields, conversation.variables);
  chat::Prompt prompt = render(conversation, model, *call);

  options.id = random_id("resp_");
  options.answer.reasoning = prompt.reasoning;
  options.answer.tools = conversation.tools;
  options.answer.stop = options.fields.stop;
  Structure structure = read_text_format(fields);
  structure.add_calls(conversation.tools, choice);
  structure.require_end(fields, options.fields);
  structure.read_by(options.answer);
  options.prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
  engine::Request request = options.fields.request(std::move(prompt), model, *call);
  options.response = request_part(fields, options.id, model, options.fields, request);
  if (fields.boolean("store").value_or(true)) {
    options.done = [&store = service.stored_responses(), id = options.id, messages](const Json& message,
                                                                                    const Json& response) {
      StoredResponse stored{messages, response};
      stored.messages.push_back(message);
      store.put(id, std::move(stored));
    };
  }
  const bool stream = options.fields.stream;
  std::vector<GenerationJob::Part> parts =
      thinking_parts(std::move(request), 1, budget, *model.text, options.answer.reasoning);
  const chat::Reasoning reasoning = options.answer.reasoning;
  start_generation(service, call, structure, reasoning, std::move(parts),
                   std::make_unique<ResponsesAnswer>(*model.text, std::move(options)), stream);
}

namespace {

std::string asked_id(const ApiCall& call) {
  return call.exchange->request().path.substr(std::string_view("/v1/responses/").size());
}

[[noreturn]] void unknown(const std::string& id) {
  throw ApiError(404, fmt::format("there is no response {}", printable(id)));
}

}  // namespace

void stored_response(Service& service, const std::shared_ptr<ApiCall>& call) {
  const auto stored = service.stored_responses().find(asked_id(*call));
  if (!stored) unknown(asked_id(*call));
  service.respond(call, json_response(stored->response));
}

void delete_response(Service& service, const std::shared_ptr<ApiCall>& call) {
  const std::string id = asked_id(*call);
  if (!service.stored_responses().remove(id)) unknown(id);
  service.respond(call, json_response({{"id", id}, {"object", "response"}, {"deleted", true}}));
}

}  // namespace fourfold::serve
