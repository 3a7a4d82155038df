// Texts against grammars, byte by byte.
#pragma once

#include <string>
#include <string_view>

#include "byte_vocabulary.h"
#include "structure/grammar_text.h"

namespace fourfold::structure {

inline Compiler& byte_compiler() {
  static const std::unique_ptr<Compiler> compiler = make_compiler(byte_vocabulary());
  return *compiler;
}

enum class Fit { kNo, kPart, kWhole };

inline Fit fit(const std::string& grammar, std::string_view text) {
  const auto matcher = byte_compiler().compile(grammar)->matcher({kStop});
  for (const char byte : text) {
    if (!matcher->accept(1 + static_cast<unsigned char>(byte))) return Fit::kNo;
  }
  return matcher->complete() ? Fit::kWhole : Fit::kPart;
}

// Where and why something is refused: "PLACE: MESSAGE", or "taken".
template <typename F>
std::string rejection(F&& call) {
  try {
    call();
  } catch (const Rejected& rejected) {
    return rejected.place + ": " + rejected.what();
  }
  return "taken";
}

}  // namespace fourfold::structure

#define SKIP_WITHOUT_COMPILER() \
  if (!fourfold::structure::has_compiler()) GTEST_SKIP() << "built without xgrammar"
