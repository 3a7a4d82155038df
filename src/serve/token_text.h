// Tokens and their log-probabilities as APIs show them.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "engine/engine.h"
#include "text/tokenizer.h"

namespace fourfold::serve {

// A token's text; where it is a part of a character, its bytes as "bytes:\xe2\x80".
std::string token_text(const text::Tokenizer& tokenizer, int32_t token);

// A token's bytes as an array of numbers.
Json token_bytes(const text::Tokenizer& tokenizer, int32_t token);

// {"token", "logprob", "bytes"}, without alternatives.
Json token_logprob(const text::Tokenizer& tokenizer, const engine::TokenLogprob& logprob);

// JSON has no infinity: what is less probable than that is said to be -9999.
double finite(float logprob);

size_t count_characters(std::string_view utf8);

}  // namespace fourfold::serve
