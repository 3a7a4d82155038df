// What the server says of itself, and the tokenizer.
#include <charconv>
#include <limits>

#include "serve/chat_api.h"
#include "serve/generation_fields.h"
#include "serve/page/page.h"
#include "serve/routes.h"
#include "serve/token_text.h"
#include "text/unicode.h"

namespace fourfold::serve {
namespace {

constexpr Route kRoutes[] = {
    {"POST", "/v1/chat/completions", ErrorForm::kOpenAi, false, true, true, chat_completions},
    {"POST", "/v1/completions", ErrorForm::kOpenAi, false, true, true, completions},
    {"POST", "/v1/responses", ErrorForm::kOpenAi, false, true, true, responses},
    {"GET", "/v1/responses/*", ErrorForm::kOpenAi, false, false, false, stored_response},
    {"DELETE", "/v1/responses/*", ErrorForm::kOpenAi, false, false, false, delete_response},
    {"POST", "/v1/messages", ErrorForm::kAnthropic, false, true, true, messages},
    {"POST", "/v1/messages/count_tokens", ErrorForm::kAnthropic, false, true, true, count_message_tokens},
    {"GET", "/v1/models", ErrorForm::kOpenAi, false, true, false, models},
    {"GET", "/v1/models/*", ErrorForm::kOpenAi, false, true, false, one_model},
    {"POST", "/tokenize", ErrorForm::kOpenAi, false, true, true, tokenize},
    {"POST", "/detokenize", ErrorForm::kOpenAi, false, true, true, detokenize},
    {"GET", "/tokenizer_info", ErrorForm::kOpenAi, false, true, false, tokenizer_info},
    {"GET", "/props", ErrorForm::kOpenAi, false, true, false, props},
    {"GET", "/get_server_info", ErrorForm::kOpenAi, false, true, false, server_info},
    {"GET", "/get_model_info", ErrorForm::kOpenAi, false, true, false, model_info},
    {"GET", "/", ErrorForm::kOpenAi, true, false, false, page},
    {"GET", "/health", ErrorForm::kOpenAi, true, false, false, health},
    {"GET", "/ready", ErrorForm::kOpenAi, true, false, false, health},
    {"GET", "/live", ErrorForm::kOpenAi, true, false, false, live},
    {"GET", "/version", ErrorForm::kOpenAi, true, false, false, version},
    {"GET", "/openapi.json", ErrorForm::kOpenAi, true, false, false, openapi},
    {"GET", "/metrics", ErrorForm::kOpenAi, true, false, false, metrics_text},
};

using enum Treatment;

constexpr FieldRule kTokenizeFields[] = {{"prompt", kHonoured},
                                         {"content", kHonoured},
                                         {"messages", kHonoured},
                                         {"tools", kHonoured},
                                         {"model", kHonoured},
                                         {"add_special_tokens", kHonoured},
                                         {"add_special", kHonoured},
                                         {"return_token_strs", kHonoured},
                                         {"with_pieces", kHonoured},
                                         {"chat_template_kwargs", kHonoured},
                                         {"add_generation_prompt", kHonoured},
                                         {"chat_template", kRefused, "templates come from the checkpoint only"}};

constexpr FieldRule kDetokenizeFields[] = {{"tokens", kHonoured}, {"model", kHonoured}};

}  // namespace

std::span<const FieldRule> tokenize_fields() { return kTokenizeFields; }

std::span<const FieldRule> detokenize_fields() { return kDetokenizeFields; }

std::span<const Route> routes() { return kRoutes; }

void health(Service& service, const std::shared_ptr<ApiCall>& call) {
  int status = 200;
  const Json body = service.health(status);
  HttpResponse response = json_response(body, status);
  if (status == 503) response.headers.emplace_back("retry-after", "1");
  service.respond(call, std::move(response));
}

void live(Service& service, const std::shared_ptr<ApiCall>& call) {
  const bool dead = !service.fault().empty();
  service.respond(call, json_response({{"status", !dead             ? "alive"
                                                  : service.stuck() ? "stuck"
                                                                    : "failed"}},
                                      dead ? 503 : 200));
}

void version(Service& service, const std::shared_ptr<ApiCall>& call) {
  service.respond(call, json_response({{"version", FOURFOLD_VERSION}}));
}

void metrics_text(Service& service, const std::shared_ptr<ApiCall>& call) {
  HttpResponse response;
  response.headers.emplace_back("content-type", "text/plain; version=0.0.4; charset=utf-8");
  const ServedModel* model = service.model();
  const auto& disabled = service.options().kernels_disabled;
  const int64_t kernels = disabled ? disabled() : 0;
  if (model == nullptr) {
    response.body = service.metrics().text("", nullptr, service.network_stats(), kernels);
  } else {
    const engine::EngineStats stats = model->engine->stats();
    response.body = service.metrics().text(model->name(), &stats, service.network_stats(), kernels);
  }
  service.respond(call, std::move(response));
}

namespace {

Json description_of(const ServedModel& model, const std::string& name) {
  return {{"id", name},
          {"object", "model"},
          {"created", model.created},
          {"owned_by", "fourfold"},
          {"root", model.name()},
          {"parent", nullptr},
          {"max_model_len", model.context},
          {"meta",
           {{"n_ctx", model.context},
            {"n_ctx_train", model.config.max_positions},
            {"n_vocab", model.config.vocabulary},
            {"n_embd", model.config.hidden}}}};
}

// Names may have a slash, which is %2F in a path. What is no escape stands for itself, and is then no name.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned char byte = 0;
    const char* const digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() && std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

void one_model(Service& service, const std::shared_ptr<ApiCall>& call) {
  const std::string& path = call->exchange->request().path;
  const std::string name = percent_decoded(std::string_view(path).substr(std::string_view("/v1/models/").size()));
  service.require_name(name);
  service.respond(call, json_response(description_of(service.require_model(), name)));
}

// "models" is what Codex and programs made for llama.cpp look for; Codex reads entries in a form of its own, so that
// none is better than one in another.
void models(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ServedModel& model = service.require_model();
  Json data = Json::array();
  for (const std::string& name : model.names) data.push_back(description_of(model, name));
  service.respond(call, json_response({{"object", "list"}, {"data", std::move(data)}, {"models", Json::array()}}));
}

void props(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ServedModel& model = service.require_model();
  service.respond(call, json_response({{"default_generation_settings", {{"n_ctx", model.context}}},
                                       {"n_ctx", model.context},
                                       {"total_slots", model.max_sequences},
                                       {"model_path", model.directory},
                                       {"model_alias", model.name()},
                                       {"chat_template", model.chat_template},
                                       {"bos_token", ""},
                                       {"eos_token", model.end_token},
                                       {"modalities", {{"vision", false}, {"audio", false}}},
                                       {"build_info", "fourfold " FOURFOLD_VERSION}}));
}

// What lm-eval asks, as it asks vLLM.
void tokenizer_info(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ServedModel& model = service.require_model();
  service.respond(call, json_response({{"tokenizer_class", "PreTrainedTokenizerFast"},
                                       {"eos_token", model.end_token},
                                       {"bos_token", nullptr},
                                       {"pad_token", model.end_token},
                                       {"chat_template", model.chat_template},
                                       {"model_max_length", model.context},
                                       {"vocab_size", model.config.vocabulary}}));
}

// What SGLang's router asks.
void server_info(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ServedModel& model = service.require_model();
  const engine::EngineStats stats = model.engine->stats();
  service.respond(call, json_response({{"model_path", model.directory},
                                       {"tokenizer_path", model.directory},
                                       {"served_model_name", model.name()},
                                       {"version", FOURFOLD_VERSION},
                                       {"status", "ready"},
                                       {"backend", model.backend},
                                       {"tp_size", 1},
                                       {"dp_size", 1},
                                       {"context_length", model.context},
                                       {"max_running_requests", model.max_sequences},
                                       {"max_total_num_tokens", model.cache_tokens},
                                       {"num_running_reqs", stats.running},
                                       {"num_waiting_reqs", stats.waiting}}));
}

void model_info(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ServedModel& model = service.require_model();
  service.respond(call, json_response({{"model_path", model.directory},
                                       {"tokenizer_path", model.directory},
                                       {"is_generation", true},
                                       {"preferred_sampling_params", nullptr},
                                       {"model_type", model.config.model_type},
                                       {"max_context_length", model.context},
                                       {"vocab_size", model.config.vocabulary}}));
}

void tokenize(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kTokenizeFields);
  const Fields& fields = incoming.fields;
  const ServedModel& model = incoming.model;
  constexpr size_t kAny = std::numeric_limits<size_t>::max();
  std::vector<int32_t> tokens;
  if (fields.find("messages") != nullptr) {
    chat::Conversation conversation = read_conversation(fields);
    conversation.add_generation_prompt = fields.boolean("add_generation_prompt").value_or(true);
    model.text->require_template();
    tokens = render(conversation, model, *call).tokens;
  } else {
    auto text = fields.string("prompt", kAny);
    if (!text) text = fields.string("content", kAny);
    if (!text) fields.refuse("prompt", "is missing, and so are content and messages; one of them is wanted");
    text::EncodeOptions options;
    options.add_special_tokens =
        fields.boolean("add_special_tokens").value_or(fields.boolean("add_special").value_or(true));
    tokens = model.text->tokenizer().encode_ids(*text, options);
  }
  Json out = {{"count", tokens.size()}, {"max_model_len", model.context}, {"tokens", tokens}};
  const text::Tokenizer& tokenizer = model.text->tokenizer();
  if (fields.boolean("with_pieces").value_or(false)) {
    out["tokens"] = Json::array();
    // As llama.cpp has it: bytes that are no text by themselves are numbers.
    for (const int32_t id : tokens) {
      const bool text = text::is_valid_utf8(tokenizer.token_bytes(id));
      out["tokens"].push_back(
          {{"id", id}, {"piece", text ? Json(token_text(tokenizer, id)) : token_bytes(tokenizer, id)}});
    }
  }
  if (fields.boolean("return_token_strs").value_or(false)) {
    out["token_strs"] = Json::array();
    for (const int32_t id : tokens) out["token_strs"].push_back(tokenizer.token(id));
  }
  service.respond(call, json_response(out));
}

void detokenize(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kDetokenizeFields);
  const Fields& fields = incoming.fields;
  const ServedModel& model = incoming.model;
  const Json* given = fields.array("tokens", 1u << 22);
  if (given == nullptr) fields.refuse("tokens", "is missing, an array of tokens is wanted");
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < given->size(); ++i) {
    const Json& token = (*given)[i];
    if (!token.is_number_integer() || token.get<int64_t>() < 0 || token.get<int64_t>() >= model.config.vocabulary) {
      fields.refuse(fmt::format("tokens[{}]", i), fmt::format("is no token from 0 to {}", model.config.vocabulary - 1));
    }
    tokens.push_back(token.get<int32_t>());
  }
  const std::string text = model.text->tokenizer().decode(tokens);
  service.respond(call, json_response({{"prompt", text}, {"content", text}}));
}

}  // namespace fourfold::serve
