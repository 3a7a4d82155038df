// Chat templates on what the recorded cases do not hold: limits, broken templates, where templates come from.
#include "text/chat_template.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/file.h"
#include "base/json.h"
#include "base/temporary_directory.h"

namespace fourfold::text {
namespace {

ChatRequest simple() {
  ChatRequest request;
  request.messages = parse_json(R"([{"role": "user", "content": "hi"}])", "messages");
  return request;
}

std::string render(std::string_view source) { return ChatTemplate::from_source(source, "t").render(simple()); }

std::string error_of(std::string_view source, const jinja::Limits& limits = {}) {
  try {
    ChatTemplate::from_source(source, "t").render(simple(), limits);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(ChatTemplate, ErrorsNameTheLine) {
  EXPECT_EQ(error_of("a\n{{ x.y }}"), "t: line 2: 'x' is undefined");
  EXPECT_EQ(error_of("{{ messages[0].z.y }}"), "t: line 1: 'dict object' has no attribute 'z'");
  EXPECT_EQ(error_of("\n\n{% if x %}"), "t: line 3: found the end of the template, '{% endif %}' is wanted");
  EXPECT_EQ(error_of("{{ 1 + }}"), "t: line 1: found '}}', an expression is wanted");
  EXPECT_EQ(error_of("{% include 'x' %}"),
            "t: line 1: the tag 'include' is not known or not supported in a chat template");
  EXPECT_EQ(error_of("{{ 1 | nothing }}"), "t: line 1: there is no filter 'nothing', or none that is supported here");
  EXPECT_EQ(error_of("{{ 1 + 'a' }}"), "t: line 1: unsupported operand type(s) for +: 'int' and 'str'");
  EXPECT_EQ(error_of("{{ raise_exception('No!') }}"), "t: line 1: the template refuses the conversation: No!");
  EXPECT_HAS(error_of("{{ 'abc }}"), "a string without its closing quote");
  EXPECT_HAS(error_of("{# never closed"), "a comment '{#' without '#}'");
  EXPECT_HAS(error_of("{{ messages.append(1) }}"), "'append' would change a list");
  EXPECT_HAS(error_of("{{ ''.__class__.__mro__ }}"), "has no attribute '__class__'");
  EXPECT_HAS(error_of("{% set ns = namespace(_a=1) %}"), "cannot have the attribute '_a'");
  EXPECT_HAS(error_of("{{ 9223372036854775807 + 1 }}"), "beyond 64 bits");
  EXPECT_HAS(error_of("\xff"), "not valid UTF-8");
  try {
    render("{{ raise_exception('No!') }}");
    FAIL();
  } catch (const TemplateError& error) {
    EXPECT_TRUE(error.raised());
  }
}

TEST(ChatTemplate, LimitsEndEverything) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_HAS(error_of("{{ 'x' * 10 ** 9 }}"), "bytes");
  EXPECT_HAS(error_of("{{ [0] * 10 ** 18 }}"), "bytes");
  EXPECT_HAS(error_of("{{ range(10 ** 9) }}"), "range of more than 100000");
  EXPECT_HAS(error_of("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
                      "{% endfor %}{% endfor %}"),
             "steps");
  EXPECT_HAS(error_of("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "recurses deeper");
  EXPECT_HAS(error_of("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"), "recurses deeper");
  EXPECT_HAS(error_of("{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}"),
             "nested deeper");
  EXPECT_HAS(
      error_of("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"),
      "bytes");
  EXPECT_HAS(error_of("{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
                      "{{ ns.x }}"),
             "steps");
  EXPECT_HAS(error_of("{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}"
                      "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"),
             "steps");
  EXPECT_HAS(error_of("{{ '%99999999d' % 1 }}"), "format width");
  EXPECT_HAS(error_of("{{ '{:999999999}'.format(1) }}"), "format width");
  EXPECT_HAS(error_of("{{ 'x'.ljust(10 ** 12) }}"), "bytes");
  EXPECT_HAS(error_of("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}"), "bytes");
  EXPECT_HAS(error_of("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}"), "too many open brackets");
  EXPECT_HAS(error_of("{{ " + std::string(900, '[') + "1" + std::string(900, ']') + " }}"), "nested deeper");
  std::string chain = "{{ 1";
  for (int i = 0; i < 5000; ++i) chain += " + 1";
  EXPECT_HAS(error_of(chain + " }}"), "levels");
  std::string blocks;
  for (int i = 0; i < 5000; ++i) blocks += "{% if 1 %}";
  EXPECT_HAS(error_of(blocks), "nested deeper");
  jinja::Limits limits;
  limits.max_output = 10;
  EXPECT_HAS(error_of("12345678901", limits), "writes more than 10 bytes");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

TEST(ChatTemplate, NothingLeaksThroughCycles) {
  EXPECT_EQ(render("{% set ns = namespace() %}{% set ns.self = ns %}{% macro m() %}{{ m }}{% endmacro %}x"), "x");
  EXPECT_EQ(render("{% set ns = namespace() %}{% for x in [1] recursive %}{% set ns.l = loop %}{% endfor %}x"), "x");
}

TEST(ChatTemplate, GroupsHaveNamedMembers) {
  const std::string items = "[{'k': 'b', 'v': 1}, {'k': 'a', 'v': 2}, {'k': 'b', 'v': 3}] | groupby('k')";
  EXPECT_EQ(
      render("{% for g in " + items + " %}{{ g.grouper }}={{ g.list | map(attribute='v') | join('+') }};{% endfor %}"),
      "a=2;b=1+3;");
  EXPECT_EQ(render("{% for key, list in " + items + " %}{{ key }}{{ list | length }}{% endfor %}"), "a1b2");
  EXPECT_EQ(render("{{ " + items + " | map(attribute='list') | map('length') | list }}"), "[1, 2]");
  EXPECT_EQ(render("{{ (" + items + ")[0] }}"), "('a', [{'k': 'a', 'v': 2}])");
}

TEST(ChatTemplate, RequestsAreChecked) {
  const ChatTemplate chat = ChatTemplate::from_source("{{ messages }}{{ tools }}", "t");
  const auto failing = [&](const char* json) {
    try {
      chat.render(ChatRequest::from_json(parse_json(json, "c.json"), "c.json"));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(failing("{}"), "c.json: 'messages' is missing");
  EXPECT_EQ(failing("7"), "c.json: integer at the top, an object with 'messages' or an array of messages is wanted");
  EXPECT_EQ(failing("[]"), "'messages' is empty, at least one message is wanted");
  EXPECT_EQ(failing("[3]"), "'messages[0]' is integer, an object is wanted");
  EXPECT_EQ(failing(R"({"messages": [{}], "tools": [1]})"), "'tools[0]' is integer, an object is wanted");
  EXPECT_EQ(failing(R"({"messages": [{}], "add_generation_prompt": 1})"),
            "c.json: 'add_generation_prompt' is integer, true or false is wanted");
  EXPECT_EQ(failing(R"([{"role": "user"}])"), "");
}

TEST(ChatTemplate, ArgumentsGivenAsText) {
  const ChatTemplate chat = ChatTemplate::from_source("{{ messages[0].tool_calls[0].function.arguments }}", "t");
  ChatRequest request;
  const auto with = [&](const char* arguments) {
    request.messages = Json::array();
    Json message = Json::object(), call = Json::object(), function = Json::object();
    function["arguments"] = arguments;
    call["function"] = function;
    message["tool_calls"] = Json::array({call});
    request.messages.push_back(message);
    return chat.render(request);
  };
  EXPECT_EQ(with(R"({"a": 1})"), R"({"a": 1})");
  request.parse_arguments = true;
  EXPECT_EQ(with(R"({"a": 1})"), "{'a': 1}");
  EXPECT_EQ(with("{broken"), "{}");
  EXPECT_EQ(with("[1]"), "{}");
}

TEST(ChatTemplate, Directories) {
  namespace fs = std::filesystem;
  const TemporaryDirectory dir;
  const auto write = [&](const char* name, std::string_view text) { write_file_atomically(dir / name, text); };
  const auto rendered = [&](const ChatRequest& request = simple()) {
    return ChatTemplate::from_directory(dir.path()).render(request);
  };
  EXPECT_THROW(rendered(), Error);
  write("tokenizer_config.json", R"({"bos_token": {"content": "<b>"}, "eos_token": null, "chat_template": [
    {"name": "default", "template": "{{ bos_token }}D"}, {"name": "tool_use", "template": "T"}],
    "model_max_length": 1000000000000000019884624838656})");
  EXPECT_EQ(rendered(), "<b>D");
  ChatRequest with_tools = simple();
  with_tools.tools = Json::array({Json::object()});
  EXPECT_EQ(rendered(with_tools), "T");
  write("special_tokens_map.json", R"({"bos_token": "other", "eos_token": "<e>"})");
  write("chat_template.jinja", "{{ bos_token }}{{ eos_token }}J\n");
  EXPECT_EQ(rendered(), "<b><e>J");
  EXPECT_EQ(rendered(with_tools), "<b><e>J");
  ChatRequest other = simple();
  other.variables["bos_token"] = "X";
  EXPECT_EQ(rendered(other), "X<e>J");
}

TEST(ChatTemplate, TheClockCanBeSet) {
  const std::string out =
      ChatTemplate::from_source("{{ strftime_now('%Y') }}", "t").render(simple(), {}, std::time_t{86400 * 366});
  EXPECT_EQ(out, "1971");
}

}  // namespace
}  // namespace fourfold::text
