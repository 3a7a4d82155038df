// The text of a grammar, rule by rule, in the EBNF that xgrammar reads; and what stands in it: sets of characters,
// literals, repetitions. Everything written here is counted, so that what is compiled later is bounded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace fourfold::structure {

// A schema, pattern or grammar that is not taken. `place` is where in it, as in ".properties.age.minimum"; empty: all.
class Rejected : public Error {
 public:
  Rejected(std::string the_place, const std::string& message) : Error(message), place(std::move(the_place)) {}
  std::string place;
};

// A set of Unicode scalar values (never surrogates).
class CharSet {
 public:
  CharSet() = default;
  CharSet(std::initializer_list<std::pair<uint32_t, uint32_t>> ranges);
  static CharSet all() { return CharSet().complement(); }

  void add(uint32_t first, uint32_t last);
  void add(const CharSet& other);
  CharSet complement() const;
  CharSet minus(const CharSet& other) const;
  bool contains(uint32_t c) const;
  bool empty() const { return ranges_.empty(); }
  uint32_t first() const { return ranges_.front().first; }
  // As a character class.
  std::string text() const;

 private:
  std::vector<std::pair<uint32_t, uint32_t>> ranges_;  // ascending, apart
};

// A part of a rule's body that may be followed by * or stand in a sequence. `weight` is about how many states the
// compiler makes of it, `shortest` and `longest` count characters (longest < 0: no end).
struct Part {
  std::string text;
  int64_t weight = 1;
  int64_t shortest = 0, longest = 0;
};

// Text as a literal. It must be UTF-8.
std::string quoted(std::string_view text);
Part literal(std::string_view text);
Part one_of(const CharSet& set);
Part sequence(const std::vector<Part>& parts);
Part choice(const std::vector<Part>& parts);
// `most` < 0: no end.
Part repeated(const Part& part, int64_t least, int64_t most);
Part optional(const Part& part);

struct GrammarLimits {
  size_t max_rules = 4096;
  int64_t max_weight = 16'000;   // of all rules together
  size_t max_bytes = 512 << 10;  // of the text
};

class GrammarText {
 public:
  explicit GrammarText(const GrammarLimits& limits = {}) : limits_(limits) {}

  // A name for a rule that is defined later, for rules that need each other.
  std::string declare();
  void define(const std::string& name, const Part& body);
  // A rule of this body; what refers to it. Rejected when there is too much.
  Part rule(const Part& body);
  // A rule of this body, which may end at any character, that ends after `most` of them: counted, and not written out.
  Part cut(const Part& body, int64_t most);
  Part reference(const std::string& name) const { return {name, 1, 0, -1}; }

  std::string finish(const Part& root);

 private:
  GrammarLimits limits_;
  size_t rules_ = 0;
  int64_t weight_ = 0;
  std::string text_;
};

}  // namespace fourfold::structure
