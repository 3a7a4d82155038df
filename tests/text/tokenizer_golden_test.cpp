// Every recorded case of tests/text/data/tokenizer_cases.jsonl (made by tools/goldens_text/make_tokenizers.py): ids,
// character offsets and decoded text as Hugging Face's `tokenizers` gives them; and the detokeniser against decode().
// FOURFOLD_TEXT_CASES=DIR runs another set of the same form, e.g. a larger one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <sstream>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "text/tokenizer.h"

namespace fourfold::text {
namespace {

std::filesystem::path data_directory() {
  const char* other = std::getenv("FOURFOLD_TEXT_CASES");
  return other != nullptr ? other : std::filesystem::path(FOURFOLD_SOURCE_DIR) / "tests/text/data";
}

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

std::vector<size_t> flat(const std::vector<Span>& spans) {
  std::vector<size_t> out;
  for (const Span& span : spans) out.insert(out.end(), {span.begin, span.end});
  return out;
}

TEST(TokenizerGolden, EqualToTokenizers) {
  std::map<std::string, Tokenizer> tokenizers;
  for (const auto& entry : std::filesystem::directory_iterator(data_directory() / "tokenizers")) {
    tokenizers.emplace(entry.path().stem().string(), Tokenizer::from_file(entry.path()));
  }
  std::istringstream lines(read_file(data_directory() / "tokenizer_cases.jsonl"));
  size_t cases = 0, with_offsets = 0, wrong = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json json = parse_json(line, "case");
    const Tokenizer& tokenizer = tokenizers.at(json["t"].get<std::string>());
    const std::string text = json.contains("x") ? from_hex(json["x"]) : json["s"].get<std::string>();
    const std::string mode = json.value("m", "");
    EncodeOptions options;
    options.add_special_tokens = mode != "n";
    if (mode == "e") options.added_tokens = AddedTokens::kNotSpecial;
    options.offsets = json.contains("o");
    const Encoding encoding = tokenizer.encode(text, options);
    ++cases;
    with_offsets += options.offsets;
    const auto ids = json["i"].get<std::vector<int32_t>>();
    bool same = encoding.ids == ids;
    EXPECT_EQ(encoding.ids, ids) << line;
    if (options.offsets) {
      const auto offsets = json["o"].get<std::vector<size_t>>();
      same = same && flat(encoding.char_offsets) == offsets;
      EXPECT_EQ(flat(encoding.char_offsets), offsets) << line;
    }
    const std::string repaired = to_valid_utf8(text);
    const std::string decoded = json.value("d", repaired);
    EXPECT_EQ(tokenizer.decode(ids), decoded) << line;
    const std::string without_special = json.value("k", decoded);
    EXPECT_EQ(tokenizer.decode(ids, true), without_special) << line;
    same = same && tokenizer.decode(ids) == decoded && tokenizer.decode(ids, true) == without_special;

    Detokenizer stream(tokenizer), skipping(tokenizer, true);
    std::string streamed, streamed_without;
    for (int32_t id : ids) {
      const std::string piece = stream.push(id);
      EXPECT_TRUE(is_valid_utf8(piece)) << line;
      streamed += piece;
      streamed_without += skipping.push(id);
    }
    streamed += stream.flush();
    streamed_without += skipping.flush();
    EXPECT_EQ(streamed, decoded) << line;
    EXPECT_EQ(streamed_without, without_special) << line;
    wrong += !same;
    if (wrong > 20) break;
  }
  EXPECT_GE(cases, 10000u);
  EXPECT_GE(with_offsets, 3000u);
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace fourfold::text
