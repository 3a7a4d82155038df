#include "serve/generation_fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "chat/stop_strings.h"

namespace fourfold::serve {
namespace {

constexpr size_t kMaxBiases = 4096, kMaxStopTokens = 256;

std::vector<std::pair<int32_t, float>> read_bias(const Fields& fields, int64_t vocabulary) {
  std::vector<std::pair<int32_t, float>> out;
  const Json* biases = fields.object("logit_bias");
  if (biases == nullptr) return out;
  if (biases->size() > kMaxBiases) {
    fields.refuse("logit_bias", fmt::format("has {} entries, at most {} are taken", biases->size(), kMaxBiases));
  }
  for (const auto& [key, value] : biases->items()) {
    int32_t token = -1;
    const auto result = std::from_chars(key.data(), key.data() + key.size(), token);
    if (result.ec != std::errc() || result.ptr != key.data() + key.size() || token < 0 || token >= vocabulary) {
      fields.refuse("logit_bias",
                    fmt::format("has the key {}, a token from 0 to {} is wanted", printable(key, 40), vocabulary - 1));
    }
    if (!value.is_number() || !(value.get<double>() >= -100 && value.get<double>() <= 100)) {
      fields.refuse(fmt::format("logit_bias.{}", token), "is no number from -100 to 100");
    }
    if (std::any_of(out.begin(), out.end(), [&](const auto& other) { return other.first == token; })) {
      fields.refuse("logit_bias", fmt::format("has token {} twice", token));
    }
    out.emplace_back(token, value.get<float>());
  }
  return out;
}

}  // namespace

GenerationFields GenerationFields::read(const Fields& fields, const ServedModel& model) {
  GenerationFields out;
  chat::SamplingChoice& sampling = out.sampling;
  sampling.temperature = fields.number("temperature", 0, 10);
  sampling.top_p = fields.number("top_p", 0, 1);
  if (sampling.top_p == 0.0) fields.refuse("top_p", "is 0, a number above 0 and up to 1 is wanted");
  sampling.min_p = fields.number("min_p", 0, 1);
  if (sampling.min_p == 1.0) fields.refuse("min_p", "is 1, a number from 0 and below 1 is wanted");
  sampling.repetition_penalty = fields.number("repetition_penalty", 0, 10);
  if (sampling.repetition_penalty == 0.0) {
    fields.refuse("repetition_penalty", "is 0, a number above 0 and up to 10 is wanted");
  }
  // What a float rounds to the limit itself is within it all the same.
  constexpr float kLeast = std::numeric_limits<float>::min();
  if (sampling.top_p) sampling.top_p = std::max<double>(*sampling.top_p, kLeast);
  if (sampling.repetition_penalty) sampling.repetition_penalty = std::max<double>(*sampling.repetition_penalty, kLeast);
  if (sampling.min_p) sampling.min_p = std::min<double>(*sampling.min_p, std::nextafter(1.0F, 0.0F));
  sampling.presence_penalty = fields.number("presence_penalty", -10, 10);
  sampling.frequency_penalty = fields.number("frequency_penalty", -10, 10);
  if (const auto top_k = fields.integer("top_k", -1, 1 << 24)) {  // -1: all, as vLLM says it
    sampling.top_k = static_cast<int>(std::max<int64_t>(*top_k, 0));
  }
  if (const auto seed = fields.integer("seed", INT64_MIN, INT64_MAX)) sampling.seed = static_cast<uint64_t>(*seed);
  out.logit_bias = read_bias(fields, model.config.vocabulary);

  out.set_stop(fields, "stop");
  if (const Json* tokens = fields.array("stop_token_ids", kMaxStopTokens)) {
    for (size_t i = 0; i < tokens->size(); ++i) {
      const Json& token = (*tokens)[i];
      if (!token.is_number_integer() || token.get<int64_t>() < 0 || token.get<int64_t>() >= model.config.vocabulary) {
        fields.refuse(fmt::format("stop_token_ids[{}]", i),
                      fmt::format("is no token from 0 to {}", model.config.vocabulary - 1));
      }
      out.stop_tokens.push_back(token.get<int32_t>());
    }
  }
  out.min_tokens = fields.integer("min_tokens", 0, kMaxTokens).value_or(0);
  out.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  out.answers = fields.integer("n", 1, kMaxAnswers).value_or(1);
  out.priority = static_cast<int32_t>(fields.integer("priority", -1000000, 1000000).value_or(0));
  out.salt = fields.string("cache_salt", 1024).value_or("");
  out.stream = fields.boolean("stream").value_or(false);
  if (const Json* options = fields.object("stream_options")) {
    if (!out.stream && !options->empty()) fields.refuse("stream_options", "is given, but stream is not true");
    static constexpr FieldRule kRules[] = {{"include_usage", Treatment::kHonoured},
                                           {"continuous_usage_stats", Treatment::kHonoured},
                                           {"include_obfuscation", Treatment::kIgnored}};
    const Fields inner(*options, kRules, fields.full_name("stream_options."));
    out.include_usage = inner.boolean("include_usage").value_or(false);
    out.continuous_usage = inner.boolean("continuous_usage_stats").value_or(false);
  }
  return out;
}

void GenerationFields::set_stop(const Fields& fields, std::string_view name) {
  stop = fields.strings(name, chat::kMaxStopStrings);
  std::erase(stop, "");
  try {
    chat::check_stop_strings(stop, fields.full_name(name));
  } catch (const Error& error) {
    throw ApiError::field(fields.full_name(name), error.what());
  }
}

engine::Request GenerationFields::request(chat::Prompt prompt, const ServedModel& model, const ApiCall& call) const {
  const auto tokens = static_cast<int64_t>(prompt.tokens.size());
  if (tokens >= model.context) throw ApiError::too_long(tokens, model.context, call.form, prompt_field(call));
  const std::vector<int64_t> turns = prompt.turns;
  engine::Request request = model.text->request(std::move(prompt));
  request.sampling = sampling.over(request.sampling);
  request.sampling.logit_bias = logit_bias;
  request.max_tokens = max_tokens.value_or(kMaxTokens);
  request.min_tokens = std::min(min_tokens, request.max_tokens);
  if (ignore_eos) request.stop_tokens.clear();
  request.stop_tokens.insert(request.stop_tokens.end(), stop_tokens.begin(), stop_tokens.end());
  request.priority = priority;
  request.cache.salt = salt;
  // The end of what comes before the first message of a user, and of what comes before the model's turn and the last
  // message: where the next request of this conversation, or another conversation, parts from this one.
  if (!turns.empty()) {
    request.cache.boundaries.push_back(turns.front());
    if (turns.size() >= 2) request.cache.boundaries.push_back(turns[turns.size() - 2]);
    request.cache.boundaries.push_back(turns.back());
    auto& boundaries = request.cache.boundaries;
    std::sort(boundaries.begin(), boundaries.end());
    boundaries.erase(std::unique(boundaries.begin(), boundaries.end()), boundaries.end());
  }
  return request;
}

bool GenerationFields::ends(int32_t token, const chat::ChatText& text) const {
  if (std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end()) return true;
  return !ignore_eos && text.is_stop(token);
}

ModelRequest::ModelRequest(Service& service, ApiCall& call, std::span<const FieldRule> rules)
    : body(call.body()), fields(body, rules), model(service.require_model()) {
  call.ignored = fields.ignored();
  service.require_name(fields.string("model"));
}

std::string_view prompt_field(const ApiCall& call) {
  return call.path == "/v1/completions" ? "prompt" : call.path == "/v1/responses" ? "input" : "messages";
}

chat::Prompt render(const chat::Conversation& conversation, const ServedModel& model, const ApiCall& call) {
  try {
    return model.text->prompt(conversation);
  } catch (const chat::FieldError&) {
    throw;
  } catch (const Error& error) {
    // Where the template lies is the server's business.
    std::string message = error.what();
    if (message.starts_with(model.directory + "/")) message.erase(0, model.directory.size() + 1);
    throw ApiError::field(prompt_field(call), fmt::format("{}: {}", prompt_field(call), message));
  }
}

void read_template_variables(const Fields& fields, Json& variables) {
  const Json* const given = fields.object("chat_template_kwargs");
  if (given == nullptr) return;
  for (const char* name : {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}) {
    if (given->contains(name)) fields.refuse(fmt::format("chat_template_kwargs.{}", name), "is no variable");
  }
  variables = *given;
}

}  // namespace fourfold::serve
