#include "serve/chat_api.h"

#include <ctime>
#include <memory>
#include <utility>

#include "serve/chat_answer.h"
#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/routes.h"
#include "serve/structured.h"

namespace fourfold::serve {
namespace {

using enum Treatment;

constexpr FieldRule kOwnRules[] = {
    {"messages", kHonoured, "text only; system and developer messages are merged into the front"},
    {"max_completion_tokens", kHonoured, "1 or more, cut to what the context leaves"},
    {"max_tokens", kHonoured, "the same; the former wins"},
    {"n", kHonoured, "1 to 64"},
    {"stop", kHonoured, "a string or up to 64; they sleep inside of reasoning and of calls"},
    {"logprobs", kHonoured, "of all tokens that were generated, reasoning included"},
    {"top_logprobs", kHonoured, "0 to 20"},
    {"tools", kHonoured, "of type function"},
    {"tool_choice", kHonoured, "auto, none (the tools are left out of the prompt), required, a function by its name"},
    {"parallel_tool_calls", kHonoured, "false: the answer ends with its first call"},
    {"reasoning_effort", kHonoured, "a variable of the template; none is enable_thinking: false"},
    {"enable_thinking", kHonoured, "a variable of the template"},
    {"preserve_thinking", kHonoured, "a variable of the template"},
    {"thinking_token_budget", kHonoured, "after so many tokens the reasoning is closed; 0 closes it at once"},
    {"chat_template_kwargs", kHonoured, "variables of the template"},
    {"documents", kHonoured, "given to the template"},
    {"include_reasoning", kHonoured, "false: the reasoning is left out of the answer"},
    {"add_generation_prompt", kHonoured, "true only"},
    {"continue_final_message", kHonoured, "false only"},
    {"modalities", kHonoured, "[\"text\"] only"},
    {"best_of", kHonoured, "1 only"},
    {"echo", kHonoured, "false only"},
    {"store", kIgnored},
    {"safety_identifier", kIgnored},
    {"prompt_cache_key", kIgnored, "prefixes are found without"},
    {"prompt_cache_retention", kIgnored},
    {"verbosity", kIgnored},
    {"prediction", kIgnored},
    {"separate_reasoning", kIgnored, "reasoning is always apart"},
    {"functions", kRefused, "use tools"},
    {"function_call", kRefused, "use tool_choice"},
    {"audio", kRefused, "the model writes text only"},
    {"web_search_options", kRefused, "the server searches nothing"},
    {"chat_template", kRefused, "templates come from the checkpoint only"},
    {"prompt_logprobs", kRefused, "use /v1/completions with echo and logprobs"},
};
constexpr auto kFields = join_rules(kOwnRules, kGenerationRules, kOpenAiRules, kStructureRules);

constexpr size_t kMaxMessages = 100'000, kMaxTools = 2048, kMaxName = 256;

void read_tool(const Fields& fields, const Json& tool, const std::string& place) {
  const auto wrong = [&](const std::string& what) {
    throw ApiError::field(fields.full_name(place), fields.full_name(place) + " " + what);
  };
  if (!tool.is_object()) wrong(fmt::format("is {}, an object is wanted", json_kind(tool)));
  const auto type = tool.find("type");
  if (type != tool.end() && *type != "function") {
    wrong(fmt::format("is of type {}, only function is known", printable(dump(*type), 60)));
  }
  const auto function = tool.find("function");
  if (function == tool.end() || !function->is_object()) wrong("has no object named function");
  const auto name = function->find("name");
  if (name == function->end() || !name->is_string() || name->get_ref<const std::string&>().empty() ||
      name->get_ref<const std::string&>().size() > kMaxName) {
    wrong(fmt::format("has no name of 1 to {} bytes", kMaxName));
  }
  const auto parameters = function->find("parameters");
  if (parameters != function->end() && !parameters->is_null() && !parameters->is_object()) {
    wrong("has parameters that are no object");
  }
}

// The tools that may be called; null when there are none.
Json read_tools(const Fields& fields) {
  const Json* tools = fields.array("tools", kMaxTools);
  if (tools != nullptr) {
    for (size_t i = 0; i < tools->size(); ++i) read_tool(fields, (*tools)[i], fmt::format("tools[{}]", i));
  }
  const bool given = tools != nullptr && !tools->empty();
  const Json* choice = fields.find("tool_choice");
  if (choice != nullptr && *choice == "none") return nullptr;
  return given ? *tools : Json();
}

// Fields that are known for one value, the one that changes nothing.
void require_defaults(const Fields& fields) {
  if (!fields.boolean("add_generation_prompt").value_or(true)) {
    fields.refuse("add_generation_prompt", "is false: the answer is always the model's turn");
  }
  if (fields.boolean("continue_final_message").value_or(false)) {
    fields.refuse("continue_final_message", "is true: an answer begins a turn of its own");
  }
  if (fields.boolean("use_beam_search").value_or(false)) fields.refuse("use_beam_search", "is true: there is none");
  if (fields.boolean("echo").value_or(false)) fields.refuse("echo", "is true: /v1/completions has it");
  fields.integer("best_of", 1, 1);
  if (const Json* modalities = fields.array("modalities", 8); modalities != nullptr && *modalities != Json({"text"})) {
    fields.refuse("modalities", "is not [\"text\"]: the model writes text only");
  }
}

// Beside the tools that read_tools() gives.
ToolChoice read_tool_choice(const Fields& fields, const Json& tools) {
  ToolChoice out;
  out.parallel = fields.boolean("parallel_tool_calls").value_or(true);
  out.strict = all_strict(tools);
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr || *choice == "auto" || *choice == "none") return out;
  if (*choice == "required") {
    out.kind = ToolChoice::Kind::kRequired;
  } else if (choice->is_object() && choice->value("type", Json()) == "function" && choice->contains("function") &&
             (*choice)["function"].is_object()) {
    out.kind = ToolChoice::Kind::kNamed;
    out.name = named_tool((*choice)["function"], tools, "tool_choice.function.name");
  } else {
    fields.refuse("tool_choice", fmt::format("is {}, wanted auto, none, required or a function by its name",
                                             printable(dump(*choice), 60)));
  }
  if (!tools.is_array()) fields.refuse("tool_choice", "asks for a call, but there are no tools");
  return out;
}

}  // namespace

std::span<const FieldRule> chat_fields() { return kFields; }

chat::Conversation read_conversation(const Fields& fields) {
  chat::Conversation out;
  const Json* messages = fields.array("messages", kMaxMessages);
  if (messages == nullptr) fields.refuse("messages", "is missing, an array of messages is wanted");
  if (messages->empty()) fields.refuse("messages", "is empty, at least one message is wanted");
  out.messages = *messages;
  out.tools = read_tools(fields);
  if (const Json* documents = fields.array("documents", 4096)) out.documents = *documents;
  read_template_variables(fields, out.variables);
  if (const auto effort = fields.string("reasoning_effort", 64)) {
    out.variables["reasoning_effort"] = *effort;
    if (*effort == "none") out.variables["enable_thinking"] = false;
  }
  if (const auto thinking = fields.boolean("enable_thinking")) out.variables["enable_thinking"] = *thinking;
  if (const auto preserve = fields.boolean("preserve_thinking")) out.variables["preserve_thinking"] = *preserve;
  return out;
}

void chat_completions(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kFields);
  const Fields& fields = incoming.fields;
  const ServedModel& model = incoming.model;
  model.text->require_template();
  require_defaults(fields);

  ChatAnswerOptions options;
  options.fields = GenerationFields::read(fields, model);
  options.fields.max_tokens = fields.integer("max_completion_tokens", 1, kMaxTokens);
  const auto older = fields.integer("max_tokens", 1, kMaxTokens);
  if (!options.fields.max_tokens) options.fields.max_tokens = older;
  options.logprobs = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (top && *top > 0 && !options.logprobs) fields.refuse("top_logprobs", "is given, but logprobs is not true");
  options.parallel_calls = fields.boolean("parallel_tool_calls").value_or(true);
  options.include_reasoning = fields.boolean("include_reasoning").value_or(true);

  const chat::Conversation conversation = read_conversation(fields);
  chat::Prompt prompt = render(conversation, model, *call);
  options.answer.reasoning = prompt.reasoning;
  options.answer.tools = conversation.tools;
  options.answer.stop = options.fields.stop;
  options.prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
  options.id = random_id("chatcmpl-");
  options.model = model.name();
  options.created = std::time(nullptr);

  Structure structure = Structure::of_fields(fields);
  structure.add_calls(conversation.tools, read_tool_choice(fields, conversation.tools));
  structure.require_end(fields, options.fields);
  structure.read_by(options.answer);

  const auto budget = fields.integer("thinking_token_budget", 0, kMaxTokens);
  engine::Request request = options.fields.request(std::move(prompt), model, *call);
  if (options.logprobs) request.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
  std::vector<GenerationJob::Part> parts =
      thinking_parts(std::move(request), options.fields.answers, budget, *model.text, options.answer.reasoning);
  const bool stream = options.fields.stream;
  const chat::Reasoning reasoning = options.answer.reasoning;
  start_generation(service, call, structure, reasoning, std::move(parts),
                   std::make_unique<ChatAnswer>(*model.text, std::move(options)), stream);
}

}  // namespace fourfold::serve
