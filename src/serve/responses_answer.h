// Answers in the form of OpenAI's responses, streamed or whole.
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

struct ResponsesAnswerOptions {
  std::string id;
  Json response;  // what the request says of itself: model, tools, temperature, ...
  GenerationFields fields;
  chat::AnswerOptions answer;
  int64_t prompt_tokens = 0;
  bool parallel_calls = true;  // false: the answer ends with its first call
  // Called with the answer as a message of the conversation and the whole response, when it has ended.
  std::function<void(const Json& message, const Json& response)> done;
};

class ResponsesAnswer final : public AnswerForm {
 public:
  // `text` must outlive it.
  ResponsesAnswer(const chat::ChatText& text, ResponsesAnswerOptions options);

  void begin(std::string& out) override;
  bool token(size_t index, const engine::Event& event, std::string& out) override;
  std::string finish(size_t index, const engine::Event& event, std::string& out) override;
  void complete(std::string& out) override;
  std::string whole() const override;
  std::string failure(const ApiError& error) const override;

 private:
  enum class Item { kNone, kReasoning, kMessage, kCall };

  void emit(const std::vector<text::OutputEvent>& events, std::string& out);
  void open(Item kind, Json item, std::string& out);
  void delta(const char* type, const std::string& piece, std::string& out);
  void close(bool complete, std::string& out);
  void event(Json event, std::string& out);
  Json in_place() const;  // where a delta belongs
  Json response(const char* status) const;
  Json usage() const;

  const chat::ChatText& text_;
  const ResponsesAnswerOptions options_;
  chat::AnswerStream stream_;
  int32_t think_end_ = -1;
  Item open_ = Item::kNone;
  Json output_ = Json::array();  // the items; the last one is open or complete
  TextLine line_;                // of its deltas, up to their number
  std::string piece_;            // the text of the one that is open
  int64_t sequence_ = 0, tokens_ = 0, reasoning_tokens_ = 0, cached_tokens_ = 0;
  bool reasoning_ = false, one_call_ = false, length_ = false;
};

}  // namespace fourfold::serve
