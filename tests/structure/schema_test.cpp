#include <gtest/gtest.h>

#include "matching.h"
#include "structure/json_schema.h"

namespace fourfold::structure {
namespace {

TEST(Schema, LetsThroughWhatFits) {
  SKIP_WITHOUT_COMPILER();
  const struct {
    const char* schema;
    std::vector<std::string> fits, others;
  } cases[] = {
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]})",
       {R"({"a": 1})", R"({"a":1,"b":"x"})", "{\n  \"a\": -12,\n  \"b\": \"\"\n}"},
       {"{}", R"({"b": "x"})", R"({"a": 1, "c": 2})", R"({"a": 1,})", R"({"a":  1})", R"({"a": 01})"}},
      {R"({"type": "object", "properties": {"a": true, "b": true, "c": true}, "required": ["b"]})",
       {R"({"b": 1})", R"({"a": 1, "b": 2})", R"({"b": 1, "c": 2})", R"({"a": 1, "b": 2, "c": 3})"},
       {R"({"a": 1})", R"({"a": 1, "c": 2})", R"({, "b": 1})"}},
      {R"({"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "boolean"}})",
       {"{}", R"({"ab": null})", R"({"ab": null, "a": true, "abc": false})"},
       {R"({"x": true, "ab": true})", R"({"ab": null, "ab": true})", R"({"x": 1})", R"({"\u0061b": true})"}},
      {R"({"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 12}, "minItems": 1, "maxItems": 3})",
       {"[0]", "[-3, 12, 5]", "[ 7 ]"},
       {"[]", "[1,2,3,4]", "[13]", "[-4]", "[-0]", "[1.0]"}},
      {R"({"type": "number", "exclusiveMinimum": 0.25, "maximum": 3})",
       {"0.26", "0.250001", "3", "3.0", "1"},
       {"0.25", "0", "3.1", "-1", "3.000001"}},
      {R"({"type": "number"})", {"0", "-1.5e-7", "3E+2", "123.456"}, {"01", ".5", "1.", "1e", "1e999", "+1", "NaN"}},
      {R"({"enum": ["a\"b", 1, null, [1, {"x": "é"}]]})",
       {R"("a\"b")", "1", "null", R"([1, {"x": "é"}])"},
       {"\"a\"", "2", "[1]"}},
      {R"({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]})",
       {"null", R"("")", R"("é😀")", R"("\"\\")"},
       {R"("abc")", "1"}},
      {R"({"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"},
          {"type": "null"}]}}, "required": ["v", "next"]}}, "$ref": "#/$defs/n"})",
       {R"({"v": 1, "next": null})", R"({"v": 1, "next": {"v": 2, "next": {"v": 3, "next": null}}})"},
       {R"({"v": 1})", R"({"v": 1, "next": {"v": 2}})"}},
      {R"({"allOf": [{"type": "object", "properties": {"a": {"minimum": 3}}, "required": ["a"]},
                     {"properties": {"a": {"type": "integer", "maximum": 5}}}]})",
       {R"({"a": 3})", R"({"a": 5})"},
       {R"({"a": 6})", R"({"a": 2})", "{}"}},
      {R"({"type": ["integer", "null"], "minimum": 0})", {"0", "null"}, {"-1", "true"}},
      {R"({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": false, "minItems": 1})",
       {R"(["a"])", R"(["a", 1])"},
       {"[]", R"(["a", 1, 2])", "[1]"}},
      {R"({"type": "object"})", {"{}", R"({"a": [1, {"b": "\u00e9\n"}]})"}, {"[]", R"({"a"})", R"({"a": "\ud800"})"}},
      {R"({"type": "string", "format": "date"})", {R"("2024-02-28")"}, {R"("2024-02-30")", R"("2024-13-01")"}},
      {R"({"type": "object", "properties": {}})", {"{}", "{ }"}, {R"({"a": 1})"}},
      {R"({"type": "object", "patternProperties": {"^x_[a-z]+$": {"type": "integer"}}})",
       {"{}", R"({"x_a": 1, "x_bc": 2})"},
       {R"({"a": 1})", R"({"x_": 1})"}},
      {R"({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k"]},
                     {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]})",
       {R"({"k": "a", "x": 1})", R"({"k": "b"})"},
       {R"({"k": "c"})", R"({"k": "b", "x": 1})"}},
      {R"({"type": "object", "properties": {"p": {"type": "integer"}, "q": {"type": "integer"}}, "anyOf": [{"required": ["p"]},
          {"required": ["q"]}]})",
       {R"({"p": 1})", R"({"q": 1})", R"({"p": 1, "q": 2})"},
       {"{}"}},
  };
  for (const auto& one : cases) {
    const std::string grammar = json_schema_grammar(Json::parse(one.schema), false);
    for (const std::string& text : one.fits) EXPECT_EQ(fit(grammar, text), Fit::kWhole) << one.schema << " " << text;
    for (const std::string& text : one.others) EXPECT_NE(fit(grammar, text), Fit::kWhole) << one.schema << " " << text;
  }
}

TEST(Schema, BoundsWhiteSpace) {
  SKIP_WITHOUT_COMPILER();
  const std::string grammar = json_object_grammar(true);
  EXPECT_EQ(fit(grammar, "\n\n{\"a\": 1}"), Fit::kWhole);
  EXPECT_EQ(fit(grammar, "\n\n\n"), Fit::kNo);
  EXPECT_EQ(fit(grammar, "{\n" + std::string(16, ' ')), Fit::kPart);
  EXPECT_EQ(fit(grammar, "{\n" + std::string(17, ' ')), Fit::kNo);
  EXPECT_EQ(fit(grammar, "{\n\n"), Fit::kNo);
  EXPECT_EQ(fit(grammar, "{} "), Fit::kNo);
}

// A mask is what may come, token by token: also where a count ends, for which the compiler has other ways.
TEST(Schema, MasksOfCountedStringsAreWhatFits) {
  SKIP_WITHOUT_COMPILER();
  const Vocabulary vocabulary = large_vocabulary(3'000);
  const auto compiler = make_compiler(vocabulary);
  const struct {
    Json schema;
    std::string answer;
  } cases[] = {
      {{{"type", "string"}, {"maxLength", 12}}, "\"abcdefghijkl\""},
      {{{"type", "string"}, {"maxLength", 10}},
       "\"\xE4\xB8\x80"
       "bcdefgh\xE4\xB9\x81k\""},
      {{{"type", "string"}, {"minLength", 9}, {"maxLength", 11}}, "\"abcdefghijk\""},
      {{{"type", "string"}, {"minLength", 10}}, "\"abcdefghijk\""},
      {parse_json(R"({"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 2})", "schema"),
       R"(["abcdefghi", "jklmnopqr"])"},
      {parse_json(
           R"({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
          "required": ["a"]})",
           "schema"),
       R"({"a": "abcdefghi", "b": 1})"},
  };
  for (const auto& c : cases) {
    const auto grammar = compiler->compile(json_schema_grammar(c.schema, false));
    const auto matcher = grammar->matcher({kStop});
    for (size_t at = 0;; ++at) {
      std::vector<uint32_t> bits(static_cast<size_t>((vocabulary.size + 31) / 32), 0);
      if (matcher->mask(bits)) {
        for (int32_t token = 1; token < static_cast<int32_t>(vocabulary.size); ++token) {
          const std::string& text = vocabulary.tokens[static_cast<size_t>(token)];
          const bool fits = matcher->accept_text(text);
          if (fits) matcher->roll_back(1);
          ASSERT_EQ(bits[static_cast<size_t>(token) / 32] >> (token % 32) & 1, fits ? 1u : 0u)
              << c.schema << " behind " << c.answer.substr(0, at) << ": " << text;
        }
      }
      if (at == c.answer.size()) break;
      ASSERT_TRUE(matcher->accept(1 + static_cast<unsigned char>(c.answer[at]))) << c.answer << " at " << at;
    }
    EXPECT_TRUE(matcher->complete()) << c.answer;
  }
}

TEST(Schema, CompilingStops) {
  SKIP_WITHOUT_COMPILER();
  const std::string grammar = json_schema_grammar(
      parse_json(R"({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}})", "schema"),
      false);
  CompilerOptions options;
  int asked = 0, most = 1'000'000;
  options.stop = [&] { return ++asked > most; };
  make_compiler(byte_vocabulary(), options)->compile(grammar);
  ASSERT_GT(asked, 10);
  ASSERT_LT(asked, most);

  // Stopped where it was asked for, and remembered.
  asked = 0;
  most = 5;
  const auto compiler = make_compiler(byte_vocabulary(), options);
  for (int i = 0; i < 2; ++i) {
    EXPECT_NE(rejection([&] { compiler->compile(grammar); }).find("stopped"), std::string::npos);
    EXPECT_EQ(asked, most + 1);
  }
  most = 1'000'000;
  const auto matcher = compiler->compile(json_object_grammar(false))->matcher({kStop});
  EXPECT_TRUE(matcher->accept_text("{}"));

  CompilerOptions none;
  none.max_seconds = 0;
  EXPECT_NE(rejection([&] { make_compiler(byte_vocabulary(), none)->compile(grammar); }).find("more than 0 s"),
            std::string::npos);
}

TEST(Schema, RefusesByPlaceAndName) {
  const struct {
    const char *schema, *why;
  } cases[] = {
      {R"({"properties": {"a": {"uniqueItems": true}}})", ".properties.a.uniqueItems: is not supported"},
      {R"({"type": "string", "nullable": true})", ".nullable: is a keyword that is not supported"},
      {R"({"not": {}})", ".not: is a keyword"},
      {R"({"if": {}, "then": {}})", ".if: is a keyword"},
      {R"({"type": "array", "contains": {}})", ".contains: is a keyword"},
      {R"({"dependentRequired": {}})", ".dependentRequired: is a keyword"},
      {R"({"type": "integer", "multipleOf": 2})", ".multipleOf: is not supported"},
      {R"({"type": "string", "format": "color"})", ".format: is color"},
      {R"x({"type": "string", "pattern": "(?=a)"})x", ".pattern: (?=a) looks around"},
      {R"({"type": "string", "pattern": "a+", "maxLength": 3})", ".pattern: has texts"},
      {R"({"type": "strin"})", ".type: is \"strin\""},
      {R"({"$ref": "http://a/b"})", ".$ref: is http://a/b"},
      {R"({"$ref": "#/$defs/a"})", ".$ref: is #/$defs/a, which is not there"},
      {R"({"$ref": "#"})", "refers to itself"},
      {R"({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})",
       "refers to itself"},
      {R"({"type": "integer", "minimum": 5, "maximum": 4})", "lets no number through"},
      {R"({"type": "string", "minLength": 5, "maxLength": 4})", ".maxLength: is 4, below"},
      {R"({"type": "array", "minItems": 1000000})", ".minItems: is 1000000, an integer from 0 to 10000"},
      {R"({"type": "array", "maxItems": 1.5})", ".maxItems: is 1.5, an integer"},
      {R"({"enum": []})", ".enum: is no array of values"},
      {R"({"type": "integer", "enum": ["a"]})", "lists no value of its type"},
      {R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})", ".oneOf: has alternatives 0 and 1 that may both fit"},
      {R"({"allOf": [{"properties": {"a": {}}, "additionalProperties": false}, {"properties": {"b": {}}}]})",
       "combines additionalProperties"},
      {R"({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": false})",
       ".required: names b, which is no property"},
      {R"({"properties": {"a": {}}, "patternProperties": {"b": {}}})", ".patternProperties: stands beside properties"},
      {"false", "lets no value through"},
  };
  for (const auto& one : cases) {
    const std::string why = rejection([&] { json_schema_grammar(Json::parse(one.schema), false); });
    EXPECT_NE(why.find(one.why), std::string::npos) << one.schema << "\n  " << why;
  }
}

TEST(Schema, IsBoundedInSizeAndDepth) {
  Json deep = {{"type", "integer"}};
  for (int i = 0; i < 100; ++i) deep = {{"type", "array"}, {"items", deep}};
  EXPECT_NE(rejection([&] { json_schema_grammar(deep, false); }).find("deeper"), std::string::npos);
  Json wide = {{"type", "object"}, {"properties", Json::object()}};
  for (int i = 0; i < 10'000; ++i) wide["properties"][std::to_string(i)] = {{"type", "integer"}};
  EXPECT_NE(rejection([&] { json_schema_grammar(wide, false); }).find("values"), std::string::npos);
  // Few bytes, many states.
  const Json counted = Json::parse(R"({"type": "string", "pattern": "((a{100}|b{100}){100}|c{100}){100}"})");
  EXPECT_NE(rejection([&] { json_schema_grammar(counted, false); }).find("repeats too much"), std::string::npos);
  // Alternatives of alternatives.
  Json product = {{"type", "object"}};
  Json arms = Json::array();
  for (int i = 0; i < 20; ++i) arms.push_back({{"anyOf", {{{"minimum", i}}, {{"maximum", i}}}}});
  product["allOf"] = arms;
  EXPECT_NE(rejection([&] { json_schema_grammar(product, false); }), "taken");
  // Each reference is written once, however often it is met.
  Json doubling = {{"$defs", Json::object()}, {"$ref", "#/$defs/d0"}};
  for (int i = 0; i < 20; ++i) {
    const Json next = {{"$ref", fmt::format("#/$defs/d{}", i + 1)}};
    doubling["$defs"][fmt::format("d{}", i)] = {{"type", "object"}, {"properties", {{"a", next}, {"b", next}}}};
  }
  doubling["$defs"]["d20"] = {{"type", "null"}};
  EXPECT_LT(json_schema_grammar(doubling, false).size(), 100'000u);
}

TEST(Schema, GrammarsOfOthersAreChecked) {
  EXPECT_EQ(rejection([] { check_grammar("root ::= \"a\" [^\\]]{2,5} (b | \"c\")* # not {99999}\nb ::= \"x\"?\n"); }),
            "taken");
  const struct {
    const char *grammar, *why;
  } cases[] = {{"root ::= \"a", "unclosed text"},
               {"root ::= [a", "unclosed class"},
               {"root ::= (\"a\"", "unclosed ("},
               {"root ::= \"a\")", "unopened )"},
               {"root ::= \"a\"{5000}", "more than 1000"},
               {"root ::= ((((\"a\"{900}){900}){900}){900})", "repeats too much"},
               {"root ::= Token(5)", "a macro"},
               {"root[lazy] ::= \"a\"", "options of a rule"},
               {"root ::= \"a\" (= \"b\")", "a look ahead"}};
  for (const auto& one : cases) {
    EXPECT_NE(rejection([&] { check_grammar(one.grammar); }).find(one.why), std::string::npos) << one.grammar;
  }
  EXPECT_NE(rejection([] { check_grammar("root ::= " + std::string(200, '(')); }).find("nested"), std::string::npos);
  EXPECT_NE(rejection([] { check_grammar(std::string(70'000, ' ')); }).find("bytes"), std::string::npos);
  SKIP_WITHOUT_COMPILER();
  EXPECT_NE(rejection([] { byte_compiler().compile("root ::= missing"); }).find("is no grammar"), std::string::npos);
  EXPECT_NE(rejection([] { byte_compiler().compile(""); }).find("is no grammar"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::structure
