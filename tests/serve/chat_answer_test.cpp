// Streams of chat completions: joined, they are the whole answer, however the text is cut into tokens.
#include "serve/chat_answer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/random.h"
#include "model/config.h"

namespace fourfold::serve {
namespace {

const char* const kDemo = FOURFOLD_SOURCE_DIR "/models/demo";

const char* const kText =
    "The user wants weather. Do I write <tool_call>? \"é\" 🙂\n</think>\n\nLet me look at <b>both</b> of them.\n\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome </parameter> é\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</"
    "parameter>\n"
    "</function>\n</tool_call>";

Json tools() {
  return Json::array({{{"type", "function"},
                       {"function",
                        {{"name", "get_weather"},
                         {"parameters",
                          {{"type", "object"},
                           {"properties", {{"city", {{"type", "string"}}}, {"days", {{"type", "integer"}}}}}}}}}}});
}

class ChatAnswerTest : public testing::Test {
 protected:
  ChatAnswerOptions options(bool stream) const {
    ChatAnswerOptions out;
    out.id = "chatcmpl-1";
    out.model = "demo";
    out.fields.stream = stream;
    out.fields.include_usage = stream;
    out.answer.reasoning = chat::Reasoning::kInside;
    out.answer.tools = tools();
    out.answer.make_call_id = [] { return "call_1"; };
    out.prompt_tokens = 7;
    return out;
  }

  static engine::Event token_event(int32_t token) {
    engine::Event event;
    event.token = token;
    event.logprobs = {{token, -0.5f}};
    return event;
  }

  // Sends the tokens through an answer; what its stream says.
  std::string run(ChatAnswer& answer, const std::vector<int32_t>& tokens,
                  engine::FinishReason reason = engine::FinishReason::kStop) const {
    std::string out;
    answer.begin(out);
    for (const int32_t token : tokens) {
      if (!answer.token(0, token_event(token), out)) break;
    }
    engine::Event end;
    end.kind = engine::Event::Kind::kFinished;
    end.reason = reason;
    end.cached_tokens = 5;
    end.drafted = 9;
    end.accepted = 6;
    answer.finish(0, end, out);
    answer.complete(out);
    return out;
  }

  // What a client makes of the stream: the message of the whole answer.
  static Json join(const std::string& stream) {
    Json message = {{"content", ""}, {"reasoning", ""}, {"tool_calls", Json::array()}, {"logprobs", 0}};
    bool done = false;
    size_t at = 0;
    while (at < stream.size()) {
      const size_t end = stream.find("\n\n", at);
      EXPECT_NE(end, std::string::npos);
      const std::string line = stream.substr(at, end - at);
      at = end + 2;
      EXPECT_TRUE(line.starts_with("data: ")) << line;
      EXPECT_FALSE(done) << "something behind [DONE]";
      if (line == "data: [DONE]") {
        done = true;
        continue;
      }
      const Json chunk = parse_json(std::string_view(line).substr(6), "chunk");
      EXPECT_EQ(chunk["object"], "chat.completion.chunk");
      if (chunk["choices"].empty()) {
        message["usage"] = chunk["usage"];
        continue;
      }
      EXPECT_TRUE(chunk["usage"].is_null());
      const Json& choice = chunk["choices"][0];
      const Json& delta = choice["delta"];
      EXPECT_FALSE(message.contains("finish_reason")) << "a delta behind the finish reason";
      const auto append = [&](const char* to, const char* from) {
        if (delta.contains(from)) message[to] = message[to].get<std::string>() + delta[from].get<std::string>();
      };
      append("content", "content");
      append("reasoning", "reasoning");
      if (delta.contains("reasoning")) {
        EXPECT_EQ(delta["reasoning"], delta["reasoning_content"]);
        EXPECT_EQ(message["content"], "") << "reasoning behind content";
      }
      if (delta.contains("tool_calls")) {
        for (const Json& call : delta["tool_calls"]) {
          const auto index = call["index"].get<size_t>();
          if (index == message["tool_calls"].size()) {
            EXPECT_EQ(call["type"], "function");
            EXPECT_EQ(call["function"]["arguments"], "");
            message["tool_calls"].push_back(
                {{"id", call["id"]}, {"name", call["function"]["name"]}, {"arguments", ""}});
            continue;
          }
          EXPECT_EQ(index + 1, message["tool_calls"].size()) << "an earlier call goes on";
          EXPECT_FALSE(call.contains("id"));
          Json& arguments = message["tool_calls"][index]["arguments"];
          arguments = arguments.get<std::string>() + call["function"]["arguments"].get<std::string>();
        }
      }
      if (choice["logprobs"].is_object()) {
        message["logprobs"] = message["logprobs"].get<size_t>() + choice["logprobs"]["content"].size();
      }
      if (!choice["finish_reason"].is_null()) {
        message["finish_reason"] = choice["finish_reason"];
        message["stop_reason"] = choice["stop_reason"];
      }
    }
    EXPECT_TRUE(done);
    return message;
  }

  // The same form, from the answer as a whole.
  static Json message_of(const Json& whole) {
    const Json& choice = whole["choices"][0];
    const Json& message = choice["message"];
    const auto text = [](const Json& value) { return value.is_null() ? Json("") : value; };
    Json out = {{"content", text(message["content"])},
                {"reasoning", text(message["reasoning"])},
                {"tool_calls", Json::array()},
                {"logprobs", choice["logprobs"].is_null() ? size_t{0} : choice["logprobs"]["content"].size()}};
    EXPECT_EQ(message["reasoning"], message["reasoning_content"]);
    if (message.contains("tool_calls")) {
      for (const Json& call : message["tool_calls"]) {
        out["tool_calls"].push_back(
            {{"id", call["id"]}, {"name", call["function"]["name"]}, {"arguments", call["function"]["arguments"]}});
      }
    }
    out["finish_reason"] = choice["finish_reason"];
    out["stop_reason"] = choice["stop_reason"];
    return out;
  }

  // The text in tokens, cut in a random place or in each.
  std::vector<int32_t> cut(const std::string& text, Random& random, uint64_t longest) const {
    std::vector<int32_t> out;
    size_t at = 0;
    while (at < text.size()) {
      size_t end = std::min(text.size(), at + 1 + static_cast<size_t>(random.below(longest)));
      while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
      for (const int32_t id : text_.tokenizer().encode_ids(text.substr(at, end - at))) out.push_back(id);
      at = end;
    }
    return out;
  }

  const chat::ChatText text_{kDemo, model::read_config(kDemo)};
};

TEST_F(ChatAnswerTest, StreamsWhatTheWholeAnswerHasInEveryCut) {
  ChatAnswerOptions with_logprobs = options(false);
  with_logprobs.logprobs = true;
  Random random(3);
  Json first;
  for (int round = 0; round < 60; ++round) {
    const std::vector<int32_t> tokens = cut(kText, random, round < 5 ? 1 : round);
    ChatAnswer whole(text_, with_logprobs);
    run(whole, tokens);
    ChatAnswerOptions streamed = with_logprobs;
    streamed.fields.stream = streamed.fields.include_usage = true;
    ChatAnswer stream(text_, streamed);
    Json joined = join(run(stream, tokens));
    EXPECT_EQ(joined["usage"], Json::parse(whole.whole())["usage"]);
    joined.erase("usage");
    Json message = message_of(Json::parse(whole.whole()));
    ASSERT_EQ(message, joined);
    EXPECT_EQ(message["logprobs"], tokens.size());
    message.erase("logprobs");
    if (round == 0) first = message;
    ASSERT_EQ(first, message);
  }
  EXPECT_EQ(first["reasoning"], "The user wants weather. Do I write <tool_call>? \"é\" 🙂");
  EXPECT_EQ(first["content"], "Let me look at <b>both</b> of them.");
  ASSERT_EQ(first["tool_calls"].size(), 2u);
  EXPECT_EQ(first["tool_calls"][0]["arguments"], R"({"city": "Rome </parameter> é", "days": 3})");
  EXPECT_EQ(first["tool_calls"][1]["arguments"], R"({"city": "Oslo"})");
  EXPECT_EQ(first["finish_reason"], "tool_calls");
}

TEST_F(ChatAnswerTest, EndsWithTheFirstCallWhenCallsAreNotParallel) {
  for (const bool stream : {false, true}) {
    ChatAnswerOptions one = options(stream);
    one.parallel_calls = false;
    ChatAnswer answer(text_, one);
    const std::string out = run(answer, text_.tokenizer().encode_ids(kText));
    const Json message = stream ? join(out) : message_of(Json::parse(answer.whole()));
    ASSERT_EQ(message["tool_calls"].size(), 1u);
    EXPECT_EQ(message["tool_calls"][0]["arguments"], R"({"city": "Rome </parameter> é", "days": 3})");
    EXPECT_EQ(message["finish_reason"], "tool_calls");
  }
}

TEST_F(ChatAnswerTest, SaysWhyItEnded) {
  const auto reason = [&](const std::string& text, engine::FinishReason end, const ChatAnswerOptions& given) {
    ChatAnswer answer(text_, given);
    run(answer, text_.tokenizer().encode_ids(text), end);
    return Json::parse(answer.whole())["choices"][0]["finish_reason"].get<std::string>();
  };
  EXPECT_EQ(reason("a</think>b", engine::FinishReason::kStop, options(false)), "stop");
  EXPECT_EQ(reason("a</think>b", engine::FinishReason::kLength, options(false)), "length");
  EXPECT_EQ(reason("never ends", engine::FinishReason::kLength, options(false)), "length");
  // A call that was cut off is delivered, and said to be cut.
  EXPECT_EQ(reason("a</think><tool_call>\n<function=get_weather>\n<parameter=city>\nRo", engine::FinishReason::kLength,
                   options(false)),
            "length");
  ChatAnswerOptions stopping = options(false);
  stopping.fields.stop = stopping.answer.stop = {"STOP"};
  ChatAnswer answer(text_, stopping);
  run(answer, text_.tokenizer().encode_ids("a STOP</think>b STOP c"));
  const Json choice = Json::parse(answer.whole())["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], "STOP");
  EXPECT_EQ(choice["message"]["content"], "b");
  EXPECT_EQ(choice["message"]["reasoning"], "a STOP");
}

TEST_F(ChatAnswerTest, CountsTokensOfTheReasoning) {
  ChatAnswer answer(text_, options(false));
  const std::vector<int32_t> thinking = text_.tokenizer().encode_ids("one two</think>");
  std::vector<int32_t> tokens = thinking;
  for (const int32_t id : text_.tokenizer().encode_ids("three four")) tokens.push_back(id);
  run(answer, tokens);
  const Json usage = Json::parse(answer.whole())["usage"];
  EXPECT_EQ(usage["completion_tokens_details"]["reasoning_tokens"], thinking.size());
  EXPECT_EQ(usage["completion_tokens"], tokens.size());
  EXPECT_EQ(usage["total_tokens"], tokens.size() + 7);
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 5);
  EXPECT_EQ(usage["completion_tokens_details"]["accepted_prediction_tokens"], 6);
  EXPECT_EQ(usage["completion_tokens_details"]["rejected_prediction_tokens"], 3);
}

TEST_F(ChatAnswerTest, TellsOfAFailureInTheStream) {
  const ChatAnswer answer(text_, options(true));
  const std::string out = answer.failure(ApiError(500, "logits are not finite"));
  EXPECT_TRUE(out.ends_with("data: [DONE]\n\n"));
  EXPECT_NE(out.find(R"("message":"logits are not finite")"), std::string::npos);
}

}  // namespace
}  // namespace fourfold::serve
