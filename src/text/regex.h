// The regular expressions of tokenizer.json, which are written for Oniguruma (Ruby syntax, UTF-8), run by PCRE2 (UTF,
// UCP, JIT). The pattern is translated where the two differ:
//   \s \S \w \W \d \D \h \H   spelled out as Oniguruma's Unicode classes
//   x{n,m}+                   not possessive, as in Ruby
//   ^ and $                   match at lines
// Nested classes, class intersections, callouts, recursion and (?m) are refused by name.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::text {

// A part of a text, in bytes; `matched` says whether the pattern matched it or it lies between matches.
struct MatchSpan {
  size_t begin;
  size_t end;
  bool matched;
};

class Regex {
 public:
  // `name` is what an Error calls the pattern.
  Regex(std::string_view pattern, std::string_view name);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // Appends spans that cover all of `valid` (UTF-8) in order. Safe from many threads. An Error when a match needs more
  // than the match limit or when the whole takes absurdly long (a pattern made to backtrack).
  void find_spans(std::string_view valid, std::vector<MatchSpan>& out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The pattern in PCRE2's syntax; exposed for the tests.
std::string translate_pattern(std::string_view pattern, std::string_view name);

}  // namespace fourfold::text
