// What counts as delivered: text that came, in answers that are whole.
#include "bench/answer_reader.h"

#include <gtest/gtest.h>

namespace fourfold::bench {
namespace {

std::string data(const std::string& json) { return "data: " + json + "\n\n"; }

RequestRecord read(const std::string& stream, size_t piece) {
  RequestRecord record;
  AnswerReader reader(record);
  double time = 1;
  for (size_t at = 0; at < stream.size(); at += piece) reader.feed(stream.substr(at, piece), time++);
  reader.finish();
  return record;
}

const std::string kChat =
    ": waiting\n\n" + data(R"({"choices":[{"delta":{"role":"assistant","content":""}}]})") +
    data(R"({"choices":[{"delta":{"reasoning":"hm","reasoning_content":"hm"}}]})") +
    data(R"({"choices":[{"delta":{"content":"42"}}]})") +
    data(R"({"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}}]})") +
    data(R"({"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null})") +
    data(
        R"({"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":3},)"
        R"("completion_tokens_details":{"reasoning_tokens":2}}})") +
    "data: [DONE]\n\n";

TEST(AnswerReader, CountsEachTextOnce) {
  for (size_t piece = 1; piece <= kChat.size(); ++piece) {
    const RequestRecord record = read(kChat, piece);
    ASSERT_TRUE(record.good()) << record.error;
    EXPECT_EQ(record.pieces.size(), 3u);
    EXPECT_EQ(record.bytes, 2 + 2 + 3);  // both names of the reasoning carry one text
    EXPECT_LE(record.first, record.first_content);
    EXPECT_EQ(record.delivered(), 5);
    EXPECT_EQ(record.prompt_tokens, 7);
    EXPECT_EQ(record.cached_tokens, 3);
    EXPECT_EQ(record.reasoning_tokens, 2);
    EXPECT_EQ(record.finish, "stop");
  }
}

TEST(AnswerReader, ReasoningIsTheFirstTokenAndContentIsApart) {
  const RequestRecord record = read(kChat, kChat.find("\n\n", kChat.find("reasoning_content")) + 2);
  EXPECT_EQ(record.first, 1);
  EXPECT_EQ(record.first_content, 2);
}

TEST(AnswerReader, WithoutUsageThePiecesCount) {
  const RequestRecord record =
      read(data(R"({"choices":[{"text":"a"}]})") + data(R"({"choices":[{"text":"b","finish_reason":"length"}]})") +
               "data:[DONE]\n\n",
           9);
  EXPECT_TRUE(record.good()) << record.error;
  EXPECT_EQ(record.output_tokens, -1);
  EXPECT_EQ(record.delivered(), 2);
}

TEST(AnswerReader, AnswersThatAreNotWholeHaveDeliveredNothing) {
  const std::string text = data(R"({"choices":[{"delta":{"content":"x"}}],"usage":{"completion_tokens":9}})");
  const std::string end = data(R"({"choices":[{"delta":{},"finish_reason":"stop"}]})");
  for (const std::string& stream :
       {std::string(), text, text + end, text + "data: [DONE]\n\n", end + "data: [DONE]\n\n",
        text + data(R"({"error":{"message":"broken"}})") + end + "data: [DONE]\n\n", data("{"), data("[1]"),
        data(R"({"choices":[3]})"), std::string("data: ") + std::string(5 << 20, 'x')}) {
    const RequestRecord record = read(stream, 64);
    EXPECT_FALSE(record.good()) << stream.substr(0, 200);
    EXPECT_EQ(record.delivered(), 0);
  }
  EXPECT_NE(read(text + data(R"({"error":{"message":"broken"}})"), 64).error.find("broken"), std::string::npos);
}

// Events like the one before are not parsed; whatever differs in more than a plain text is.
TEST(AnswerReader, EventsThatAreLikeTheOneBeforeAndThoseThatAreNot) {
  const auto chunk = [](const char* text, const char* more = R"(,"finish_reason":null)") {
    return data(fmt::format(R"({{"choices":[{{"index":0,"text":"{}"{}}}]}})", text, more));
  };
  const std::string stream = chunk("one") + chunk("three") + chunk(R"(a\"b)") + chunk(R"(\u00e9)") + chunk("") +
                             chunk("four") + chunk(R"(x"},{"y":"z)") + chunk("end", R"(,"finish_reason":"stop")") +
                             data(R"({"choices":[],"usage":{"completion_tokens":8}})") + "data: [DONE]\n\n";
  for (const size_t cut : {1, 7, 4096}) {
    const RequestRecord record = read(stream, cut);
    EXPECT_TRUE(record.good()) << record.error;
    EXPECT_EQ(record.bytes, 3 + 5 + 3 + 2 + 4 + 1 + 3);
    EXPECT_EQ(record.pieces.size(), 7u);
    EXPECT_EQ(record.finish, "stop");
    EXPECT_EQ(record.delivered(), 8);
  }
  EXPECT_FALSE(read(chunk("one") + chunk("two\x01") + chunk("end", R"(,"finish_reason":"stop")"), 64).good());
}

}  // namespace
}  // namespace fourfold::bench
