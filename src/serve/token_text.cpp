#include "serve/token_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "text/unicode.h"

namespace fourfold::serve {

std::string token_text(const text::Tokenizer& tokenizer, int32_t token) {
  const std::string bytes(tokenizer.token_bytes(token));
  if (text::is_valid_utf8(bytes)) return bytes;
  std::string out = "bytes:";
  for (const char c : bytes) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return out;
}

Json token_bytes(const text::Tokenizer& tokenizer, int32_t token) {
  Json bytes = Json::array();
  for (const char c : tokenizer.token_bytes(token)) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

Json token_logprob(const text::Tokenizer& tokenizer, const engine::TokenLogprob& logprob) {
  return {{"token", token_text(tokenizer, logprob.token)},
          {"logprob", finite(logprob.logprob)},
          {"bytes", token_bytes(tokenizer, logprob.token)}};
}

double finite(float logprob) {
  return std::isfinite(logprob) ? std::max(-9999.0, static_cast<double>(logprob)) : -9999.0;
}

size_t count_characters(std::string_view utf8) {
  return static_cast<size_t>(
      std::count_if(utf8.begin(), utf8.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace fourfold::serve
