// The tokenizer on what the recorded cases do not hold: broken files, very long words, options, byte streams.
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <random>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "text/regex.h"

namespace fourfold::text {
namespace {

const std::filesystem::path kData = std::filesystem::path(FOURFOLD_SOURCE_DIR) / "tests/text/data/tokenizers";

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

Json minimal() {
  return parse_json(R"({"added_tokens": [{"id": 3, "content": "<x>", "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
    "post_processor": null, "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}})",
                    "minimal");
}

std::string load_error(const Json& json) {
  return error_of([&] { Tokenizer::from_json(json.dump(), "t.json"); });
}

TEST(Tokenizer, Minimal) {
  const Tokenizer tokenizer = Tokenizer::from_json(minimal().dump(), "t.json");
  EXPECT_EQ(tokenizer.encode_ids("abba<x>b"), (std::vector<int32_t>{2, 1, 0, 3, 1}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{2, 3, 9, -1, 1}), "ab<x>b");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{2, 3, 1}, true), "abb");
  EXPECT_EQ(tokenizer.size(), 4u);
  EXPECT_TRUE(tokenizer.is_special(3));
  EXPECT_FALSE(tokenizer.is_defined(4));
  EXPECT_EQ(tokenizer.find("<x>"), 3);
  EXPECT_EQ(tokenizer.find("zz"), std::nullopt);
  EXPECT_TRUE(tokenizer.encode("").ids.empty());
}

TEST(Tokenizer, ControlTokensAsPlainText) {
  const Tokenizer tokenizer = Tokenizer::from_file(kData / "qwen3_5.json");
  const std::string text = "<|im_start|>user <think>";
  const int32_t start = *tokenizer.find("<|im_start|>"), think = *tokenizer.find("<think>");
  const auto count = [&](AddedTokens which) {
    EncodeOptions options;
    options.added_tokens = which;
    const auto ids = tokenizer.encode_ids(text, options);
    EXPECT_EQ(tokenizer.decode(ids), text);
    return std::pair(std::count(ids.begin(), ids.end(), start), std::count(ids.begin(), ids.end(), think));
  };
  EXPECT_EQ(count(AddedTokens::kAll), (std::pair<long, long>(1, 1)));
  EXPECT_EQ(count(AddedTokens::kNotSpecial), (std::pair<long, long>(0, 1)));
  EXPECT_EQ(count(AddedTokens::kNone), (std::pair<long, long>(0, 0)));
}

TEST(Tokenizer, OffsetsInBytesAndCharacters) {
  const Tokenizer tokenizer = Tokenizer::from_file(kData / "qwen3_5.json");
  EncodeOptions options;
  options.offsets = true;
  // "e" with a combining accent becomes one composed character of two bytes, aligned to the "e".
  const Encoding encoding = tokenizer.encode("\xC3\xA9 e\xCC\x81<think>\xF0\x9F\x98\x80", options);
  ASSERT_EQ(encoding.byte_offsets.size(), encoding.ids.size());
  ASSERT_EQ(encoding.char_offsets.size(), encoding.ids.size());
  bool seen = false;
  for (size_t i = 0; i < encoding.ids.size(); ++i) {
    if (encoding.ids[i] != *tokenizer.find("<think>")) continue;
    seen = true;
    EXPECT_EQ(encoding.byte_offsets[i], (Span{6, 13}));
    EXPECT_EQ(encoding.char_offsets[i], (Span{4, 11}));
  }
  EXPECT_TRUE(seen);
  EXPECT_EQ(encoding.byte_offsets.back(), (Span{13, 17}));
  EXPECT_EQ(encoding.char_offsets.back(), (Span{11, 12}));
}

// Offsets point into the text as it came, also where it is no UTF-8: each invalid sequence is one U+FFFD to the model.
TEST(Tokenizer, OffsetsOfInvalidUtf8AreThoseOfTheInput) {
  const Tokenizer tokenizer = Tokenizer::from_directory(FOURFOLD_SOURCE_DIR "/models/demo");
  EncodeOptions options;
  options.offsets = true;
  const std::vector<std::string> texts = {"\xff\xfe", "a\xff", "\xffhello \xc3(world) \xe2\x82",
                                          "\xf0\x9f\x91 caf\xc3\xa9 \xc3\xa9\x80", "ok \xed\xa0\x80!"};
  for (const std::string& text : texts) {
    const Encoding encoding = tokenizer.encode(text, options);
    EXPECT_EQ(encoding.ids, tokenizer.encode_ids(to_valid_utf8(text)));
    ASSERT_EQ(encoding.byte_offsets.size(), encoding.ids.size());
    size_t last = 0;
    std::vector<bool> covered(text.size());
    for (const Span& span : encoding.byte_offsets) {
      EXPECT_LE(span.begin, span.end);
      EXPECT_LE(span.end, text.size());
      EXPECT_LE(last, span.begin + 4);  // tokens of one character share its range
      last = span.begin;
      for (size_t i = span.begin; i < span.end; ++i) covered[i] = true;
    }
    EXPECT_EQ(std::count(covered.begin(), covered.end(), false), 0);
  }
  const Encoding two = tokenizer.encode("\xff\xfe", options);
  EXPECT_EQ(two.byte_offsets.front(), (Span{0, 1}));
  EXPECT_EQ(two.byte_offsets.back(), (Span{1, 2}));
  EXPECT_EQ(two.char_offsets.back(), (Span{1, 2}));
}

TEST(Tokenizer, BrokenFilesAreNamed) {
  EXPECT_EQ(load_error(minimal()), "");
  const auto changed = [](const char* pointer, const char* value) {
    Json json = minimal();
    json[Json::json_pointer(pointer)] = parse_json(value, "value");
    return load_error(json);
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(changed("/model/type", "\"Unigram\""), "Unigram"));
  EXPECT_TRUE(has(changed("/normalizer", R"({"type": "Nmt"})"), "'Nmt' is not supported"));
  EXPECT_TRUE(has(changed("/pre_tokenizer", R"({"type": "UnicodeScripts"})"), "'UnicodeScripts' is not supported"));
  EXPECT_TRUE(has(changed("/decoder", R"({"type": "CTC"})"), "'CTC' is not supported"));
  EXPECT_TRUE(has(changed("/post_processor", R"({"type": "BertProcessing"})"), "'BertProcessing' is not supported"));
  EXPECT_TRUE(has(changed("/model/vocab/b", "-1"), "the token 'b' has the id -1"));
  EXPECT_TRUE(has(changed("/model/vocab/b", "99999999999"), "the id 99999999999"));
  EXPECT_TRUE(has(changed("/model/vocab/b", "0"), "share the id 0"));
  EXPECT_TRUE(has(changed("/model/vocab/b", "1.5"), "the id 1.5"));
  EXPECT_TRUE(has(changed("/model/merges/0", R"(["a", "c"])"), "names 'c'"));
  EXPECT_TRUE(has(changed("/model/merges/0", R"(["b", "a"])"), "makes 'ba'"));
  EXPECT_TRUE(has(changed("/model/merges/0", R"("a b c")"), "one space between"));
  EXPECT_TRUE(has(changed("/model/merges/0", "7"), "merge 0 is integer"));
  EXPECT_TRUE(has(changed("/model/dropout", "0.1"), "dropout 0.1"));
  EXPECT_TRUE(has(changed("/model/unk_token", "\"?\""), "unk_token '?'"));
  EXPECT_TRUE(has(changed("/added_tokens/0/id", "\"x\""), "'<x>' has the id \"x\""));
  EXPECT_TRUE(has(changed("/added_tokens/0/content", "\"ab\""), "the vocabulary gives it 2"));
  EXPECT_TRUE(has(changed("/pre_tokenizer", R"({"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "(a"}})"),
                  "does not compile"));
  EXPECT_TRUE(
      has(changed("/pre_tokenizer", R"({"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "[a&&b]"}})"),
          "class intersection"));
  EXPECT_TRUE(has(error_of([] { Tokenizer::from_json("{\"model\"", "t.json"); }), "t.json: not valid JSON"));
  EXPECT_TRUE(has(error_of([] { Tokenizer::from_directory("/nonexistent"); }), "/nonexistent/tokenizer.json"));
}

TEST(Tokenizer, BacktrackingPatternsEnd) {
  Json json = minimal();
  json["pre_tokenizer"] =
      parse_json(R"({"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "(?:(?:a|aa)+)+[bc]"}})", "x");
  const Tokenizer tokenizer = Tokenizer::from_json(json.dump(), "t.json");
  const std::string error = error_of([&] { tokenizer.encode(std::string(5000, 'a')); });
  EXPECT_NE(error.find("t.json: pre_tokenizer: the pattern"), std::string::npos) << error;
}

// A word of a megabyte: seconds if merging were quadratic, by hours.
TEST(Tokenizer, LongWordsAreNotQuadratic) {
  const auto start = std::chrono::steady_clock::now();
  const Tokenizer tokenizer = Tokenizer::from_json(minimal().dump(), "t.json");
  std::string word;
  for (int i = 0; i < 500000; ++i) word += "ab";
  EXPECT_EQ(tokenizer.encode_ids(word).size(), 500000u);
  EXPECT_EQ(tokenizer.encode_ids(std::string(1000000, 'a')).size(), 1000000u);
  const Tokenizer qwen = Tokenizer::from_file(kData / "qwen3_5.json");
  for (const char* unit : {" ", "e", "\n", "\t ", "\xCC\x81", "!", "<|im_start", "<think>", "1"}) {
    std::string text;
    while (text.size() < 1000000) text += unit;
    const std::string back = qwen.decode(qwen.encode_ids(text));
    EXPECT_EQ(back.size(), text.size()) << unit;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

TEST(Tokenizer, RegexTranslation) {
  const auto spans = [](const char* pattern, std::string_view text) {
    std::vector<MatchSpan> out;
    Regex(pattern, "p").find_spans(text, out);
    std::string shown;
    for (const MatchSpan& span : out) shown += fmt::format("{}{}-{}", span.matched ? "+" : "-", span.begin, span.end);
    return shown;
  };
  EXPECT_EQ(spans("\\s", "a\xE1\xA0\x8E "), "-0-4+4-5");  // U+180E is no space
  EXPECT_EQ(spans("\\d{2}+", "12345"), "+0-4-4-5");       // a second quantifier, not possessive
  EXPECT_EQ(spans("\\h+", "xfaG"), "-0-1+1-3-3-4");
  EXPECT_EQ(spans("(?i:'s)", "'S'\xC5\xBF"), "+0-2+2-5");
  EXPECT_EQ(spans("^b$", "a\nb\nc"), "-0-2+2-3-3-5");
  EXPECT_EQ(spans("", "ab"), "+0-0-0-1+1-1-1-2+2-2");
  EXPECT_EQ(spans("x", ""), "-0-0");
}

TEST(Utf8Stream, AnyCutGivesTheWhole) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (int i = 0; i < 12; ++i) {
      static const char* const kParts[] = {
          "a",    "\xC3\xA9",     "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xF0\x9F",        "\xE2\x82",
          "\x80", "\xED\xA0\x80", "\xFF",         "\xC0\xAF",         "\xF4\x90\x80\x80"};
      bytes += kParts[random() % std::size(kParts)];
    }
    Utf8Stream stream;
    std::string out;
    for (size_t i = 0; i < bytes.size();) {
      const size_t n = 1 + random() % 3;
      const std::string piece = stream.append(bytes.substr(i, n));
      EXPECT_TRUE(is_valid_utf8(piece));
      out += piece;
      i += n;
    }
    out += stream.flush();
    EXPECT_EQ(out, to_valid_utf8(bytes));
  }
}

}  // namespace
}  // namespace fourfold::text
