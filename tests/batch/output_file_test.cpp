// Answers survive whatever ends the program, and nothing is written behind what is no answer.
#include "batch/output_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "base/json.h"
#include "base/temporary_directory.h"

namespace fourfold::batch {
namespace {

class Output : public testing::Test {
 protected:
  std::string text() const {
    std::ostringstream out;
    out << std::ifstream(path_).rdbuf();
    return out.str();
  }
  void write(const std::string& content) const { std::ofstream(path_) << content; }
  const TemporaryDirectory directory_;
  const std::string path_ = directory_ / "answers";
};

TEST_F(Output, HasOpenAisForm) {
  {
    OutputFile file(path_);
    file.add_response(3, "a\"b", 200, "req_1", R"({"x":1})");
    file.add_response(1, "c", 400, "", "null");
    file.add_error(2, std::nullopt, "broken");
    EXPECT_EQ(file.failures(), 2);
  }
  std::istringstream lines(text());
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(Json::parse(line),
            Json::parse(R"({"id":"batch_req_3","custom_id":"a\"b","response":{"status_code":200,"request_id":"req_1",
                        "body":{"x":1}},"error":null})"));
  ASSERT_TRUE(std::getline(lines, line) && std::getline(lines, line));
  const Json error = Json::parse(line);
  EXPECT_TRUE(error["custom_id"].is_null());
  EXPECT_TRUE(error["response"].is_null());
  EXPECT_EQ(error["error"]["message"], "line 2: broken");

  const OutputFile again(path_);
  EXPECT_EQ(again.answers(), 3);
  EXPECT_EQ(again.failures(), 2);
  EXPECT_TRUE(again.has(3, "a\"b"));
  EXPECT_TRUE(again.has(2, std::nullopt));
  EXPECT_FALSE(again.has(4, "d"));
  EXPECT_THROW(again.has(3, "other"), Error);
}

TEST_F(Output, IsHeldByOne) {
  const OutputFile file(path_);
  EXPECT_THROW(OutputFile second(path_), Error);
}

TEST_F(Output, EveryCutOfItGoesOn) {
  {
    OutputFile file(path_);
    for (int64_t i = 1; i <= 3; ++i)
      file.add_response(i, std::to_string(i), 200, "r", R"({"n":)" + std::to_string(i) + "}");
  }
  const std::string whole = text();
  for (size_t cut = 0; cut <= whole.size(); ++cut) {
    write(whole.substr(0, cut));
    {
      OutputFile file(path_);
      for (int64_t i = 1; i <= 3; ++i) {
        if (!file.has(i, std::to_string(i)))
          file.add_response(i, std::to_string(i), 200, "r", R"({"n":)" + std::to_string(i) + "}");
      }
    }
    EXPECT_EQ(text(), whole) << cut;
  }
}

TEST_F(Output, OtherFilesAreLeftAlone) {
  const std::string line = R"({"id":"batch_req_1","custom_id":"a","response":null,"error":null})"
                           "\n";
  for (const std::string& content :
       {std::string("notes"), std::string("notes\n"), std::string("{}\n"), std::string("{\"id\":\"batch_req_x\"}\n"),
        std::string("{\"id\":\"batch_req_0\",\"custom_id\":null}\n"), line + line, line + "more", line + "\n"}) {
    write(content);
    EXPECT_THROW(OutputFile file(path_), Error) << content;
    EXPECT_EQ(text(), content);
  }
  EXPECT_THROW(OutputFile file("/dev/null"), Error);
}

}  // namespace
}  // namespace fourfold::batch
