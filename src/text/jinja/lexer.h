// Tokens of a template, with jinja2's rules for whitespace under trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace fourfold::text::jinja {

enum class TokenKind : uint8_t {
  kData,
  kBlockBegin,
  kBlockEnd,
  kVariableBegin,
  kVariableEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;  // of a string: its value
  Value value;       // of a number
};

std::vector<Token> tokenize(std::string_view source, std::string_view name);

}  // namespace fourfold::text::jinja
