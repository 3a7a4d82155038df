// Answers in the form of Anthropic's messages, streamed or whole.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chat/answer.h"
#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/text_line.h"

namespace fourfold::serve {

struct MessagesAnswerOptions {
  std::string id, model;
  GenerationFields fields;
  chat::AnswerOptions answer;
  int64_t prompt_tokens = 0;
  bool parallel_calls = true;  // false: the answer ends with its first call
  // Called with the blocks of an answer that has ended.
  std::function<void(const Json& content)> done{};
};

class MessagesAnswer final : public AnswerForm {
 public:
  // `text` must outlive it.
  MessagesAnswer(const chat::ChatText& text, MessagesAnswerOptions options);

  void begin(std::string& out) override;
  bool token(size_t index, const engine::Event& event, std::string& out) override;
  std::string finish(size_t index, const engine::Event& event, std::string& out) override;
  void complete(std::string& out) override;
  std::string whole() const override;
  std::string heartbeat() const override;
  std::string failure(const ApiError& error) const override;

 private:
  enum class Block { kNone, kThinking, kText, kToolUse };

  void emit(const std::vector<text::OutputEvent>& events, std::string& out);
  void open(Block block, Json start, std::string& out);
  void text_delta(const char* type, const char* name, const std::string& text, std::string& out);
  void delta(Json content, std::string& out);
  void close(std::string& out);
  Json usage() const;
  Json content() const;

  const chat::ChatText& text_;
  const MessagesAnswerOptions options_;
  chat::AnswerStream stream_;
  Block block_ = Block::kNone;  // the one that is open
  TextLine line_;               // of its deltas
  int64_t blocks_ = 0;          // so far, the open one included
  int64_t tokens_ = 0, cached_tokens_ = 0;
  bool one_call_ = false;
  std::string stop_reason_;
  Json stop_sequence_;
};

}  // namespace fourfold::serve
