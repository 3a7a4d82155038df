#include "structure/tool_calls.h"

#include <gtest/gtest.h>

#include "matching.h"
#include "text/output_parser.h"

namespace fourfold::structure {
namespace {

const Json& tools() {
  static const Json out = Json::parse(R"([
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {
       "path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "string"}},
       "mode": {"enum": ["a", "w"]}, "owner": {"$ref": "#/$defs/owner"}, "limit": {"anyOf": [{"type": "integer", "minimum": 1,
       "maximum": 9}, {"type": "null"}]}}, "required": ["path", "owner"], "$defs": {"owner": {"type": "object", "properties":
       {"id": {"type": "integer"}}, "required": ["id"]}}}}},
    {"type": "function", "function": {"name": "list"}}])");
  return out;
}

std::string write_call(const std::string& path, const std::string& rest = "") {
  return "<tool_call>\n<function=write>\n<parameter=path>\n" + path +
         "\n</parameter>\n<parameter=owner>\n{\"id\": 7}\n</parameter>\n" + rest + "</function>\n</tool_call>";
}

TEST(ToolCalls, HaveTheFormOfTheModel) {
  SKIP_WITHOUT_COMPILER();
  const std::string grammar = call_grammar(tools(), {});
  EXPECT_EQ(fit(grammar, write_call("a/b.txt")), Fit::kWhole);
  EXPECT_EQ(fit(grammar, "<tool_call>\n<function=list>\n</function>\n</tool_call>\n" + write_call("x")), Fit::kWhole);
  // No other name, no missing parameter, no other value, no text.
  EXPECT_EQ(fit(grammar, "<tool_call>\n<function=writ>"), Fit::kNo);
  EXPECT_EQ(fit(grammar, "<tool_call>\n<function=write>\n</function>"), Fit::kNo);
  EXPECT_EQ(fit(grammar, "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n<parameter=mode>\nr"),
            Fit::kNo);
  EXPECT_EQ(fit(grammar, "Hello"), Fit::kNo);
  EXPECT_EQ(fit(grammar, "\n"), Fit::kNo);

  ToolCallOptions named;
  named.name = "list";
  named.parallel = false;
  named.after_reasoning = true;
  const std::string one = call_grammar(tools(), named);
  EXPECT_EQ(fit(one, "\n\n<tool_call>\n<function=list>\n</function>\n</tool_call>"), Fit::kWhole);
  EXPECT_EQ(fit(one, "<tool_call>\n<function=write>"), Fit::kNo);
  EXPECT_EQ(fit(one, "<tool_call>\n<function=list>\n</function>\n</tool_call>\n"), Fit::kNo);
}

// What the grammar lets through as a value is what the reader of calls makes of it.
TEST(ToolCalls, ValuesHoldTagsAndAreReadBack) {
  SKIP_WITHOUT_COMPILER();
  const std::string grammar = call_grammar(tools(), {});
  for (const std::string& path :
       {std::string(""), std::string("a\nb\n\nc"), std::string("</parameter>"), std::string("x\n</parameter>\ny"),
        std::string("< parameter=path> <function=f> <tool_call>"), std::string("null"), std::string("{\"a\": 1}"),
        std::string("é😀")}) {
    const std::string text = write_call(path, "<parameter=limit>\nnull\n</parameter>\n");
    ASSERT_EQ(fit(grammar, text), Fit::kWhole) << path;
    text::OutputParserOptions options;
    options.tools = readable_tools(tools());
    const text::ParsedOutput parsed = text::parse_output(text, options);
    ASSERT_EQ(parsed.calls.size(), 1u) << path;
    EXPECT_TRUE(parsed.calls[0].complete);
    const Json wanted = {{"path", path}, {"owner", {{"id", 7}}}, {"limit", nullptr}};
    EXPECT_EQ(Json::parse(parsed.calls[0].arguments), wanted);
  }
  for (const char* path : {"a</function>", "a</tool_call>", "<parameter=b>"}) {
    EXPECT_EQ(fit(grammar, write_call(path)), Fit::kNo) << path;
  }
  // No tag in a value that is JSON.
  EXPECT_EQ(fit(grammar, "<tool_call>\n<function=write>\n<parameter=path>\n\n</parameter>\n<parameter=lines>\n[\"<"),
            Fit::kNo);
}

TEST(ToolCalls, MayStandInTextOrBesideJson) {
  SKIP_WITHOUT_COMPILER();
  const std::string call = "<tool_call>\n<function=list>\n</function>\n</tool_call>";
  const std::string text = text_with_calls_grammar(tools(), {});
  EXPECT_EQ(fit(text, "Hello, 1 < 2."), Fit::kWhole);
  EXPECT_EQ(fit(text, "I look. " + call), Fit::kWhole);
  EXPECT_EQ(fit(text, call + "\n" + call + " done"), Fit::kWhole);
  EXPECT_EQ(fit(text, "<tool_call>\n<function=nothing"), Fit::kNo);
  EXPECT_EQ(fit(text, "<tool_call>\n<function=list>\n"), Fit::kPart);

  const Json schema = Json::parse(R"({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})");
  const std::string either = json_or_call_grammar(schema, tools(), {});
  EXPECT_EQ(fit(either, call), Fit::kWhole);
  EXPECT_EQ(fit(either, R"({"a": "\u003cb>"})"), Fit::kWhole);
  EXPECT_EQ(fit(either, R"({"a": "<)"), Fit::kNo);
}

TEST(ToolCalls, RefuseByPlace) {
  const auto with = [](const char* parameters) {
    Json out = tools();
    out[1]["function"]["parameters"] = Json::parse(parameters);
    return rejection([&] { call_grammar(out, {}); });
  };
  EXPECT_EQ(with(R"({"type": "object"})"), "taken");
  EXPECT_NE(with(R"({"type": "array"})").find("[1].function.parameters.type: "), std::string::npos);
  EXPECT_NE(with(R"({"properties": {"a": {"not": {}}}})").find("[1].function.parameters.properties.a.not: "),
            std::string::npos);
  EXPECT_NE(with(R"({"properties": {"a b": {}}})").find(".properties.a b: is a b"), std::string::npos);
  EXPECT_NE(with(R"({"required": ["a"]})").find(".required: names \"a\""), std::string::npos);
  Json named = tools();
  named[0]["function"]["name"] = "a>b";
  EXPECT_NE(rejection([&] { call_grammar(named, {}); }).find("[0].function.name: "), std::string::npos);
}

}  // namespace
}  // namespace fourfold::structure
