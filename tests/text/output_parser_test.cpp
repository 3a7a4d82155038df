#include "text/output_parser.h"

#include <gtest/gtest.h>

#include <random>

#include "base/check.h"

namespace fourfold::text {
namespace {

using Reasoning = OutputParserOptions::Reasoning;
using Kind = OutputEvent::Kind;

Json tools() {
  return parse_json(R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "s": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"},
    "o": {"type": "object"}, "l": {"type": "array"}, "ns": {"type": ["string", "null"]},
    "an": {"anyOf": [{"type": "null"}, {"type": "integer"}]}, "e": {"enum": ["a"]}, "v": {"type": "any"}}}}},
    {"type": "function", "function": {"name": "g"}}])",
                    "tools");
}

OutputParserOptions options(Reasoning reasoning, bool with_tools = true) {
  OutputParserOptions out;
  out.reasoning = reasoning;
  if (with_tools) out.tools = tools();
  out.make_id = [] { return std::string("call_0"); };
  return out;
}

// Everything in one line: R[...] C[...] name(arguments), "!" where a call was cut off.
std::string show(const ParsedOutput& out) {
  std::string text;
  if (!out.reasoning.empty()) text += "R[" + out.reasoning + "]";
  if (!out.content.empty()) text += "C[" + out.content + "]";
  for (const auto& call : out.calls) text += call.name + "(" + call.arguments + ")" + (call.complete ? "" : "!");
  return text;
}

std::string parsed(std::string_view text, Reasoning reasoning = Reasoning::kNone, bool with_tools = true) {
  return show(parse_output(text, options(reasoning, with_tools)));
}

TEST(OutputParser, Reasoning) {
  EXPECT_EQ(parsed("why\n</think>\n\nanswer", Reasoning::kInside), "R[why\n]C[\n\nanswer]");
  EXPECT_EQ(parsed("<think>\nwhy</think>a", Reasoning::kInside), "R[\nwhy]C[a]");
  EXPECT_EQ(parsed("never closed", Reasoning::kInside), "R[never closed]");
  EXPECT_EQ(parsed("a</think>b</think>c", Reasoning::kInside), "R[a]C[b</think>c]");
  EXPECT_EQ(parsed("text </think> more", Reasoning::kNone), "C[text </think> more]");
  EXPECT_EQ(parsed("  <think>why</think>a", Reasoning::kMaybe), "R[why]C[a]");
  EXPECT_EQ(parsed("no <think>why</think>a", Reasoning::kMaybe), "C[no <think>why</think>a]");
}

TEST(OutputParser, ToolCallEndsReasoning) {
  EXPECT_EQ(
      parsed("so <tool_call> is a tag, and <tool_call>\n<function=g>\n</function>\n</tool_call>", Reasoning::kInside),
      "R[so <tool_call> is a tag, and ]g({})");
  EXPECT_EQ(parsed("a <tool_call>\n<function=g>", Reasoning::kInside, false), "R[a ]C[<tool_call>\n<function=g>]");
  EXPECT_EQ(parsed("a <tool_call>", Reasoning::kInside), "R[a <tool_call>]");
}

TEST(OutputParser, ToolCalls) {
  EXPECT_EQ(parsed("Let me see.\n\n<tool_call>\n<function=f>\n<parameter=s>\nRome\n</parameter>\n<parameter=n>\n3\n"
                   "</parameter>\n</function>\n</tool_call>"),
            "C[Let me see.\n\n]f({\"s\": \"Rome\", \"n\": 3})");
  EXPECT_EQ(
      parsed("<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=b>\nTRUE\n"
             "</parameter>\n</function>\n</tool_call>\n"),
      "g({})f({\"b\": true})");
  EXPECT_EQ(parsed("no calls < here <tool_call> nothing"), "C[no calls < here <tool_call> nothing]");
  EXPECT_EQ(parsed("<tool_call>\n<function=bad name>\n</function>"),
            "C[<tool_call>\n<function=bad name>\n</function>]");
  EXPECT_EQ(parsed("<function=g></function>"), "g({})");
  EXPECT_EQ(parsed("<tool_call><function=g></function></tool_call>", Reasoning::kNone, false),
            "C[<tool_call><function=g></function></tool_call>]");
  // Exactly one newline goes on either side.
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\n\n two \n\n</parameter>\n</function>\n</tool_call>"),
            "f({\"s\": \"\\n two \\n\"})");
}

TEST(OutputParser, ValuesMayHoldTags) {
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\nsay </parameter> or </function> or </tool_call> here\n"
                   "</parameter>\n</function>\n</tool_call>"),
            "f({\"s\": \"say </parameter> or </function> or </tool_call> here\"})");
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\n</parameter>\n</function>\n</tool_call>x\n</parameter>\n"
                   "</function>\n</tool_call>"),
            "f({\"s\": \"</parameter>\\n</function>\\n</tool_call>x\"})");
}

TEST(OutputParser, MissingTags) {
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=n>\n2\n</function>\n</tool_call>"),
            "f({\"s\": \"a\", \"n\": 2})");
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n<tool_call>\n<function=g>\n"
                   "</function>"),
            "f({\"s\": \"a\"})g({})");
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\ncut of"), "f({\"s\": \"cut of\"})!");
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s"), "f({})!");
  EXPECT_EQ(parsed("<tool_call>\n<function=f>"), "f({})!");
  // Text behind the calls: the first closing tag is taken after all.
  EXPECT_EQ(parsed("<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>\nDone."),
            "C[\nDone.]f({\"s\": \"a\"})");
}

TEST(OutputParser, TypesBehindReferencesAndCombinations) {
  const auto read = [](const char* parameters, const std::string& text) {
    OutputParserOptions out;
    out.tools = Json::array(
        {{{"type", "function"}, {"function", {{"name", "f"}, {"parameters", parse_json(parameters, "parameters")}}}}});
    const ParsedOutput parsed = parse_output(
        "<tool_call>\n<function=f>\n<parameter=p>\n" + text + "\n</parameter>\n</function>\n</tool_call>", out);
    return parsed.calls.empty() ? "none" : parsed.calls[0].arguments;
  };
  const char* const references =
      R"({"$defs": {"n": {"type": "integer"}, "a/b": {"$ref": "#/$defs/n"}, "list": [{"type": "array"}],
      "round": {"$ref": "#/$defs/round"}, "maybe": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "type": "object",
      "properties": {"p": {"$ref": "REF"}}})";
  const auto referred = [&](const std::string& reference, const std::string& text) {
    std::string parameters = references;
    return read(parameters.replace(parameters.find("REF"), 3, reference).c_str(), text);
  };
  EXPECT_EQ(referred("#/$defs/n", "5"), R"({"p": 5})");
  EXPECT_EQ(referred("#/$defs/a~1b", "5"), R"({"p": 5})");
  EXPECT_EQ(referred("#/%24defs/n", "5"), R"({"p": 5})");
  EXPECT_EQ(referred("#/$defs/list/0", "[1]"), R"({"p": [1]})");
  EXPECT_EQ(referred("#/$defs/maybe", "null"), R"({"p": null})");
  EXPECT_EQ(referred("#/$defs/maybe", "6"), R"({"p": 6})");
  EXPECT_EQ(referred("#", "{\"p\": {}}"), R"({"p": {"p": {}}})");
  // What leads nowhere is a string.
  for (const char* reference :
       {"#/$defs/none", "#/$defs/round", "#/$defs/list/1", "#/$defs/list/x", "#n", "http://x/y", "#/%2"}) {
    EXPECT_EQ(referred(reference, "5"), R"({"p": "5"})") << reference;
  }

  const auto one = [&](const std::string& schema, const std::string& text) {
    return read((R"({"type": "object", "properties": {"p": )" + schema + "}}").c_str(), text);
  };
  for (const char* name : {"allOf", "anyOf", "oneOf"}) {
    EXPECT_EQ(one(std::string(R"({")") + name + R"(": [{"type": "integer"}]})", "5"), R"({"p": 5})") << name;
    EXPECT_EQ(one(std::string(R"({")") + name + R"(": [{"anyOf": [{"type": "object"}, {"type": "null"}]}]})", "{}"),
              R"({"p": {}})")
        << name;
  }
  EXPECT_EQ(one(R"({"type": ["integer", "null"]})", "5"), R"({"p": 5})");
  EXPECT_EQ(one(R"({"type": ["null", "integer"]})", "null"), R"({"p": null})");
  EXPECT_EQ(one(R"({"type": "string", "nullable": true})", "null"), R"({"p": null})");
  EXPECT_EQ(one(R"({"description": "nothing of a type"})", "5"), R"({"p": "5"})");
  // The properties themselves behind a reference, or in parts.
  EXPECT_EQ(read(R"({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"p": {"type": "integer"}}}}})", "5"),
            R"({"p": 5})");
  EXPECT_EQ(read(R"({"allOf": [{"properties": {"q": {}}}, {"properties": {"p": {"type": "integer"}}}]})", "5"),
            R"({"p": 5})");
}

TEST(OutputParser, Conversion) {
  const Json all = tools()[0]["function"]["parameters"]["properties"];
  const auto converted = [&](const char* key, const char* text) { return convert_parameter(text, &all[key]); };
  EXPECT_EQ(convert_parameter("5", nullptr), "\"5\"");
  EXPECT_EQ(converted("s", "null"), "\"null\"");
  EXPECT_EQ(converted("s", "é\"\n"), "\"é\\\"\\n\"");
  EXPECT_EQ(converted("ns", "None"), "null");
  EXPECT_EQ(converted("ns", "x"), "\"x\"");
  EXPECT_EQ(converted("an", "NULL"), "null");
  EXPECT_EQ(converted("an", " 12 "), "12");
  EXPECT_EQ(converted("n", "null"), "null");
  EXPECT_EQ(converted("n", "-007"), "-7");
  EXPECT_EQ(converted("n", "123456789012345678901234567890"), "123456789012345678901234567890");
  EXPECT_EQ(converted("n", "1.5"), "\"1.5\"");
  EXPECT_EQ(converted("n", "abc"), "\"abc\"");
  EXPECT_EQ(converted("x", "3.0"), "3");
  EXPECT_EQ(converted("x", "1e3"), "1000");
  EXPECT_EQ(converted("x", "0.1"), "0.1");
  EXPECT_EQ(converted("x", "nan"), "\"nan\"");
  EXPECT_EQ(converted("b", "True"), "true");
  EXPECT_EQ(converted("b", "yes"), "false");
  EXPECT_EQ(converted("o", "{\"a\": [1, 2.0, null]}"), "{\"a\": [1, 2.0, null]}");
  EXPECT_EQ(converted("o", "{'a': (1, True), 'b': None}"), "{\"a\": [1, true], \"b\": null}");
  EXPECT_EQ(converted("o", "{broken"), "\"{broken\"");
  EXPECT_EQ(converted("l", "[1,2]"), "[1, 2]");
  EXPECT_EQ(converted("l", "['it\\'s']"), "[\"it's\"]");
  EXPECT_EQ(converted("l", std::string(5000, '[').c_str()), "\"" + std::string(5000, '[') + "\"");
  EXPECT_EQ(converted("e", "a"), "\"a\"");
  EXPECT_EQ(converted("v", "7"), "7");
  EXPECT_EQ(converted("v", "free text"), "\"free text\"");
}

TEST(OutputParser, HoldsBackOnlyWhatMayBeATag) {
  OutputParser parser(options(Reasoning::kInside));
  const auto texts = [](const std::vector<OutputEvent>& events) {
    std::string out;
    for (const OutputEvent& event : events) out += event.text;
    return out;
  };
  EXPECT_EQ(texts(parser.push("abc")), "abc");
  EXPECT_EQ(texts(parser.push("d</th")), "d");
  EXPECT_EQ(texts(parser.push("x")), "</thx");
  EXPECT_EQ(texts(parser.push("\xF0\x9F")), "");
  EXPECT_EQ(texts(parser.push("\x98\x80</think>hi<tool_ca")), "\xF0\x9F\x98\x80hi");
  EXPECT_EQ(texts(parser.finish()), "<tool_ca");
}

// Any cut of a text gives the same result, the fragments of a call are its arguments, and those are JSON.
TEST(OutputParser, AnyCutGivesTheSame) {
  static const char* const kParts[] = {"<think>",
                                       "</think>",
                                       "<tool_call>",
                                       "</tool_call>",
                                       "<function=f>",
                                       "<function=g>",
                                       "</function>",
                                       "<parameter=s>",
                                       "<parameter=n>",
                                       "<parameter=o>",
                                       "</parameter>",
                                       "\n",
                                       "\n",
                                       " ",
                                       "text",
                                       "12",
                                       "{\"a\": 1}",
                                       "<",
                                       "</",
                                       "<function=",
                                       "<function=b d>",
                                       "<parameter=",
                                       "\xC3\xA9",
                                       "\xF0\x9F\x98\x80",
                                       "<tool_call>\n<function=f>\n<parameter=s>\n",
                                       "\n</parameter>\n</function>\n</tool_call>",
                                       "<parameter=zz>",
                                       "null"};
  std::mt19937 random(11);
  size_t with_calls = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    const size_t parts = random() % 16;
    for (size_t i = 0; i < parts; ++i) text += kParts[random() % std::size(kParts)];
    const auto mode = static_cast<Reasoning>(random() % 3);
    const ParsedOutput whole = parse_output(text, options(mode));
    with_calls += !whole.calls.empty();
    OutputParser parser(options(mode));
    ParsedOutput pieces;
    const auto take = [&](const std::vector<OutputEvent>& events) {
      for (const OutputEvent& event : events) {
        switch (event.kind) {
          case Kind::kReasoning:
            pieces.reasoning += event.text;
            break;
          case Kind::kContent:
            pieces.content += event.text;
            break;
          case Kind::kToolCallBegin:
            ASSERT_EQ(event.index, pieces.calls.size());
            pieces.calls.push_back({event.id, event.name, "", true});
            break;
          case Kind::kToolCallArguments:
            pieces.calls.at(event.index).arguments += event.text;
            break;
          case Kind::kToolCallEnd:
            pieces.calls.at(event.index).complete = event.complete;
            break;
        }
      }
    };
    for (size_t i = 0; i < text.size();) {
      const size_t n = 1 + random() % (1 + random() % 9);
      take(parser.push(std::string_view(text).substr(i, n)));
      i += n;
    }
    take(parser.finish());
    ASSERT_EQ(show(pieces), show(whole)) << text;
    EXPECT_EQ(parser.tool_call_count(), whole.calls.size());
    for (const auto& call : whole.calls) {
      ASSERT_TRUE(parse_json(call.arguments, "arguments").is_object()) << call.arguments;
    }
  }
  EXPECT_GT(with_calls, 2000u);
}

}  // namespace
}  // namespace fourfold::text
