#include "serve/openapi.h"

#include <limits>

#include "serve/chat_api.h"
#include "serve/completions_api.h"
#include "serve/generation_fields.h"
#include "serve/messages_api.h"
#include "serve/responses_api.h"
#include "serve/routes.h"

namespace fourfold::serve {
namespace {

struct Named {
  const char* name;
  const char* schema;
};

constexpr const char* kObject = R"({"type": "object"})";
constexpr const char* kText = R"({"type": "string"})";
constexpr const char* kFlag = R"({"type": "boolean"})";
constexpr const char* kArray = R"({"type": "array"})";
constexpr const char* kLimit = R"({"type": "integer", "minimum": 1, "maximum": 2147483648})";
constexpr const char* kTokens = R"({"type": "array", "items": {"type": "integer", "minimum": 0}})";
constexpr const char* kStops = R"({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})";
constexpr const char* kTools = R"({"type": "array", "maxItems": 2048, "items": {"type": "object"}})";
constexpr const char* kContent =
    R"({"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": ["string", "object"]}}]})";

// Fields that mean the same wherever they are. What is no more than a rule for the object as a whole (a name that goes
// with another field) is not in here: it is refused with 400 all the same.
constexpr Named kSchemas[] = {
    {"model", kText},
    {"max_completion_tokens", kLimit},
    {"max_tokens", kLimit},
    {"max_output_tokens", kLimit},
    {"temperature", R"({"type": "number", "minimum": 0, "maximum": 10})"},
    {"top_p", R"({"type": "number", "exclusiveMinimum": 0, "maximum": 1})"},
    {"top_k", R"({"type": "integer", "minimum": -1, "maximum": 16777216})"},
    {"min_p", R"({"type": "number", "minimum": 0, "exclusiveMaximum": 1})"},
    {"presence_penalty", R"({"type": "number", "minimum": -10, "maximum": 10})"},
    {"frequency_penalty", R"({"type": "number", "minimum": -10, "maximum": 10})"},
    {"repetition_penalty", R"({"type": "number", "exclusiveMinimum": 0, "maximum": 10})"},
    {"logit_bias",
     R"({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})"},
    {"seed", R"({"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807})"},
    {"n", R"({"type": "integer", "minimum": 1, "maximum": 64})"},
    {"best_of", R"({"type": "integer", "minimum": 1, "maximum": 64})"},
    {"stop", kStops},
    {"stop_sequences", kStops},
    {"stop_token_ids", kTokens},
    {"min_tokens", R"({"type": "integer", "minimum": 0, "maximum": 2147483648})"},
    {"thinking_token_budget", R"({"type": "integer", "minimum": 0, "maximum": 2147483648})"},
    {"ignore_eos", kFlag},
    {"stream", kFlag},
    {"stream_options", R"({"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]},
                           "continuous_usage_stats": {"type": ["boolean", "null"]}}})"},
    {"top_logprobs", R"({"type": "integer", "minimum": 0, "maximum": 20})"},
    {"tool_choice", R"({"type": ["string", "object"]})"},
    {"parallel_tool_calls", kFlag},
    {"response_format", kObject},
    {"structured_outputs", kObject},
    {"guided_json", R"({})"},
    {"guided_regex", kText},
    {"guided_choice", kArray},
    {"guided_grammar", kText},
    {"reasoning_effort", R"({"type": "string", "maxLength": 64})"},
    {"enable_thinking", kFlag},
    {"preserve_thinking", kFlag},
    {"chat_template_kwargs", kObject},
    {"documents", kArray},
    {"include_reasoning", kFlag},
    {"add_generation_prompt", kFlag},
    {"continue_final_message", R"({"const": false})"},
    {"use_beam_search", R"({"const": false})"},
    {"echo", kFlag},
    {"modalities", R"({"const": ["text"]})"},
    {"priority", R"({"type": "integer", "minimum": -1000000, "maximum": 1000000})"},
    {"cache_salt", R"({"type": "string", "maxLength": 1024})"},
    {"add_special_tokens", kFlag},
    {"add_special", kFlag},
    {"return_token_strs", kFlag},
    {"with_pieces", kFlag},
    {"tools", kTools},
    {"tokens", kTokens},
    {"content", kText},
    {"instructions", kText},
    {"previous_response_id", R"({"type": "string", "maxLength": 256})"},
    {"store", kFlag},
    {"reasoning", R"({"type": "object", "properties": {"effort": {"type": ["string", "null"], "maxLength": 64}}})"},
    {"text", kObject},
    {"truncation", R"({"const": "disabled"})"},
    {"background", R"({"const": false})"},
    {"metadata", R"({})"},
    {"system", kContent},
    {"thinking", R"({"type": "object", "required": ["type"], "properties":
                     {"type": {"enum": ["enabled", "adaptive", "disabled"]},
                      "budget_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2147483648}}})"},
    {"thread", R"({"type": "object", "required": ["type"], "properties":
                   {"type": {"enum": ["create", "continue"]},
                    "previous_message_id": {"type": ["string", "null"], "maxLength": 256}}})"},
    {"output_format", kObject},
    {"output_config", R"({"type": "object", "properties": {"effort": {"type": ["string", "null"], "maxLength": 64}}})"},
};

struct Special {
  const char* path;
  const char* name;
  const char* schema;
};

constexpr Special kSpecial[] = {
    {"/v1/chat/completions", "messages",
     R"({"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/ChatMessage"}})"},
    {"/v1/chat/completions", "tools",
     R"({"type": "array", "maxItems": 2048, "items": {"type": "object", "required": ["function"], "properties":
         {"type": {"const": "function"},
          "function": {"type": "object", "required": ["name"], "properties":
            {"name": {"type": "string", "minLength": 1}, "parameters": {"type": ["object", "null"]}}}}}})"},
    {"/v1/chat/completions", "logprobs", kFlag},
    {"/v1/chat/completions", "echo", R"({"const": false})"},
    {"/v1/chat/completions", "add_generation_prompt", R"({"const": true})"},
    {"/v1/chat/completions", "best_of", R"({"const": 1})"},
    {"/v1/completions", "prompt",
     R"({"anyOf": [{"type": "string", "minLength": 1},
                   {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                   {"type": "array", "minItems": 1, "maxItems": 256, "items": {"anyOf": [
                     {"type": "string", "minLength": 1},
                     {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}]}}]})"},
    {"/v1/completions", "max_tokens", R"({"type": "integer", "minimum": 0, "maximum": 2147483648})"},
    {"/v1/completions", "logprobs",
     R"({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 20}]})"},
    {"/v1/responses", "input",
     R"({"anyOf": [{"type": "string"}, {"type": "array", "maxItems": 100000, "items": {"type": "object"}}]})"},
    {"/v1/responses", "tools",
     R"({"type": "array", "maxItems": 2048, "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}})"},
    {"/v1/messages", "messages",
     R"({"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role"], "properties":
         {"role": {"enum": ["user", "assistant", "system"]},
          "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "object", "required": ["type"]}}]}}}})"},
    {"/v1/messages", "tool_choice",
     R"({"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}})"},
    {"/tokenize", "messages",
     R"({"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/ChatMessage"}})"},
    {"/tokenize", "prompt", kText},
};

constexpr const char* kComponents = R"({"schemas": {
  "ChatMessage": {"type": "object", "required": ["role"], "properties": {
    "role": {"type": "string"},
    "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": ["string", "object"]}}]},
    "reasoning": {"type": ["string", "null"]}, "reasoning_content": {"type": ["string", "null"]},
    "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}}}},
  "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object",
    "required": ["message", "type", "param", "code"], "properties": {
      "message": {"type": "string", "minLength": 1}, "type": {"type": "string"},
      "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}},
  "AnthropicError": {"type": "object", "required": ["type", "error"], "properties": {"type": {"const": "error"},
    "error": {"type": "object", "required": ["type", "message"], "properties": {
      "type": {"type": "string"}, "message": {"type": "string", "minLength": 1}}}}},
  "Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "additionalProperties": {"type": ["integer", "object"]}},
  "ChatCompletion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {"object": {"const": "chat.completion"}, "usage": {"$ref": "#/components/schemas/Usage"},
      "choices": {"type": "array", "minItems": 1, "items": {"type": "object",
        "required": ["index", "message", "finish_reason"], "properties": {
          "index": {"type": "integer"}, "message": {"$ref": "#/components/schemas/ChatMessage"},
          "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}}}}},
  "Completion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {"object": {"const": "text_completion"}, "usage": {"$ref": "#/components/schemas/Usage"},
      "choices": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", "text", "finish_reason"],
        "properties": {"index": {"type": "integer"}, "text": {"type": "string"},
          "finish_reason": {"enum": ["stop", "length"]}}}}}},
  "Response": {"type": "object", "required": ["id", "object", "status", "model", "output", "usage"], "properties": {
    "object": {"const": "response"}, "status": {"enum": ["completed", "incomplete"]},
    "output": {"type": "array", "items": {"type": "object", "required": ["id", "type"]}}}},
  "DeletedResponse": {"type": "object", "required": ["id", "object", "deleted"], "properties": {"deleted": {"const": true}}},
  "Message": {"type": "object", "required": ["id", "type", "role", "content", "model", "stop_reason", "usage"],
    "properties": {"type": {"const": "message"}, "role": {"const": "assistant"},
      "content": {"type": "array", "items": {"type": "object", "required": ["type"]}}}},
  "TokenCount": {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}},
  "Models": {"type": "object", "required": ["object", "data", "models"], "properties": {"object": {"const": "list"},
    "data": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["id", "object", "max_model_len"]}}}},
  "Tokens": {"type": "object", "required": ["count", "max_model_len", "tokens"], "properties": {
    "count": {"type": "integer"}, "tokens": {"type": "array"}}},
  "Text": {"type": "object", "required": ["prompt", "content"], "properties": {"prompt": {"type": "string"}}},
  "State": {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}},
  "Object": {"type": "object"}}})";

struct Operation {
  const char* path;
  const char* summary;
  const char* answer;  // the schema's name; null where the answer is no JSON
  std::span<const FieldRule> (*fields)();
  std::vector<const char*> required;
  bool stream = false;
  const char* type = "text/plain";  // of an answer that is no JSON
};

const std::vector<Operation>& operations() {
  static const std::vector<Operation> kOperations = {
      {"/v1/chat/completions", "An answer to a conversation", "ChatCompletion", chat_fields, {"messages"}, true},
      {"/v1/completions", "Texts or tokens completed as they are", "Completion", completion_fields, {"prompt"}, true},
      {"/v1/responses", "A response to items of a conversation", "Response", responses_fields, {"input"}, true},
      {"/v1/responses/*", "A stored response", "Response", nullptr, {}},
      {"/v1/messages",
       "An answer to a conversation, in Anthropic's form",
       "Message",
       messages_fields,
       {"messages"},
       true},
      {"/v1/messages/count_tokens", "Tokens of a conversation", "TokenCount", messages_fields, {"messages"}},
      {"/v1/models", "The served names", "Models", nullptr, {}},
      {"/v1/models/*", "The model under one of its names", "Object", nullptr, {}},
      {"/tokenize", "Tokens of a text or a conversation", "Tokens", tokenize_fields, {}},
      {"/detokenize", "The text of tokens", "Text", detokenize_fields, {"tokens"}},
      {"/tokenizer_info", "Special tokens and the template, as lm-eval asks for them", "Object", nullptr, {}},
      {"/props", "Sizes, as llama.cpp's clients ask for them", "Object", nullptr, {}},
      {"/get_server_info", "The state of the server, for routers", "Object", nullptr, {}},
      {"/get_model_info", "The model, for routers", "Object", nullptr, {}},
      {"/", "The page: chat and live figures", nullptr, nullptr, {}, false, "text/html"},
      {"/health", "Whether requests are taken, and the phase", "State", nullptr, {}},
      {"/ready", "The same", "State", nullptr, {}},
      {"/live", "Whether the process is worth keeping", "State", nullptr, {}},
      {"/version", "The version", "Object", nullptr, {}},
      {"/metrics", "Figures in Prometheus' text format", nullptr, nullptr, {}},
      {"/openapi.json", "This description", "Object", nullptr, {}},
  };
  return kOperations;
}

const Operation* operation_of(const char* path) {
  for (const Operation& operation : operations()) {
    if (std::string_view(operation.path) == path) return &operation;
  }
  return nullptr;
}

Json reference(const std::string& name) { return {{"$ref", "#/components/schemas/" + name}}; }

const char* treatment_word(Treatment treatment) {
  switch (treatment) {
    case Treatment::kHonoured:
      return "Honoured";
    case Treatment::kIgnored:
      return "Ignored";
    case Treatment::kRefused:
      break;
  }
  return "Refused";
}

Json body_schema(const Operation& operation, const std::vector<std::string>& names) {
  Json properties = Json::object();
  for (const FieldRule& rule : operation.fields()) {
    Json schema = field_schema(operation.path, rule);
    const std::string_view note = rule.note;
    schema["description"] = fmt::format("{}{}{}", treatment_word(rule.treatment), note.empty() ? "" : ": ", note);
    properties[rule.name] = std::move(schema);
  }
  if (!names.empty()) properties["model"]["anyOf"][0]["enum"] = names;
  Json out = {{"type", "object"}, {"properties", std::move(properties)}};
  for (const char* name : operation.required) {
    out["required"].push_back(name);
    Json& schema = out["properties"][name];
    if (schema.contains("anyOf")) schema["anyOf"].erase(schema["anyOf"].size() - 1);  // null, which is no value
  }
  return out;
}

Json answer_content(const char* type, Json schema) {
  Json out = Json::object();
  out[type] = {{"schema", std::move(schema)}};
  return out;
}

Json responses_of(const Route& route, const Operation* operation, bool keys) {
  Json success = {{"description", "The answer"}};
  if (operation != nullptr) {
    const std::string name = std::string_view(route.method) == "DELETE" ? "DeletedResponse"
                             : operation->answer == nullptr             ? ""
                                                                        : operation->answer;
    success["content"] = name.empty() ? answer_content(operation->type, {{"type", "string"}})
                                      : answer_content("application/json", reference(name));
    if (operation->stream) success["content"]["text/event-stream"] = Json::object();  // events of each API's own form
  }
  Json out = Json::object();
  out["200"] = std::move(success);
  const auto refused = [&](const char* status, const char* why) {
    const Json schema = reference(route.form == ErrorForm::kAnthropic ? "AnthropicError" : "Error");
    out[status] = {{"description", why}, {"content", answer_content("application/json", schema)}};
  };
  refused("400", "A field, or the request, is not as wanted; the message names it");
  if (keys && !route.open) refused("401", "The API key is missing or wrong");
  const bool post = std::string_view(route.method) == "POST";
  if (post || std::string_view(route.path).ends_with('*')) refused("404", "There is no such model or response");
  if (post) {
    refused("408", "The body did not come in time");
    refused("413", "The body is too large");
    refused("415", "The body is not application/json");
    if (keys) refused("429", "The limit of the key is reached; Retry-After says when to ask again");
    refused("500", "A mistake of the server's");
    refused("504", "The request's time was over before the first token");
  }
  if (route.needs_model) refused("503", "Overload, or the model is not ready; Retry-After says when to ask again");
  if (operation != nullptr && std::string_view(operation->answer == nullptr ? "" : operation->answer) == "State") {
    out["503"] = {{"description", "Not so"}, {"content", answer_content("application/json", reference("State"))}};
  }
  return out;
}

}  // namespace

Json field_schema(const char* path, const FieldRule& rule) {
  if (rule.treatment == Treatment::kRefused) return {{"type", "null"}};
  if (rule.treatment == Treatment::kIgnored) return Json::object();
  // What counts tokens takes what would be answered.
  const std::string_view place = std::string_view(path).starts_with("/v1/messages") ? "/v1/messages" : path;
  const char* text = nullptr;
  for (const Named& named : kSchemas) {
    if (std::string_view(named.name) == rule.name) text = named.schema;
  }
  for (const Special& special : kSpecial) {
    if (place == special.path && std::string_view(special.name) == rule.name) text = special.schema;
  }
  if (text == nullptr) fourfold::fail("the field {} of {} has no schema", rule.name, path);
  return {{"anyOf", Json::array({Json::parse(text), {{"type", "null"}}})}};
}

Json openapi_description(bool keys, const std::vector<std::string>& names) {
  Json paths = Json::object();
  for (const Route& route : routes()) {
    const Operation* operation = operation_of(route.path);
    std::string path = route.path, method = route.method;
    Json described = {{"summary", operation == nullptr ? route.path : operation->summary}};
    Json parameters = Json::array();
    if (path.ends_with('*')) {
      path.replace(path.size() - 1, 1, "{id}");
      parameters.push_back(
          {{"name", "id"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}, {"minLength", 1}}}});
    }
    if (route.generates) {
      parameters.push_back({{"name", "x-request-timeout"},
                            {"in", "header"},
                            {"description", "Seconds until the end of the answer: a number above 0"},
                            {"schema", {{"type", "string"}}}});
    }
    if (!parameters.empty()) described["parameters"] = std::move(parameters);
    if (operation != nullptr && operation->fields != nullptr) {
      described["requestBody"] = {{"required", true},
                                  {"content", answer_content("application/json", body_schema(*operation, names))}};
    }
    if (route.open) described["security"] = Json::array();
    described["responses"] = responses_of(route, operation, keys);
    for (char& c : method) c = static_cast<char>(c + 32);
    paths[path][method] = std::move(described);
  }
  Json out = {{"openapi", "3.1.0"},
              {"info", {{"title", "fourfold"}, {"version", FOURFOLD_VERSION}}},
              {"paths", std::move(paths)},
              {"components", Json::parse(kComponents)}};
  if (keys) {
    out["components"]["securitySchemes"] = {{"key", {{"type", "http"}, {"scheme", "bearer"}}}};
    out["security"] = Json::array({{{"key", Json::array()}}});
  }
  return out;
}

void openapi(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ServedModel* model = service.model();
  const std::vector<std::string> names = model == nullptr ? std::vector<std::string>() : model->names;
  service.respond(call, json_response(openapi_description(!service.options().api_keys.empty(), names)));
}

}  // namespace fourfold::serve
