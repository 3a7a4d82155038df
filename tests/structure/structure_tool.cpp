// structure_tool texts COUNT [SEED]: reads JSON schemas, one a line, and writes for each a line with an array of texts
// of its grammar, drawn at random; or {"rejected": ..., "place": ...}. structure_tool times [TOKENS]: what compiling
// and masks cost for a vocabulary of that size.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "byte_vocabulary.h"
#include "structure/json_schema.h"
#include "structure/tool_calls.h"

namespace fourfold::structure {
namespace {

std::vector<int32_t> allowed(const std::vector<uint32_t>& bits, int64_t size) {
  std::vector<int32_t> out;
  for (int32_t token = 0; token < size; ++token) {
    if (bits[static_cast<size_t>(token) / 32] >> (token % 32) & 1) out.push_back(token);
  }
  return out;
}

// A text whose next byte is any that may come, the end soon where it may be; or nothing when it gets too long.
std::string draw(const Grammar& grammar, const Vocabulary& vocabulary, Random& random) {
  const auto matcher = grammar.matcher({kStop});
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    std::vector<uint32_t> bits(static_cast<size_t>((vocabulary.size + 31) / 32), 0);
    if (!matcher->mask(bits)) std::fill(bits.begin(), bits.end(), ~uint32_t{0});
    std::vector<int32_t> tokens = allowed(bits, vocabulary.size);
    if (tokens.empty()) fail("a dead end behind {}", text);
    if (tokens.front() == kStop && (tokens.size() == 1 || random.below(3) == 0)) return text;
    // What closes is drawn more often than by chance, and more the longer it takes.
    std::vector<int32_t> closing;
    for (const int32_t token : tokens) {
      if (token != kStop &&
          std::string_view("\"]},0").find(vocabulary.tokens[static_cast<size_t>(token)]) != std::string_view::npos) {
        closing.push_back(token);
      }
    }
    if (tokens.front() == kStop) tokens.erase(tokens.begin());
    const std::vector<int32_t>& from =
        !closing.empty() && random.below(1000) < static_cast<uint64_t>(200 + i) ? closing : tokens;
    const int32_t token = from[random.below(from.size())];
    if (!matcher->accept(token)) fail("token {} was let through and is refused", token);
    text += vocabulary.tokens[static_cast<size_t>(token)];
  }
  return "";
}

void texts(int64_t count, uint64_t seed) {
  const Vocabulary vocabulary = byte_vocabulary();
  const auto compiler = make_compiler(vocabulary);
  std::string line;
  Random random(seed);
  while (std::getline(std::cin, line)) {
    Json out = Json::array();
    try {
      const auto grammar = compiler->compile(json_schema_grammar(parse_json(line, "the schema"), false));
      for (int64_t i = 0; i < count; ++i) {
        std::string text = draw(*grammar, vocabulary, random);
        if (!text.empty()) out.push_back(std::move(text));
      }
    } catch (const Rejected& rejected) {
      out = {{"rejected", rejected.what()}, {"place", rejected.place}};
    }
    std::cout << out.dump(-1, ' ', true) << "\n";
  }
}

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void times(int64_t tokens) {
  const Vocabulary vocabulary = large_vocabulary(tokens);
  Clock::time_point begin = Clock::now();
  const auto compiler = make_compiler(vocabulary);
  std::printf("%lld tokens: compiler made in %.0f ms\n", static_cast<long long>(tokens), 1e3 * since(begin));
  const auto measure = [&](const char* name, const std::string& text, const std::string& answer) {
    begin = Clock::now();
    const auto grammar = compiler->compile(text);
    const double compiling = since(begin);
    const auto matcher = grammar->matcher({kStop});
    std::vector<double> masks, accepts;
    std::vector<uint32_t> bits(static_cast<size_t>((vocabulary.size + 31) / 32), 0);
    for (int round = 0; round < 3; ++round) {
      const auto fresh = grammar->matcher({kStop});
      for (const char byte : answer) {
        begin = Clock::now();
        fresh->mask(bits);
        masks.push_back(since(begin));
        begin = Clock::now();
        if (!fresh->accept(1 + static_cast<unsigned char>(byte)))
          fail("{}: the answer does not fit at '{}'", name, byte);
        accepts.push_back(since(begin));
      }
    }
    std::sort(masks.begin(), masks.end());
    std::sort(accepts.begin(), accepts.end());
    const auto at = [](const std::vector<double>& sorted, double part) {
      return 1e6 * sorted[static_cast<size_t>(part * static_cast<double>(sorted.size() - 1))];
    };
    std::printf(
        "%-14s compile %7.0f ms %7.1f MB  mask us p50 %7.1f p99 %7.1f max %7.1f  accept us p50 %5.1f p99 %6.1f\n", name,
        1e3 * compiling, static_cast<double>(grammar->bytes()) / 1e6, at(masks, 0.5), at(masks, 0.99), at(masks, 1),
        at(accepts, 0.5), at(accepts, 0.99));
    std::fflush(stdout);
  };
  measure("json_object", json_object_grammar(false),
          R"({"name": "some text \u00e9 here", "list": [1, 2.5, true, {"a": null}]})");
  const Json person = parse_json(
      R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0,
      "maximum": 150}, "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 5}, "kind": {"enum":
      ["a", "b", "c"]}}, "required": ["name", "age"], "additionalProperties": false})",
      "schema");
  measure("person", json_schema_grammar(person, false),
          R"({"name": "Ada Lovelace", "age": 36, "tags": ["one", "two"], "kind": "b"})");
  Json wide = {{"type", "object"}, {"properties", Json::object()}, {"additionalProperties", true}};
  std::string answer = "{";
  for (int i = 0; i < 200; ++i) {
    wide["properties"][fmt::format("property{}", i)] = {{"type", "string"}};
    if (i < 20) answer += fmt::format("{}\"property{}\": \"x\"", i > 0 ? ", " : "", i);
  }
  measure("200 optional", json_schema_grammar(wide, false), answer + "}");
  const Json bounded = {{"type", "string"}, {"maxLength", 10'000}};
  measure("10,000 chars", json_schema_grammar(bounded, false), "\"" + std::string(1000, 'x') + "\"");
  measure("up to 200", json_schema_grammar(Json{{"type", "string"}, {"maxLength", 200}}, false),
          "\"" + std::string(200, 'x') + "\"");
  measure("64 to 2,000", json_schema_grammar(Json{{"type", "string"}, {"minLength", 64}, {"maxLength", 2'000}}, false),
          "\"" + std::string(100, 'x') + "\"");
  const Json nested = parse_json(
      R"({"type": "array", "items": {"type": "array", "items": {"type": "string", "minLength": 10, "maxLength": 2000},
      "maxItems": 1000}, "maxItems": 1000})",
      "schema");
  measure("hostile counts", json_schema_grammar(nested, false), "[[\"" + std::string(200, 'y') + "\"]]");
  const Json tools =
      parse_json(R"([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties":
      {"place": {"type": "string"}, "days": {"type": "integer"}}, "required": ["place"]}}}])",
                 "tools");
  measure("tool call", call_grammar(tools, {}),
          "<tool_call>\n<function=weather>\n<parameter=place>\nBerlin\n</parameter>\n<parameter=days>\n3\n</"
          "parameter>\n</function>\n</tool_call>");
}

}  // namespace
}  // namespace fourfold::structure

int main(int count, char** words) {
  const std::vector<std::string> given(words + 1, words + count);
  try {
    if (given.size() >= 2 && given[0] == "texts") {
      fourfold::structure::texts(std::stoll(given[1]), given.size() > 2 ? std::stoull(given[2]) : 1);
    } else if (!given.empty() && given[0] == "times") {
      fourfold::structure::times(given.size() > 1 ? std::stoll(given[1]) : 248'320);
    } else {
      std::cerr << "structure_tool texts COUNT [SEED] | times [TOKENS]\n";
      return 2;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
  return 0;
}
