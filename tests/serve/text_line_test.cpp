#include "serve/text_line.h"

#include <gtest/gtest.h>

#include "serve/api_error.h"

namespace fourfold::serve {
namespace {

TEST(TextLine, IsWhatJsonWouldBe) {
  const auto line = [](const std::string& text) { return dump(Json{{"a", text}, {"n", 1}, {"b", text}}) + "\n\n"; };
  TextLine made;
  EXPECT_TRUE(made.empty());
  made.set(line(TextLine::place()));
  for (const std::string& text : {std::string("plain"), std::string(), std::string("\"quotes\" and \\"),
                                  std::string("a\nline\x01\x7f"), std::string("h\xc3\xa9llo"), std::string("\0", 1)}) {
    std::string out = "before ";
    made.append(text, out);
    EXPECT_EQ(out, "before " + line(text));
  }
  made.clear();
  EXPECT_TRUE(made.empty());
}

TEST(TextLine, TextsArePutInWhereTheirMarksAre) {
  const Json json = {{"a", Json::array({json_mark(12)})}, {"b", {{"c", Json::array({json_mark(0)})}}}, {"d", "json_"}};
  const std::string out =
      put_in(dump(json) + "\n", [](size_t index) -> std::string_view { return index == 12 ? R"(1,"x")" : ""; });
  EXPECT_EQ(out, "{\"a\":[1,\"x\"],\"b\":{\"c\":[]},\"d\":\"json_\"}\n");
}

}  // namespace
}  // namespace fourfold::serve
