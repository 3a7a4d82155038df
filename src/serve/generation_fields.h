// Fields that all APIs that generate have in common, and what they make of an engine's request.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
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
  engine::Request request(chat::Prompt prompt, const ServedModel& model, ErrorForm form) const;

  // Whether this token, if it is the last, is the mark of an end and no part of the answer.
  bool ends(int32_t token, const chat::ChatText& text) const;
};

inline constexpr int64_t kMaxTokens = int64_t{1} << 31;
inline constexpr int64_t kMaxAnswers = 64;

}  // namespace fourfold::serve
