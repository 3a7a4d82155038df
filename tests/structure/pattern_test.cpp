#include "structure/pattern.h"

#include <gtest/gtest.h>

#include "matching.h"

namespace fourfold::structure {
namespace {

std::string grammar_of(std::string_view text, const Writing& writing = {}, Anchoring anchoring = Anchoring::kWhole) {
  GrammarText grammar;
  return grammar.finish(pattern(text, writing, anchoring));
}

TEST(Pattern, MatchesWholeTexts) {
  SKIP_WITHOUT_COMPILER();
  const struct {
    const char* pattern;
    std::vector<std::string> fits, others;
  } cases[] = {
      {"abc", {"abc"}, {"ab", "abcd", ""}},
      {"a|bc|", {"a", "bc", ""}, {"b", "abc"}},
      {"[a-cx]{2,3}", {"ax", "abc"}, {"a", "abca", "ad"}},
      {"(ab)*c+d?", {"c", "ababccd"}, {"ab", "abd"}},
      {"\\d{3}-\\w+", {"123-a_9"}, {"12-a", "123-", "123-é"}},
      {"[^a-z\\s]", {"A", "é", "日"}, {"q", " ", "\n"}},
      {".", {"a", "é", "\t"}, {"\n", ""}},
      {"\\u00e9\\x41\\u{1F600}", {"éA😀"}, {"eA😀"}},
      {"(?:a|(?<name>b)){2}", {"ab", "bb"}, {"a", "abb"}},
      {"[\\]\\-\\\\.]+", {"]-\\."}, {"a"}},
      {"a{2}", {"aa"}, {"a", "aaa"}},
      {"a{2,}", {"aa", "aaaaa"}, {"a"}},
      {"^a$|^b$", {"a", "b"}, {"ab"}},
      {"a*?b", {"b", "aab"}, {"a"}},
  };
  for (const auto& one : cases) {
    const std::string grammar = grammar_of(one.pattern);
    for (const std::string& text : one.fits) EXPECT_EQ(fit(grammar, text), Fit::kWhole) << one.pattern << " " << text;
    for (const std::string& text : one.others) EXPECT_NE(fit(grammar, text), Fit::kWhole) << one.pattern << " " << text;
  }
}

TEST(Pattern, WritesWhatJsonMustEscape) {
  SKIP_WITHOUT_COMPILER();
  const std::string any = grammar_of(".{2}", {true, false});
  for (const char* text : {"ab", "é😀"}) EXPECT_EQ(fit(any, text), Fit::kWhole) << text;
  for (const char* text : {"\"a", "\\a", "\\\"a", "a\n", "\\n", "\x01z"})
    EXPECT_NE(fit(any, text), Fit::kWhole) << text;
  const std::string quotes = grammar_of("\"[\\n\\\\]", {true, false});
  for (const char* text : {"\\\"\\n", "\\\"\\\\"}) EXPECT_EQ(fit(quotes, text), Fit::kWhole) << text;
  const std::string angle = grammar_of("<b>", {true, true});
  EXPECT_EQ(fit(angle, "\\u003cb>"), Fit::kWhole);
  EXPECT_EQ(fit(angle, "<b>"), Fit::kNo);
  EXPECT_EQ(fit(grammar_of("\\x01", {true, false}), "\\u0001"), Fit::kWhole);
}

TEST(Pattern, IsOpenWhereOneAnchorIsMissing) {
  SKIP_WITHOUT_COMPILER();
  const auto search = [](const char* text) { return grammar_of(text, {}, Anchoring::kSearch); };
  EXPECT_EQ(fit(search("^https?://"), "https://example.org"), Fit::kWhole);
  EXPECT_NE(fit(search("^https?://"), "ftp://"), Fit::kWhole);
  EXPECT_EQ(fit(search("\\.txt$"), "a.txt"), Fit::kWhole);
  EXPECT_EQ(fit(search("[a-z]+"), "abc"), Fit::kWhole);
  EXPECT_NE(fit(search("[a-z]+"), "abc1"), Fit::kWhole);
}

TEST(Pattern, CountsCharacters) {
  const auto lengths = [](const char* text) {
    const Part part = pattern(text, {true, false}, Anchoring::kWhole);
    return std::pair(part.shortest, part.longest);
  };
  EXPECT_EQ(lengths("a{2,5}"), (std::pair<int64_t, int64_t>(2, 5)));
  EXPECT_EQ(lengths("a|bcd|"), (std::pair<int64_t, int64_t>(0, 3)));
  EXPECT_EQ(lengths("\"é\""), (std::pair<int64_t, int64_t>(3, 3)));
  EXPECT_EQ(lengths("a+"), (std::pair<int64_t, int64_t>(1, -1)));
}

TEST(Pattern, RefusesWhatIsNotRegularOrTooMuch) {
  const struct {
    const char *pattern, *why;
  } cases[] = {{"(?=a)b", "looks around"},
               {"(?<!a)b", "looks around"},
               {"(a)\\1", "refers back"},
               {"\\bword", "word boundary"},
               {"a**", "repeats a repetition"},
               {"*a", "repeats nothing"},
               {"(a", "unclosed ("},
               {"a)", "unopened )"},
               {"[a", "unclosed ["},
               {"[b-a]", "wrong order"},
               {"a{3,2}", "repeats 3 to 2"},
               {"a{20000}", "more than 10000"},
               {"\\q", "unknown escape"},
               {"a^b", "anchor inside"},
               {"\\ud800", "names no character"},
               {"((((a{200}){200}){200}){200})", "repeats too much"}};
  for (const auto& one : cases) {
    const std::string why = rejection([&] { pattern(one.pattern, {}, Anchoring::kWhole); });
    EXPECT_NE(why.find(one.why), std::string::npos) << one.pattern << ": " << why;
  }
  EXPECT_NE(rejection([] { pattern(std::string(10'000, 'a'), {}, Anchoring::kWhole); }).find("bytes"),
            std::string::npos);
  const std::string deep = std::string(5'000, '(') + std::string(2'000, ')');
  EXPECT_NE(rejection([&] { pattern(deep, {}, Anchoring::kWhole); }).find("deeper"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::structure
