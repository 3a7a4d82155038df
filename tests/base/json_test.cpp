#include "base/json.h"

#include <gtest/gtest.h>

#include <string>

#include "base/check.h"
#include "base/plain_json.h"

namespace fourfold {
namespace {

std::string error_of(std::string_view text, const JsonLimits& limits = {}) {
  try {
    parse_json(text, "x.json", limits);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Json, KeepsOrderAndTypes) {
  const Json value = parse_json(R"({"z": 1, "a": [true, null, 1.5, "é"], "m": {}, "big": 18446744073709551616})", "x");
  EXPECT_EQ(value.dump(), R"({"z":1,"a":[true,null,1.5,"é"],"m":{},"big":1.8446744073709552e+19})");
  EXPECT_EQ(parse_json("7", "x").get<int>(), 7);
}

TEST(Json, DuplicateKeys) {
  EXPECT_EQ(error_of(R"({"a": 1, "b": {"a": 2}, "a": 3})"), "x.json: JSON object holds the key 'a' twice");
  JsonLimits limits;
  limits.reject_duplicate_keys = false;
  EXPECT_EQ(parse_json(R"({"a": 1, "b": 2, "a": 3})", "x", limits).dump(), R"({"a":3,"b":2})");
  std::string text = "{";
  for (int i = 0; i < 1000; ++i) text += fmt::format("\"k{}\": {}, ", i, i);
  EXPECT_EQ(parse_json(text + "\"k1000\": 1}", "x").size(), 1001u);
  EXPECT_EQ(error_of(text + "\"k999\": 1}"), "x.json: JSON object holds the key 'k999' twice");
  EXPECT_EQ(error_of(text + "\"k3\": 1}"), "x.json: JSON object holds the key 'k3' twice");
}

TEST(Json, Limits) {
  const std::string deep = std::string(1000000, '[') + std::string(1000000, ']');
  EXPECT_EQ(error_of(deep), "x.json: JSON nested deeper than 128 levels");
  EXPECT_EQ(error_of(std::string(128, '[') + std::string(128, ']')), "");
  EXPECT_NE(error_of(std::string(129, '[') + std::string(129, ']')), "");
  JsonLimits limits;
  limits.max_bytes = 4;
  EXPECT_EQ(error_of("[1,2]", limits), "x.json: 5 bytes of JSON, at most 4 are accepted");
  limits = {};
  limits.max_values = 3;
  EXPECT_EQ(error_of("[1,2]", limits), "");
  EXPECT_EQ(error_of("[1,2,3]", limits), "x.json: JSON with more than 3 values");
}

TEST(Json, SyntaxErrorsNamePlace) {
  EXPECT_EQ(error_of("[1, oops]").substr(0, 33), "x.json: not valid JSON at byte 4,") << error_of("[1, oops]");
  EXPECT_NE(error_of("[1, 2").find("ends after 5 bytes"), std::string::npos) << error_of("[1, 2");
  EXPECT_NE(error_of("").find("ends after 0 bytes"), std::string::npos) << error_of("");
  for (const char* text : {"[1] 2", "{'a': 1}", "\"\xff\"", "[NaN]", "[1,]", "// c\n1", "1e999", "\"\\ud800\""}) {
    EXPECT_NE(error_of(text), "") << text;
  }
  using namespace std::string_view_literals;
  for (const std::string_view text : {"[1]\0"sv, "[1]\0 garbage"sv, "\0[1]"sv, "[1\0]"sv, "\"a\0\""sv}) {
    EXPECT_NE(error_of(text).find("a NUL character"), std::string::npos) << error_of(text);
  }
}

// The first keys of an object are compared one by one, the others hashed.
TEST(Json, EveryKeyOfALargeObjectIsRemembered) {
  for (int twice = 0; twice < 40; ++twice) {
    std::string text = "{";
    for (int i = 0; i < 40; ++i) text += fmt::format("\"key{}\":{},", i, i);
    text += fmt::format("\"key{}\":0}}", twice);
    EXPECT_EQ(error_of(text), fmt::format("x.json: JSON object holds the key 'key{}' twice", twice));
  }
}

TEST(Json, LargeObjectsAreNotQuadratic) {
  std::string text = "{";
  for (int i = 0; i < 300000; ++i) text += fmt::format("\"key{}\":{},", i, i);
  text.back() = '}';
  const Json value = parse_json(text, "x");
  ASSERT_EQ(value.size(), 300000u);
  EXPECT_EQ(value.items().begin().key(), "key0");
}

TEST(Json, MembersOfOneObjectAreHandedOver) {
  std::string seen;
  const auto note = [&](std::string&& key, Json&& value) { seen += key + "=" + value.dump() + ";"; };
  const std::string text = R"({"a": {"m": 1, "x": {"m": [2]}, "y": {}}, "m": {"k": 3}, "b": [{"m": {"z": 1}}]})";
  const Json rest = parse_json_members(text, "x", "m", {}, note);
  EXPECT_EQ(seen, "k=3;");
  EXPECT_EQ(rest.dump(), R"({"a":{"m":1,"x":{"m":[2]},"y":{}},"m":{},"b":[{"m":{"z":1}}]})");
  seen.clear();
  EXPECT_EQ(parse_json_members(text, "x", "a", {}, note)["a"], Json::object());
  EXPECT_EQ(seen, R"(m=1;x={"m":[2]};y={};)");
  seen.clear();
  EXPECT_EQ(parse_json_members(text, "x", {}, {}, note), Json::object());
  EXPECT_EQ(seen, R"(a={"m":1,"x":{"m":[2]},"y":{}};m={"k":3};b=[{"m":{"z":1}}];)");
  // Nothing of that kind.
  seen.clear();
  EXPECT_EQ(parse_json_members("[{\"m\": 1}]", "x", {}, {}, note).dump(), "[{\"m\":1}]");
  EXPECT_EQ(parse_json_members(R"({"m": 5})", "x", "m", {}, note).dump(), R"({"m":5})");
  EXPECT_EQ(seen, "");

  const auto error = [&](const char* twice, JsonLimits limits) {
    try {
      parse_json_members(twice, "x", "m", limits, note);
      return std::string("none");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(error(R"({"m": {"a": 1, "a": 2}})", {}), "x: JSON object holds the key 'a' twice");
  EXPECT_EQ(error(R"({"m": {"a": 1, "b": [1, 2]}})", {.max_values = 4}), "x: JSON with more than 4 values");
  EXPECT_EQ(error(R"({"m": {"a": 1}, "a": 2})", {}), "none");
}

// What PlainJson takes is what parse_json() makes of it; what it leaves alone may be anything.
TEST(PlainJson, TakesOnlyWhatIsPlain) {
  const auto string_of = [](std::string_view text) {
    PlainJson json(text);
    std::string_view value;
    if (!json.string(&value) || !json.end()) return std::string("?");
    EXPECT_EQ(parse_json(text, "x").get<std::string>(), value) << text;
    return std::string(value);
  };
  EXPECT_EQ(string_of("\"\""), "");
  EXPECT_EQ(string_of(" \n\r\t\"a b~/{}[],:\" "), "a b~/{}[],:");
  for (const char* text : {"", "a", "'a'", "\"a", "\"a\\n\"", "\"a\\\"\"", "\"a\nb\"", "\"\x7f\"", "\"\x1f\"",
                           "\"\xc3\xa4\"", "\"\xff\"", "\"a\" x", "\v\"a\"", "1"}) {
    EXPECT_EQ(string_of(text), "?") << text;
  }
  EXPECT_EQ(string_of(std::string_view("\"a\0\"", 4)), "?");

  const auto number_of = [](std::string_view text) -> int64_t {
    PlainJson json(text);
    uint64_t value = 0;
    if (!json.number(&value) || !json.end()) return -1;
    EXPECT_EQ(parse_json(text, "x").get<uint64_t>(), value) << text;
    return static_cast<int64_t>(value);
  };
  EXPECT_EQ(number_of("0"), 0);
  EXPECT_EQ(number_of(" 907 "), 907);
  EXPECT_EQ(number_of("999999999999999999"), 999999999999999999);
  for (const char* text : {"", "-1", "+1", "01", "00", "1.0", "1.", "1e3", "0E1", "1 2", "1000000000000000000", "x",
                           "\"1\"", "18446744073709551616"}) {
    EXPECT_EQ(number_of(text), -1) << text;
  }

  PlainJson json("{ \"a\" : [1 , 2] }");
  std::string_view key;
  uint64_t one = 0, two = 0;
  EXPECT_FALSE(PlainJson("[").next('{'));
  EXPECT_TRUE(json.next('{') && json.string(&key) && json.next(':') && json.next('[') && json.number(&one) &&
              json.next(',') && json.number(&two) && json.next(']') && json.next('}') && json.end());
  EXPECT_EQ(key, "a");
  EXPECT_EQ(one, 1u);
  EXPECT_EQ(two, 2u);
  EXPECT_EQ(json.at(), 17u);
}

}  // namespace
}  // namespace fourfold
