// Prompts of the demo model's tokenizer and template, and of templates made for the purpose.
#include "chat/chat_text.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/temporary_directory.h"
#include "chat/sampling.h"

namespace fourfold::chat {
namespace {

namespace fs = std::filesystem;

const fs::path kDemo = FOURFOLD_SOURCE_DIR "/models/demo";

Conversation conversation(std::string_view messages, std::optional<bool> thinking = {}) {
  Conversation out;
  out.messages = parse_json(messages, "messages");
  if (thinking) out.variables["enable_thinking"] = *thinking;
  return out;
}

// The demo's tokenizer with another template, or none.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& chat_template) {
    for (const char* name : {"config.json", "tokenizer.json"}) fs::copy_file(kDemo / name, directory_ / name);
    if (!chat_template.empty()) std::ofstream(directory_ / "chat_template.jinja") << chat_template;
  }
  ChatText text() const { return ChatText(directory_.path(), model::read_config(directory_.path())); }

 private:
  const TemporaryDirectory directory_;
};

class Demo : public testing::Test {
 protected:
  std::string decode(const Prompt& prompt, int64_t begin, int64_t end) const {
    return text_.tokenizer().decode(
        std::span(prompt.tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
  }
  const ChatText text_{kDemo, model::read_config(kDemo)};
};

TEST_F(Demo, TurnsBeginWhereMessagesDo) {
  const Conversation asked = conversation(
      R"([{"role":"system","content":"Be brief."},{"role":"user","content":"a"},{"role":"assistant","content":"b"},
          {"role":"user","content":"c"}])");
  const Prompt prompt = text_.prompt(asked);
  EXPECT_EQ(text_.tokenizer().decode(prompt.tokens), text_.render(asked));
  ASSERT_EQ(prompt.turns.size(), 4u);
  EXPECT_EQ(decode(prompt, 0, prompt.turns[0]), "<|im_start|>system\nBe brief.<|im_end|>\n");
  EXPECT_EQ(decode(prompt, prompt.turns[0], prompt.turns[1]), "<|im_start|>user\na<|im_end|>\n");
  const std::string last = decode(prompt, prompt.turns[3], static_cast<int64_t>(prompt.tokens.size()));
  EXPECT_EQ(last.substr(0, 22), "<|im_start|>assistant\n") << last;
  EXPECT_EQ(text_.request(prompt).cache.boundaries, prompt.turns);
}

TEST_F(Demo, ReasoningBeginsWhereThePromptSaysSo) {
  // Messages that speak of the tags change nothing.
  for (const char* words : {"a", "what is <think>", "</think> <think>", "</think>"}) {
    const std::string messages = fmt::format(R"([{{"role":"user","content":"{}"}}])", words);
    EXPECT_EQ(text_.prompt(conversation(messages, true)).reasoning, Reasoning::kInside) << words;
    EXPECT_EQ(text_.prompt(conversation(messages, false)).reasoning, Reasoning::kNone) << words;
  }
  const Checkpoint other(
      "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}");
  EXPECT_EQ(other.text().prompt(conversation(R"([{"role":"user","content":"<think>"}])")).reasoning, Reasoning::kMaybe);
}

TEST_F(Demo, TemplatesWithoutAMarkHaveNoTurns) {
  const Checkpoint other("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:");
  const Prompt prompt = other.text().prompt(conversation(R"([{"role":"user","content":"a"}])"));
  EXPECT_EQ(text_.tokenizer().decode(prompt.tokens), "user: a\nassistant:");
  EXPECT_TRUE(prompt.turns.empty());
}

TEST_F(Demo, TextsAreCompletedWithoutATemplate) {
  const Checkpoint other("");
  const ChatText text = other.text();
  EXPECT_EQ(text.plain_prompt("Once upon").tokens, text_.tokenizer().encode_ids("Once upon"));
  EXPECT_THROW(text.require_template(), Error);
  EXPECT_THROW(text.prompt(conversation(R"([{"role":"user","content":"a"}])")), Error);
  EXPECT_THROW(text.plain_prompt(""), Error);
  text_.require_template();
}

TEST_F(Demo, RequestsKnowWhatTheCheckpointSays) {
  const Prompt prompt = text_.plain_prompt("Once");
  const engine::Request request = text_.request(prompt);
  EXPECT_EQ(request.prompt, prompt.tokens);
  EXPECT_EQ(request.sampling.temperature, 0);  // do_sample is false
  for (const int32_t token : request.stop_tokens) EXPECT_TRUE(text_.is_stop(token));
  EXPECT_TRUE(text_.is_stop(*text_.tokenizer().find("<|im_end|>")));
  EXPECT_FALSE(text_.is_stop(prompt.tokens[0]));
  EXPECT_EQ(request.defined_tokens, static_cast<int32_t>(text_.tokenizer().size()));
}

TEST(Sampling, WhoAsksForMoreThanGreedyGetsIt) {
  model::GenerationConfig nothing;
  EXPECT_EQ(recommended_sampling(nothing).temperature, 0);
  model::GenerationConfig some;
  some.temperature = 0.6;
  some.top_k = -1;
  some.top_p = 0.95;
  const engine::SamplingParams recommended = recommended_sampling(some);
  EXPECT_FLOAT_EQ(recommended.temperature, 0.6f);
  EXPECT_EQ(recommended.top_k, 0);
  SamplingChoice choice;
  EXPECT_FLOAT_EQ(choice.over(recommended).top_p, 0.95f);
  choice.top_p = 0.5;
  EXPECT_FLOAT_EQ(choice.over(recommended).temperature, 0.6f);
  EXPECT_FLOAT_EQ(choice.over(recommended).top_p, 0.5f);
  EXPECT_FLOAT_EQ(choice.over(recommended_sampling(nothing)).temperature, 1);
  choice.temperature = 0;
  choice.seed = 5;
  EXPECT_EQ(choice.over(recommended).temperature, 0);
  EXPECT_EQ(choice.over(recommended).seed, 5u);
  some.do_sample = false;
  EXPECT_EQ(recommended_sampling(some).temperature, 0);
}

}  // namespace
}  // namespace fourfold::chat
