// Fields that all APIs that generate have in common, and what they make of an engine's request.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chat/chat_text.h"
#include "chat/sampling.h"
#include "engine/engine.h"
#include "serve/fields.h"
#include "serve/service.h"

namespace fourfold::serve {

struct GenerationFields {
  chat::SamplingChoice sampling;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_tokens;  // beside those of the checkpoint
  std::optional<int64_t> max_tokens;
  int64_t min_tokens = 0, answers = 1;
  int32_t priority = 0;
  bool ignore_eos = false, stream = false, include_usage = false, continuous_usage = false;
  std::string salt;

  // Reads what is in `fields` of temperature, top_p, top_k, min_p, the penalties, seed, logit_bias, stop,
  // stop_token_ids, min_tokens, ignore_eos, n, stream, stream_options, priority, cache_salt. The token limits have
  // different names and are read by the API.
  static GenerationFields read(const Fields& fields, const ServedModel& model);

  // Stop strings, under the name that an API has for them.
  void set_stop(const Fields& fields, std::string_view name);

  // The request for a prompt: an ApiError where the prompt leaves no room in the context.
  engine::Request request(chat::Prompt prompt, const ServedModel& model, const ApiCall& call) const;

  // Whether this token, if it is the last, is the mark of an end and no part of the answer.
  bool ends(int32_t token, const chat::ChatText& text) const;
};

// A request to the model: its fields, once the model is there and is meant. An ApiError otherwise.
struct ModelRequest {
  ModelRequest(Service& service, ApiCall& call, std::span<const FieldRule> rules);

  const Json body;
  const Fields fields;
  const ServedModel& model;
};

// The field of an API's requests that has what the model is to read.
std::string_view prompt_field(const ApiCall& call);

// The prompt of a conversation: an ApiError that names that field where the template refuses it.
chat::Prompt render(const chat::Conversation& conversation, const ServedModel& model, const ApiCall& call);

// chat_template_kwargs, into the variables of the template: an ApiError where one is no variable.
void read_template_variables(const Fields& fields, Json& variables);

// Of the tables of fields: what each API has that generates.
inline constexpr FieldRule kGenerationRules[] = {
    {"model", Treatment::kHonoured, "404 where it is not the served name; may be left out"},
    {"temperature", Treatment::kHonoured, "0 to 10; 0 is greedy"},
    {"top_p", Treatment::kHonoured, "above 0, up to 1"},
    {"top_k", Treatment::kHonoured, "-1 and 0: all tokens"},
    {"min_p", Treatment::kHonoured, "0 to below 1"},
    {"presence_penalty", Treatment::kHonoured, "-10 to 10"},
    {"frequency_penalty", Treatment::kHonoured, "-10 to 10"},
    {"repetition_penalty", Treatment::kHonoured, "above 0, up to 10"},
    {"logit_bias", Treatment::kHonoured, "token to a number from -100 to 100"},
    {"stop_token_ids", Treatment::kHonoured, "beside the model's own"},
    {"min_tokens", Treatment::kHonoured, "before that many the answer does not end by itself"},
    {"ignore_eos", Treatment::kHonoured, "the model's end tokens do not end the answer"},
    {"stream", Treatment::kHonoured, ""},
    {"priority", Treatment::kHonoured, "lower values first"},
    {"cache_salt", Treatment::kHonoured, "cached prefixes are shared with requests of the same salt only"},
};
// What chat and completions have in common beside that.
inline constexpr FieldRule kOpenAiRules[] = {
    {"seed", Treatment::kHonoured, "answer i of n has the seed plus i"},
    {"stream_options", Treatment::kHonoured, "include_usage, continuous_usage_stats"},
    {"use_beam_search", Treatment::kHonoured, "false only"},
    {"user", Treatment::kIgnored},
    {"metadata", Treatment::kIgnored},
    {"service_tier", Treatment::kIgnored},
    {"length_penalty", Treatment::kIgnored},
    {"skip_special_tokens", Treatment::kIgnored, "end tokens are never part of the text"},
    {"spaces_between_special_tokens", Treatment::kIgnored},
    {"request_id", Treatment::kIgnored, "the header x-request-id is taken"},
    {"bad_words", Treatment::kRefused, "use logit_bias"},
    {"allowed_token_ids", Treatment::kRefused, "use logit_bias"},
    {"logits_processors", Treatment::kRefused, "use logit_bias"},
};

inline constexpr int64_t kMaxTokens = int64_t{1} << 31;
inline constexpr int64_t kMaxAnswers = 64;

}  // namespace fourfold::serve
