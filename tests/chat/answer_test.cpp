// Answers as their tokens arrive: the same parts in every cut of a text into tokens.
#include "chat/answer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/random.h"
#include "chat/chat_text.h"

namespace fourfold::chat {
namespace {

const char* const kDemo = FOURFOLD_SOURCE_DIR "/models/demo";

struct Outcome {
  std::string reasoning, content, calls, stop;
  bool closed = true;
  bool operator==(const Outcome&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Outcome& o) {
  return out << '[' << o.reasoning << "] [" << o.content << "] " << o.calls << " stop [" << o.stop << "] " << o.closed;
}

class AnswerTest : public testing::Test {
 protected:
  // The parts that events give must be those of answer().
  Outcome read(const std::vector<int32_t>& tokens, AnswerOptions options) const {
    int ids = 0;
    options.make_call_id = [&] { return std::to_string(ids++); };
    AnswerStream stream(text_, std::move(options));
    Outcome joined;
    const auto take = [&](const std::vector<text::OutputEvent>& events) {
      for (const text::OutputEvent& event : events) {
        using Kind = text::OutputEvent::Kind;
        if (event.kind == Kind::kReasoning) joined.reasoning += event.text;
        if (event.kind == Kind::kContent) joined.content += event.text;
        if (event.kind == Kind::kToolCallBegin) joined.calls += event.id + event.name + " ";
        if (event.kind == Kind::kToolCallArguments) joined.calls += event.text;
        if (event.kind == Kind::kToolCallEnd) joined.calls += event.complete ? ";" : "!";
      }
    };
    for (const int32_t token : tokens) take(stream.push(token));
    take(stream.finish());
    const Answer& answer = stream.answer();
    EXPECT_EQ(answer.reasoning, joined.reasoning);
    EXPECT_EQ(answer.content, joined.content);
    std::string calls;
    for (const ToolCall& call : answer.calls) {
      calls += call.id + call.name + " " + call.arguments + (call.complete ? ";" : "!");
    }
    EXPECT_EQ(calls, joined.calls);
    joined.stop = stream.stop().value_or("");
    joined.closed = answer.closed;
    return joined;
  }
  Outcome read(const std::string& text, const AnswerOptions& options) const {
    return read(text_.tokenizer().encode_ids(text), options);
  }
  // Tokens that mean the text, cut at random: pieces that are tokenised apart.
  std::vector<int32_t> random_tokens(const std::string& text, Random& random) const {
    std::vector<int32_t> tokens;
    for (size_t at = 0; at < text.size();) {
      size_t count = 1 + random.below(8);  // and no half characters, which would be encoded as U+FFFD
      while (at + count < text.size() && (static_cast<unsigned char>(text[at + count]) & 0xc0) == 0x80) ++count;
      text::EncodeOptions plain;
      plain.added_tokens = random.below(2) == 0 ? text::AddedTokens::kAll : text::AddedTokens::kNone;
      for (const int32_t token : text_.tokenizer().encode_ids(text.substr(at, count), plain)) tokens.push_back(token);
      at += count;
    }
    return tokens;
  }
  static AnswerOptions thinking() {
    AnswerOptions options;
    options.reasoning = Reasoning::kInside;
    return options;
  }
  static AnswerOptions with_tools() {
    AnswerOptions options = thinking();
    options.tools =
        Json::array({{{"type", "function"}, {"function", {{"name", "f"}, {"parameters", Json::object()}}}}});
    return options;
  }

  const ChatText text_{kDemo, model::read_config(kDemo)};
};

constexpr const char* kCall =
    "<tool_call>\n<function=f>\n<parameter=x>\na STOP b\n</parameter>\n</function>\n</tool_call>";

TEST_F(AnswerTest, Parts) {
  EXPECT_EQ(read("so\n</think>\n\nyes \n", thinking()), (Outcome{"so", "yes", "", "", true}));
  EXPECT_EQ(read("so", thinking()), (Outcome{"so", "", "", "", false}));
  EXPECT_EQ(read("so</think>", thinking()), (Outcome{"so", "", "", "", true}));
  EXPECT_EQ(read("yes <think>", {}), (Outcome{"", "yes <think>", "", "", true}));
  EXPECT_EQ(read(std::string("so</think>\n") + kCall, with_tools()),
            (Outcome{"so", "", "0f {\"x\": \"a STOP b\"};", "", true}));
  EXPECT_EQ(read("so</think><tool_call>\n<function=f>\n<parameter=x>\n1", with_tools()),
            (Outcome{"so", "", "0f {\"x\": \"1\"}!", "", false}));
  AnswerOptions maybe;
  maybe.reasoning = Reasoning::kMaybe;
  EXPECT_EQ(read("<think>\nso\n</think>\n\nyes", maybe), (Outcome{"so", "yes", "", "", true}));
  EXPECT_EQ(read("<think>\nso", maybe), (Outcome{"so", "", "", "", false}));
  EXPECT_EQ(read("yes <think>", maybe), (Outcome{"", "yes <think>", "", "", true}));
}

TEST_F(AnswerTest, StopTokensAreNoText) {
  std::vector<int32_t> tokens = text_.tokenizer().encode_ids("yes");
  tokens.push_back(*text_.tokenizer().find("<|im_end|>"));
  EXPECT_EQ(read(tokens, {}).content, "yes");
}

TEST_F(AnswerTest, StopStringsSleepInReasoningAndCalls) {
  AnswerOptions options = with_tools();
  options.stop = {"STOP", "\n\n"};
  EXPECT_EQ(read("a STOP\n\nb</think>\n\none STOP two", options), (Outcome{"a STOP\n\nb", "one", "", "STOP", true}));
  EXPECT_EQ(read("a</think>\n\n\none\n\ntwo", options), (Outcome{"a", "one", "", "\n\n", true}));
  EXPECT_EQ(read(std::string("a</think>one ST") + kCall, options),
            (Outcome{"a", "one ST", "0f {\"x\": \"a STOP b\"};", "", true}));
  EXPECT_EQ(read(std::string("a</think>one STOP") + kCall, options), (Outcome{"a", "one", "", "STOP", true}));
}

TEST_F(AnswerTest, PlainTextIsKeptToTheLetter) {
  AnswerOptions plain;
  plain.plain = true;
  EXPECT_EQ(read(" \n<think> a </think>\n", plain), (Outcome{"", " \n<think> a </think>\n", "", "", true}));
  plain.stop = {"\n"};
  EXPECT_EQ(read(" a \nb", plain), (Outcome{"", " a ", "", "\n", true}));
}

TEST_F(AnswerTest, AnyCutGivesTheSameParts) {
  Random random(3);
  const std::vector<std::string> fragments = {"</think>",
                                              "<think>",
                                              " ",
                                              "\n",
                                              "\n\n",
                                              "STOP",
                                              "ST",
                                              "OP",
                                              "word",
                                              "\xE4\xB8\x96",
                                              kCall,
                                              "<tool_call>",
                                              "<",
                                              "<function=f>",
                                              "</function>",
                                              "</tool_call>",
                                              "<parameter=x>\n",
                                              "</parameter>"};
  int stopped = 0, called = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string text;
    for (uint64_t n = 1 + random.below(8); n > 0; --n) text += fragments[random.below(fragments.size())];
    AnswerOptions options = random.below(2) == 0 ? with_tools() : thinking();
    if (random.below(3) == 0) options.reasoning = Reasoning::kNone;
    if (random.below(3) == 0) options.reasoning = Reasoning::kMaybe;
    if (random.below(2) == 0) options.stop = {"STOP", "\n\n"};
    options.plain = random.below(8) == 0;
    const Outcome whole = read(text, options);
    stopped += whole.stop.empty() ? 0 : 1;
    called += whole.calls.empty() ? 0 : 1;
    for (int cut = 0; cut < 4; ++cut) ASSERT_EQ(read(random_tokens(text, random), options), whole) << text;
  }
  EXPECT_GT(stopped, 50);
  EXPECT_GT(called, 50);
}

TEST_F(AnswerTest, TheMessageGoesBackIntoTheConversation) {
  AnswerStream stream(text_, with_tools());
  for (const int32_t token : text_.tokenizer().encode_ids(std::string("so</think>I call.\n") + kCall))
    stream.push(token);
  stream.finish();
  Conversation conversation;
  conversation.messages = Json::array({{{"role", "user"}, {"content", "a"}}, stream.answer().message()});
  const std::string rendered = text_.render(conversation);
  EXPECT_NE(rendered.find("<think>\nso\n</think>\n\nI call.\n\n" + std::string(kCall)), std::string::npos) << rendered;
}

}  // namespace
}  // namespace fourfold::chat
