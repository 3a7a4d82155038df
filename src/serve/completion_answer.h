// Answers in the form of OpenAI's completions, streamed or whole.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "chat/answer.h"
#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/text_line.h"

namespace fourfold::serve {

struct CompletionAnswerOptions {
  std::string id, model;
  int64_t created = 0;
  GenerationFields fields;
  std::vector<std::vector<int32_t>> prompts;
  int64_t prompt_tokens = 0;
  bool echo = false;
  bool no_output = false;           // max_tokens 0: the prompt alone
  std::optional<int32_t> logprobs;  // alternatives of each token
};

class CompletionAnswer final : public AnswerForm {
 public:
  // `text` must outlive it. Each prompt has fields.answers answers, one prompt after the other.
  CompletionAnswer(const chat::ChatText& text, CompletionAnswerOptions options);

  void begin(std::string& out) override;
  bool token(size_t index, const engine::Event& event, std::string& out) override;
  std::string finish(size_t index, const engine::Event& event, std::string& out) override;
  void complete(std::string& out) override;
  std::string whole() const override;
  std::string failure(const ApiError& error) const override;

 private:
  // The insides of four arrays, as the API has them: JSON with commas between the values.
  struct Logprobs {
    enum Array : size_t { kTokens, kValues, kTop, kOffsets, kArrays };
    std::array<std::string, kArrays> texts;
    void add(Array array, const Json& value);
    static Json marks(size_t index);  // of answer `index`, for put_in()
  };
  struct Choice {
    chat::AnswerStream stream;
    std::string text;   // streamed: what was not sent yet
    Logprobs logprobs;  // the same
    size_t offset = 0;  // characters of the text so far
    Json stop_reason;
    std::string finish;
    int64_t tokens = 0;
    bool begun = false;
    TextLine line = {};  // of a piece in the middle
  };

  void echo(size_t index, const engine::Event& event);
  void add_logprob(Choice& choice, int32_t token, const std::vector<engine::TokenLogprob>* logprobs) const;
  void add_text(Choice& choice, const std::vector<text::OutputEvent>& events);
  void text_chunk(size_t index, std::string& out);
  void chunk(size_t index, const std::string* finish, std::string& out);
  Json usage() const;
  std::string with_logprobs(const Json& json) const;  // as text

  const chat::ChatText& text_;
  const CompletionAnswerOptions options_;
  std::vector<Choice> choices_;
  std::vector<int64_t> cached_;  // of each prompt
};

}  // namespace fourfold::serve
