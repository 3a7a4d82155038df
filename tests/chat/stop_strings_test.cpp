// Stop strings against a literal search, in every cut of a text.
#include "chat/stop_strings.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "base/random.h"

namespace fourfold::chat {
namespace {

struct Outcome {
  std::string text;
  std::optional<std::string> found;
  bool operator==(const Outcome&) const = default;
};

Outcome filter(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopFilter filter(stops);
  Outcome outcome;
  for (const std::string& piece : pieces) outcome.text += filter.push(piece);
  if (!filter.found()) outcome.text += filter.flush();
  outcome.found = filter.found();
  return outcome;
}

// Looks at every end, and at every stop string there, the longest first.
Outcome search(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    const std::string* best = nullptr;
    for (const std::string& stop : stops) {
      if (text.substr(0, end).ends_with(stop) && (best == nullptr || stop.size() > best->size())) best = &stop;
    }
    if (best != nullptr) return {text.substr(0, end - best->size()), *best};
  }
  return {text, std::nullopt};
}

TEST(StopFilter, EqualsASearchOfTheWholeTextInAnyCut) {
  Random random(7);
  int found = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto word = [&](uint64_t longest, uint64_t shortest) {
      std::string out;
      for (uint64_t n = shortest + random.below(longest - shortest + 1); n > 0; --n) out += "ab\n"[random.below(3)];
      return out;
    };
    std::vector<std::string> stops;
    for (uint64_t n = random.below(4); n > 0; --n) stops.push_back(word(5, 1));
    const std::string text = word(24, 0);
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t count = 1 + random.below(6);
      pieces.push_back(text.substr(at, count));
      at += count;
    }
    const Outcome wanted = search(stops, text);
    ASSERT_EQ(filter(stops, pieces), wanted) << text;
    ASSERT_EQ(filter(stops, {text}), wanted) << text;
    found += wanted.found ? 1 : 0;
  }
  EXPECT_GT(found, 5000);
  EXPECT_LT(found, 19000);
}

TEST(StopFilter, HoldsBackNoMoreThanItMust) {
  StopFilter filter({"END", "\n\n"});
  EXPECT_EQ(filter.push("one E"), "one ");
  EXPECT_EQ(filter.push("N"), "");
  EXPECT_EQ(filter.push("T"), "ENT");
  EXPECT_EQ(filter.push("\n"), "");
  EXPECT_EQ(filter.push("x"), "\nx");
  EXPECT_EQ(filter.push("yEND and more"), "y");
  EXPECT_EQ(filter.found(), "END");
  EXPECT_EQ(filter.push("z"), "");
}

TEST(StopFilter, Limits) {
  const auto error = [](const std::vector<std::string>& stops) -> std::string {
    try {
      check_stop_strings(stops, "stop");
    } catch (const Error& refused) {
      return refused.what();
    }
    return "";
  };
  EXPECT_EQ(error({"a", std::string(kMaxStopBytes, 'b')}), "");
  EXPECT_EQ(error({"a", ""}), "stop has an empty string");
  EXPECT_EQ(error({std::string(kMaxStopBytes + 1, 'b')}), "stop has a string of 4097 bytes, at most 4096 are wanted");
  EXPECT_EQ(error(std::vector<std::string>(kMaxStopStrings + 1, "x")), "stop has 65 strings, at most 64 are wanted");
}

}  // namespace
}  // namespace fourfold::chat
