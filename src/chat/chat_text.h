// The text side of a checkpoint: conversations to tokens, and what the checkpoint says about generating an answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chat/answer.h"
#include "chat/conversation.h"
#include "engine/engine.h"
#include "model/config.h"
#include "text/tokenizer.h"

namespace fourfold::chat {

struct Prompt {
  std::vector<int32_t> tokens;
  // Where the answer begins: inside of a block of reasoning that the prompt has opened (kInside), behind one that it
  // has closed (kNone), or the model may open one itself (kMaybe).
  Reasoning reasoning = Reasoning::kNone;
  // Where messages begin, ascending, the model's turn last: the places at which prompts of one conversation, and
  // conversations with one system message, part. Without the beginning of the prompt. Empty where the template marks
  // messages with no token of their own.
  std::vector<int64_t> turns;
};

// Does not change once it is made: all of its functions may be called from many threads.
class ChatText {
 public:
  // tokenizer.json, the chat template, generation_config.json and tokenizer_config.json of a checkpoint directory. A
  // checkpoint without a chat template has no conversations, but texts can be completed.
  ChatText(const std::filesystem::path& directory, const model::ModelConfig& config);
  ~ChatText();

  // The text that the template makes of the conversation, once it is normalised; and its tokens. A FieldError or a
  // text::TemplateError where the conversation is not what the template wants.
  std::string render(const Conversation& conversation) const;
  Prompt prompt(const Conversation& conversation) const;
  // A text to be completed as it is, without a template.
  Prompt plain_prompt(std::string_view text) const;

  // An Error when there is no chat template.
  void require_template() const;

  // A request with what the checkpoint says about sampling, stop tokens and undefined token ids.
  engine::Request request(Prompt prompt) const;
  bool is_stop(int32_t token) const;

  const text::Tokenizer& tokenizer() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  std::vector<int32_t> stop_tokens_, undefined_tokens_;
  int32_t defined_ = 0;
  std::string turn_;  // the text of the token that a message begins with; empty when there is none
  int32_t turn_token_ = -1;
  engine::SamplingParams sampling_;
};

// An Error when a tokenizer of `size` ids has some that the model has no row for.
void require_tokenizer_fits(const std::filesystem::path& directory, size_t size, const model::ModelConfig& config);

}  // namespace fourfold::chat
