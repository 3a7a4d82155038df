// Messages as clients send them, and as templates take them.
#include "chat/conversation.h"

#include <gtest/gtest.h>

#include <string>

#include "base/json.h"

namespace fourfold::chat {
namespace {

Json json(std::string_view text) { return parse_json(text, "the test"); }

// Also: normalising twice is normalising once.
void expect_normal(std::string_view messages, std::string_view wanted) {
  const Json normal = normalise(json(messages));
  EXPECT_EQ(normal.dump(), json(wanted).dump());
  EXPECT_EQ(normalise(normal).dump(), normal.dump());
}

void expect_refused(std::string_view messages, const std::string& field, const std::string& message) {
  try {
    const Json normal = normalise(json(messages));
    FAIL() << "accepted as " << normal.dump();
  } catch (const FieldError& error) {
    EXPECT_EQ(error.field(), field);
    EXPECT_EQ(error.what(), field + " " + message);
  }
}

TEST(Normalise, LeavesAPlainConversationAsItIs) {
  const char* plain = R"([{"role":"system","content":"Be brief."},{"role":"user","content":"Hi","name":"Ann"},
                          {"role":"assistant","content":"Hello"},{"role":"user","content":" two\n"}])";
  expect_normal(plain, plain);
}

TEST(Normalise, MergesInstructionsIntoTheFront) {
  expect_normal(R"([{"role":"user","content":"a"},{"role":"developer","content":"one"},
                    {"role":"assistant","content":"b"},{"role":"system","content":"two"},{"role":"user","content":"c"}])",
                R"([{"role":"system","content":"one\n\ntwo"},{"role":"user","content":"a"},
                    {"role":"assistant","content":"b"},{"role":"user","content":"c"}])");
  expect_normal(R"([{"role":"system","content":"one"},{"role":"system","content":null},
                    {"role":"system","content":[{"type":"text","text":"t"},{"type":"text","text":"wo"}]},
                    {"role":"user","content":"c"}])",
                R"([{"role":"system","content":"one\n\ntwo"},{"role":"user","content":"c"}])");
  // An empty one stays: templates may write their own when there is none.
  expect_normal(R"([{"role":"system","content":""},{"role":"user","content":"c"}])",
                R"([{"role":"system","content":""},{"role":"user","content":"c"}])");
}

TEST(Normalise, ContentIsAString) {
  const char* wanted = R"([{"role":"user","content":"a"},{"role":"assistant","content":"",
    "tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{}}}]},{"role":"tool","content":"x"}])";
  for (const char* content : {R"("content":null,)", ""}) {
    const Json normal = normalise(json(std::string(R"([{"role":"user","content":"a"},{"role":"assistant",)") + content +
                                       R"("tool_calls":[{"id":"1","type":"function","function":{"name":"f"}}]},
                                          {"role":"tool","content":[{"type":"text","text":"x"}]}])"));
    for (size_t i = 0; i < normal.size(); ++i) {
      EXPECT_EQ(normal[i]["content"], json(wanted)[i]["content"]) << i;
    }
    EXPECT_EQ(normal[1]["tool_calls"], json(wanted)[1]["tool_calls"]);
  }
  expect_normal(R"([{"role":"user","content":[{"type":"text","text":"a "},{"type":"input_text","text":"b"},"c",
                    {"text":"d"},{"type":"output_text","text":"e"},{"type":"refusal","refusal":"f"}]}])",
                R"([{"role":"user","content":"a bcdef"}])");
  expect_normal(R"([{"role":"user","content":[]}])", R"([{"role":"user","content":""}])");
}

TEST(Normalise, RefusesWhatIsNoText) {
  expect_refused(R"([{"role":"user","content":[{"type":"text","text":"look"},
                     {"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}])",
                 "messages[0].content[1]", "is an image of type 'image_url', but the model reads text only");
  expect_refused(R"([{"role":"user","content":[{"type":"input_image"}]}])", "messages[0].content[0]",
                 "is an image of type 'input_image', but the model reads text only");
  expect_refused(R"([{"role":"user","content":[{"type":"input_audio"}]}])", "messages[0].content[0]",
                 "is of type 'input_audio', but the model reads text only");
  expect_refused(R"([{"role":"user","content":[7]}])", "messages[0].content[0]",
                 "is integer, a part with a type is wanted");
  expect_refused(R"([{"role":"user","content":[{"type":7}]}])", "messages[0].content[0].type",
                 "is integer, a string is wanted");
  expect_refused(R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text",
                 "is missing, a string is wanted");
  expect_refused(R"([{"role":"user","content":{"a":1}}])", "messages[0].content",
                 "is object, a string, an array of parts or null is wanted");
}

TEST(Normalise, RefusesWhatIsNoMessage) {
  expect_refused(R"({})", "messages", "is object, an array is wanted");
  expect_refused(R"([])", "messages", "is empty, at least one message is wanted");
  expect_refused(R"([{"role":"user","content":"a"},"b"])", "messages[1]", "is string, an object is wanted");
  expect_refused(R"([{"content":"a"}])", "messages[0].role", "is missing, a string is wanted");
  expect_refused(R"([{"role":null,"content":"a"}])", "messages[0].role", "is null, a string is wanted");
}

TEST(Normalise, ReasoningHasOneName) {
  const char* wanted = R"([{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"r"}])";
  for (const char* field :
       {R"("reasoning":"r")", R"("reasoning_content":"r")", R"("reasoning":null,"reasoning_content":"r")",
        R"("reasoning":"other","reasoning_content":"r")"}) {
    expect_normal(std::string(R"([{"role":"user","content":"a"},{"role":"assistant","content":"b",)") + field + "}]",
                  wanted);
  }
  expect_refused(R"([{"role":"assistant","content":"b","reasoning":["r"]}])", "messages[0].reasoning",
                 "is array, a string is wanted");
}

TEST(Normalise, ArgumentsAreObjects) {
  const auto arguments = [](std::string_view given) {
    Json messages = json(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}])");
    messages[0]["tool_calls"][0]["function"]["arguments"] = json(given);
    const Json normal = normalise(messages);
    EXPECT_EQ(normalise(normal).dump(), normal.dump());
    return normal[0]["tool_calls"][0]["function"]["arguments"].dump();
  };
  EXPECT_EQ(arguments(R"({"a":1})"), R"({"a":1})");
  EXPECT_EQ(arguments(R"("{\"b\":2,\"a\":[1]}")"), R"({"b":2,"a":[1]})");
  for (const char* nothing : {R"("")", R"(" \n")", "null", R"("null")", "{}"}) EXPECT_EQ(arguments(nothing), "{}");
  EXPECT_EQ(arguments(R"("{\"path\": \"/a")"), R"({"arguments":"{\"path\": \"/a"})");
  EXPECT_EQ(arguments(R"("[1]")"), R"({"arguments":"[1]"})");
  expect_normal(R"([{"role":"assistant","content":"b","tool_calls":[]}])", R"([{"role":"assistant","content":"b"}])");
  expect_normal(R"([{"role":"assistant","content":"b","tool_calls":null}])", R"([{"role":"assistant","content":"b"}])");
  expect_refused(R"([{"role":"assistant","tool_calls":{}}])", "messages[0].tool_calls",
                 "is object, an array is wanted");
  expect_refused(R"([{"role":"assistant","tool_calls":[1]}])", "messages[0].tool_calls[0]",
                 "is integer, an object is wanted");
  expect_refused(R"([{"role":"assistant","tool_calls":[{"function":1}]}])", "messages[0].tool_calls[0].function",
                 "is integer, an object is wanted");
  expect_refused(R"([{"role":"assistant","tool_calls":[{"function":{"arguments":{}}}]}])",
                 "messages[0].tool_calls[0].function.name", "is missing, a string is wanted");
}

TEST(Normalise, TheBillingHeaderIsNotTheModelsBusiness) {
  expect_normal(R"([{"role":"system","content":[
                      {"type":"text","text":"x-anthropic-billing-header: cc_version=2.1; cch=00a1f;"},
                      {"type":"text","text":"You are an agent.\n"},{"type":"text","text":"Be brief."}]},
                    {"role":"user","content":"x-anthropic-billing-header: mine"}])",
                R"([{"role":"system","content":"You are an agent.\nBe brief."},
                    {"role":"user","content":"x-anthropic-billing-header: mine"}])");
  expect_normal(
      R"([{"role":"system","content":"one\nx-anthropic-billing-header: a\ntwo"},{"role":"user","content":"b"}])",
      R"([{"role":"system","content":"one\ntwo"},{"role":"user","content":"b"}])");
}

TEST(Conversation, IsReadAsRenderReadsIt) {
  const Conversation whole = Conversation::from_json(
      json(R"({"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function"}],"enable_thinking":false})"),
      "x");
  EXPECT_EQ(whole.tools.size(), 1u);
  EXPECT_EQ(whole.variables.dump(), R"({"enable_thinking":false})");
  EXPECT_TRUE(template_request(whole).add_generation_prompt);
  EXPECT_EQ(Conversation::from_json(json(R"([{"role":"user","content":"a"}])"), "x").messages.size(), 1u);
  EXPECT_THROW(Conversation::from_json(json("7"), "x"), Error);
}

}  // namespace
}  // namespace fourfold::chat
