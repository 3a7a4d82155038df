// JSON schemas as grammars of JSON texts. Every text of the grammar validates against the schema; the other way round
// the grammar leaves some out, on purpose:
//
// - Properties come in the schema's order, and others than its own only where it has additionalProperties,
//   patternProperties, or no properties at all.
// - White space between tokens is none, one space, or a line end and up to 16 blanks; between a name and its
//   value none or one space.
// - Integers have up to 18 digits, numbers up to 15 before and after the point and two of exponent, those with limits
//   up to 6 after the point.
// - Strings with a format are its plain forms (no day 29 of February, ASCII host names).
//
// - Strings with a pattern, or with lengths above 8, have escapes only where the pattern asks for nothing else.
//
// A keyword that this does not turn into grammar is refused by its name (docs/serving.md has the list): nothing is
// left unchecked.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/json.h"
#include "structure/grammar_text.h"
#include "structure/pattern.h"

namespace fourfold::structure {

struct SchemaLimits {
  size_t max_bytes = 256 << 10;  // of the schema's text
  size_t max_values = 20'000;
  int max_depth = 64;          // of what is nested and referred to, on one way through the schema
  int64_t max_count = 10'000;  // minItems, maxItems, minLength, maxLength, maxProperties
};

// The types of values that a schema lets through.
struct Kinds {
  bool null = false, boolean = false, integer = false, number = false, string = false, array = false, object = false;
  bool any() const { return null || boolean || integer || number || string || array || object; }
};

// Writes schemas of one document (which $ref refers to) into a grammar.
class SchemaWriter {
 public:
  // Rejected when the document is beyond the limits. `root` and `grammar` must outlive it.
  SchemaWriter(const Json& root, GrammarText& grammar, const Writing& writing, const SchemaLimits& limits = {});

  // The JSON texts of a schema. `place` is where it stands, for errors.
  Part value(const Json& schema, const std::string& place);
  // Any JSON value; an object of any.
  Part any();
  Part any_object();
  // A schema of one type, as `writing` writes the text of strings: without quotes where it is no JSON.
  Part string_text(const Json& schema, const std::string& place, const Writing& writing);
  // A schema without references and combinations at its top: one for each way to fulfil it.
  std::vector<Json> alternatives(const Json& schema, const std::string& place);
  // The types that one of those says, or that its keywords belong to; none: it says nothing of them.
  static Kinds kinds(const Json& flat, const std::string& place);
  Part one_kind(const Json& flat, const Kinds& kinds, const std::string& place);
  // The values of enum or const, as they are written: an empty list where there are neither.
  std::vector<Json> listed(const Json& flat, const std::string& place) const;
  Part space();
  // A keyword that is a count, within its limit.
  int64_t count(const Json& schema, const char* name, const std::string& place, int64_t otherwise) const;

 private:
  Part object(const Json& schema, const std::string& place);
  Part map(const Json& schema, const std::string& place);
  Part array(const Json& schema, const std::string& place);
  Part number(const Json& schema, const std::string& place, bool integer);
  CharSet plain_characters() const;  // of a string, without escapes
  Part string_end(int64_t least, int64_t most);
  Part key_except(const std::vector<std::string>& names);
  Part list_of(const Part& item, int64_t least, int64_t most);
  Part string_literal(std::string_view text);
  Part json_literal(const Json& value);
  const Json& target(const Json& reference, const std::string& place) const;
  Json merged(const Json& a, const Json& b, const std::string& place) const;
  static bool only_refers(const Json& schema);  // $ref and nothing else that counts
  // The schemas of anyOf, oneOf or an allOf of one, where nothing else counts; or null.
  static const Json* only_combines(const Json& schema);
  void check_keywords(const Json& schema, const std::string& place) const;
  void check_apart(const Json& options, const std::string& place);

  const Json& root_;
  GrammarText& grammar_;
  const Writing writing_;
  const SchemaLimits limits_;
  std::map<std::string, std::string> rules_;  // of references, by their text
  // Strings of so many characters, by least, most (< 0: no end) and whether < is escaped.
  std::map<std::tuple<int64_t, int64_t, bool>, std::string> counted_strings_;
  std::string escape_, any_, any_object_, any_array_, any_string_;
  int depth_ = 0;
};

// The grammar of a schema; of any JSON object. Rejected when the schema is not taken.
std::string json_schema_grammar(const Json& schema, bool after_reasoning);
std::string json_object_grammar(bool after_reasoning);

}  // namespace fourfold::structure
