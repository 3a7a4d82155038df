// Answers in the form of OpenAI's chat completions, streamed or whole.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chat/answer.h"
#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/text_line.h"

namespace fourfold::serve {

struct ChatAnswerOptions {
  std::string id, model;
  int64_t created = 0;
  GenerationFields fields;
  chat::AnswerOptions answer;
  int64_t prompt_tokens = 0;
  bool logprobs = false;
  bool parallel_calls = true;  // false: the answer ends with its first call
  bool include_reasoning = true;
};

class ChatAnswer final : public AnswerForm {
 public:
  // `text` must outlive it.
  ChatAnswer(const chat::ChatText& text, ChatAnswerOptions options);

  void begin(std::string& out) override;
  bool token(size_t index, const engine::Event& event, std::string& out) override;
  std::string finish(size_t index, const engine::Event& event, std::string& out) override;
  void complete(std::string& out) override;
  std::string whole() const override;
  std::string failure(const ApiError& error) const override;

 private:
  struct Choice {
    chat::AnswerStream stream;
    std::string logprobs;  // as JSON, with commas between them; streamed: those that were not sent yet
    Json stop_reason;
    std::string finish;
    int64_t tokens = 0, reasoning_tokens = 0;
    bool begun = false, reasoning = false, one_call = false;
    TextLine line = {};  // of the kind of delta that was sent last, and its call
    text::OutputEvent::Kind line_kind = text::OutputEvent::Kind::kContent;
    size_t line_call = 0;
  };

  void emit(size_t index, const std::vector<text::OutputEvent>& events, std::string& out);
  void text_delta(size_t index, const text::OutputEvent& event, std::string& out);
  void delta(size_t index, Json content, const std::string* finish, std::string& out);
  Json usage() const;

  const chat::ChatText& text_;
  const ChatAnswerOptions options_;
  int32_t think_end_ = -1;
  std::vector<Choice> choices_;
  int64_t cached_tokens_ = 0, drafted_ = 0, accepted_ = 0;
};

}  // namespace fourfold::serve
