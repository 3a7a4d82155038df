// Vocabularies made for tests.
#pragma once

#include <string>

#include "base/random.h"
#include "structure/compiler.h"

namespace fourfold::structure {

inline constexpr int32_t kStop = 0;

// Token 0 is the stop token, token 1 + b the byte b.
inline Vocabulary byte_vocabulary() {
  Vocabulary out;
  out.tokens.emplace_back();
  for (int byte = 0; byte < 256; ++byte) out.tokens.emplace_back(1, static_cast<char>(byte));
  out.size = static_cast<int64_t>(out.tokens.size());
  return out;
}

// As large as that of a model: the bytes, then words with and without a space before them, numbers, indentation,
// punctuation that stands together in code and JSON.
inline Vocabulary large_vocabulary(int64_t size) {
  Vocabulary out = byte_vocabulary();
  Random random(7);
  static const char* const kTogether[] = {"\"",  "\":", "\": \"", "\", \"", "\"}", "{\"", "\"]",
                                          "[\"", "},",  "]}",     "</",     "/>",  ">\n", "();"};
  for (const char* text : kTogether) out.tokens.emplace_back(text);
  for (int blanks = 2; blanks < 64; ++blanks) out.tokens.push_back(std::string(static_cast<size_t>(blanks), ' '));
  while (static_cast<int64_t>(out.tokens.size()) < size) {
    std::string word = random.below(2) == 0 ? " " : "";
    const bool wide = random.below(4) == 0;
    for (uint64_t i = 0, length = 2 + random.below(8); i < length; ++i) {
      if (wide) {
        word += "\xE4";
        word += static_cast<char>(0xB8 + random.below(8));
        word += static_cast<char>(0x80 + random.below(64));
      } else {
        word += static_cast<char>('a' + random.below(26));
      }
    }
    out.tokens.push_back(std::move(word));
  }
  out.size = size;
  return out;
}

}  // namespace fourfold::structure
