// Fields of requests: their limits, and that docs/serving.md tells of each.
#include "serve/fields.h"

#include <gtest/gtest.h>

#include <string>

#include "base/file.h"
#include "serve/chat_api.h"
#include "serve/completions_api.h"
#include "serve/messages_api.h"
#include "serve/responses_api.h"

namespace fourfold::serve {
namespace {

constexpr FieldRule kRules[] = {
    {"a", Treatment::kHonoured}, {"b", Treatment::kIgnored}, {"c", Treatment::kRefused, "use a"}};

template <typename F>
std::string refusal(F&& call) {
  try {
    call();
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    return error.param + ": " + error.what();
  }
  return "";
}

TEST(Fields, RefusesByName) {
  EXPECT_EQ(refusal([] { Fields(Json::parse(R"({"c": 1})"), kRules); }), "c: c is not supported: use a");
  EXPECT_EQ(refusal([] { Fields(Json::parse(R"({"c": null})"), kRules); }), "");
  EXPECT_EQ(refusal([] { Fields(Json::parse("[1]"), kRules, "options."); }),
            "options: options is array, an object is wanted");
}

TEST(Fields, NamesWhatItIgnores) {
  const Json object = Json::parse(R"({"z": 1, "a": 2, "b": 3, "y": null})");
  EXPECT_EQ(Fields(object, kRules).ignored(), (std::vector<std::string>{"z", "b"}));
}

TEST(Fields, ChecksKindsAndLimits) {
  const auto integer = [](const char* json) {
    const Json object = Json::parse(json);
    return refusal([&] { Fields(object, kRules).integer("a", 1, 16); });
  };
  EXPECT_EQ(integer(R"({"a": 1})"), "");
  EXPECT_EQ(integer(R"({"a": 16.0})"), "");
  EXPECT_EQ(integer(R"({"a": 17})"), "a: a is 17, an integer from 1 to 16 is wanted");
  EXPECT_EQ(integer(R"({"a": 1.5})"), "a: a is 1.5, an integer from 1 to 16 is wanted");
  EXPECT_EQ(integer(R"({"a": "1"})"), "a: a is \"1\", an integer from 1 to 16 is wanted");
  EXPECT_EQ(integer(R"({"a": true})"), "a: a is true, an integer from 1 to 16 is wanted");
  EXPECT_EQ(integer(R"({"a": 18446744073709551615})"),
            "a: a is 18446744073709551615, an integer from 1 to 16 is wanted");
  EXPECT_EQ(integer(R"({"a": 1e300})"), "a: a is 1e+300, an integer from 1 to 16 is wanted");
  EXPECT_EQ(integer(R"({"a": []})"), "a: a is array, an integer from 1 to 16 is wanted");
  const auto number = [](const char* json) {
    const Json object = Json::parse(json);
    return refusal([&] { Fields(object, kRules).number("a", 0, 2); });
  };
  EXPECT_EQ(number(R"({"a": 2})"), "");
  EXPECT_EQ(number(R"({"a": -0.1})"), "a: a is -0.1, a number from 0 to 2 is wanted");
  EXPECT_EQ(number(R"({"a": false})"), "a: a is false, a number from 0 to 2 is wanted");
  const Json strings = Json::parse(R"({"a": ["x", 1]})");
  EXPECT_EQ(refusal([&] { Fields(strings, kRules).strings("a", 4); }), "a[1]: a[1] is 1, a string is wanted");
  EXPECT_EQ(refusal([&] { Fields(strings, kRules).strings("a", 1); }), "a: a has 2 items, at most 1 are taken");
}

// A row "| `name` | honoured | note |" for each field of each API, in its section.
TEST(Fields, AreAllInTheDocumentation) {
  const std::string docs = read_file(FOURFOLD_SOURCE_DIR "/docs/serving.md");
  const auto check = [&](const std::string& heading, std::span<const FieldRule> rules) {
    const size_t begin = docs.find("### " + heading + "\n");
    ASSERT_NE(begin, std::string::npos) << heading;
    const std::string section = docs.substr(begin, docs.find("\n#", begin + 4) - begin);
    size_t rows = 0;
    for (size_t at = section.find("\n| `"); at != std::string::npos; at = section.find("\n| `", at + 1)) ++rows;
    EXPECT_EQ(rows, rules.size()) << heading;
    for (const FieldRule& rule : rules) {
      const char* treatment = rule.treatment == Treatment::kHonoured  ? "honoured"
                              : rule.treatment == Treatment::kIgnored ? "ignored"
                                                                      : "refused";
      const std::string row = fmt::format("| `{}` | {} | {} |\n", rule.name, treatment, rule.note);
      EXPECT_NE(section.find(row), std::string::npos) << heading << " lacks " << row;
    }
  };
  check("/v1/chat/completions", chat_fields());
  check("/v1/completions", completion_fields());
  check("/v1/responses", responses_fields());
  check("/v1/messages", messages_fields());
}

}  // namespace
}  // namespace fourfold::serve
