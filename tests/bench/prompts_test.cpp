#include "bench/prompts.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/check.h"
#include "base/temporary_directory.h"

namespace fourfold::bench {
namespace {

TEST(Prompts, NoneComesTwice) {
  for (const char* name : {"trivial", "real", FOURFOLD_SOURCE_DIR "/models/demo/eval"}) {
    const PromptSet set = PromptSet::open(name);
    const int64_t count = set.size() > 0 ? set.size() : 20000;
    const int64_t step = set.size() > 0 ? 7 : 1;  // of a file each number costs its whole order
    std::set<std::string> seen;
    int64_t asked = 0;
    for (int64_t i = 0; i < count; i += step, ++asked) seen.insert(set.prompt(3, i, 0).dump());
    EXPECT_EQ(static_cast<int64_t>(seen.size()), asked) << name;
    EXPECT_EQ(set.prompt(3, 5, 0), set.prompt(3, 5, 0));
    EXPECT_NE(set.prompt(3, 5, 0), set.prompt(4, 5, 0));
  }
}

TEST(Prompts, ContextStandsInFrontOfTheQuestion) {
  const PromptSet set = PromptSet::open("trivial");
  const std::string question = set.prompt(1, 1, 0)["messages"][0]["content"];
  const std::string with = set.prompt(1, 1, 1000)["messages"][0]["content"];
  EXPECT_TRUE(with.ends_with(question));
  EXPECT_GT(with.size(), question.size() + 3000);
  EXPECT_LT(with.size(), question.size() + 8000);
  EXPECT_NE(with.substr(0, 200), set.prompt(1, 2, 1000)["messages"][0]["content"].get<std::string>().substr(0, 200));
}

TEST(Prompts, FilesAreChecked) {
  const TemporaryDirectory directory;
  const auto path = directory / "prompts";
  const auto open = [&](const std::string& text) {
    std::ofstream(path) << text;
    return PromptSet::open(path.string());
  };
  const std::string line = R"({"messages":[{"role":"user","content":"a"}]})";
  EXPECT_EQ(open(line + "\n\n" + line + "\n").size(), 1);  // the same prompt counts once
  for (const char* bad : {"", "{}", "[1]", "x", R"({"messages":[]})", R"({"messages":[3]})"}) {
    EXPECT_THROW(open(bad), Error) << bad;
  }
  EXPECT_THROW(PromptSet::open("nothing"), Error);
}

}  // namespace
}  // namespace fourfold::bench
