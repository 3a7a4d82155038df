#include "batch/request_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/temporary_directory.h"

namespace fourfold::batch {
namespace {

TEST(RequestFile, LinesHaveTheirNumbers) {
  const TemporaryDirectory directory;
  const auto path = directory / "requests";
  std::ofstream(path) << "a\n\n \t\r\nb\r\n" + std::string(kMaxLine + 5, 'x') + "\nlast";
  RequestFile file(path.string());
  EXPECT_EQ(file.lines(), 4);
  const auto expect = [&](int64_t number, const std::string& text) {
    const auto line = file.next();
    ASSERT_TRUE(line);
    EXPECT_EQ(line->number, number);
    EXPECT_EQ(line->text, text);
    EXPECT_FALSE(line->too_long);
  };
  expect(1, "a");
  expect(4, "b\r");
  const auto longest = file.next();
  ASSERT_TRUE(longest);
  EXPECT_TRUE(longest->too_long);
  EXPECT_EQ(longest->text.size(), kMaxLine);
  expect(6, "last");
  EXPECT_FALSE(file.next());
  EXPECT_FALSE(file.next());
  EXPECT_THROW(RequestFile("/dev/null"), Error);
  EXPECT_THROW(RequestFile("/nothing"), Error);
}

TEST(Request, IsReadOrRefusedByName) {
  std::optional<std::string> id;
  const BatchRequest good = parse_request(
      R"({"custom_id":"a","method":"POST","url":"/v1/responses","body":{"x":1,"stream":false},"other":2})", id);
  EXPECT_EQ(good.custom_id, "a");
  EXPECT_EQ(good.url, "/v1/responses");
  EXPECT_EQ(good.body, R"({"x":1,"stream":false})");
  const struct {
    const char *line, *words;
    bool known;  // the custom_id
  } kBad[] = {
      {"", "the line", false},
      {"[]", "array", false},
      {"{}", "custom_id", false},
      {R"({"custom_id":3})", "integer", false},
      {R"({"custom_id":""})", "0 bytes", true},
      {R"({"custom_id":"a"})", "method", true},
      {R"({"custom_id":"a","method":"GET"})", "GET", true},
      {R"({"custom_id":"a","method":"POST","url":"/v1/embeddings"})", "/v1/embeddings", true},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions"})", "body", true},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":[]})", "array", true},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{"stream":true}})", "stream", true},
  };
  for (const auto& bad : kBad) {
    id.reset();
    try {
      parse_request(bad.line, id);
      ADD_FAILURE() << bad.line;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(bad.words), std::string::npos) << bad.line << ": " << error.what();
    }
    EXPECT_EQ(id.has_value(), bad.known) << bad.line;
  }
}

}  // namespace
}  // namespace fourfold::batch
