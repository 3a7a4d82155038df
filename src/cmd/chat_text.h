// The text side of a checkpoint, as run and eval need it: conversation to tokens, tokens to thinking and answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"
#include "model/config.h"

namespace fourfold::cmd {

struct ToolCall {
  std::string name;
  Json arguments;  // an object
};

// What a generated text says. `closed` is false when it ended inside the thinking.
struct Answer {
  std::string thinking, content;
  std::vector<ToolCall> calls;
  bool closed = true;
};

class ChatText {
 public:
  // tokenizer.json, the chat template, generation_config.json and tokenizer_config.json of a checkpoint directory.
  ChatText(const std::filesystem::path& directory, const model::ModelConfig& config);
  ~ChatText();

  struct Prompt {
    std::vector<int32_t> tokens;
    bool thinking = false;  // the answer begins inside a thinking block that the prompt has opened
  };
  // `messages` (an array) and `tools` (an array, or null) in the form of OpenAI's API; `thinking` sets the template's
  // enable_thinking, unset leaves the template's default.
  Prompt render(const Json& messages, const Json& tools, std::optional<bool> thinking) const;

  // A request with what the checkpoint says about sampling, stop tokens and undefined token ids.
  engine::Request request(Prompt prompt) const;
  bool is_stop(int32_t token) const;

  Answer parse(std::string_view text, bool thinking, const Json& tools) const;

  // The text of an answer as its tokens arrive, cut into thinking and content. Never half a character, and never a part
  // of a tag.
  class Stream {
   public:
    Stream(const ChatText& text, bool thinking);
    ~Stream();
    struct Piece {
      std::string thinking, content;
    };
    Piece push(int32_t token);
    Piece finish();
    const std::string& all() const { return all_; }  // the whole text so far, tags included

   private:
    struct State;
    std::unique_ptr<State> state_;
    std::string all_;
  };

 private:
  friend class Stream;
  struct Parts;
  std::unique_ptr<Parts> parts_;
  std::vector<int32_t> stop_tokens_, undefined_tokens_;
  int32_t defined_ = 0;
  engine::SamplingParams sampling_;
};

// An Error when a tokenizer of `size` ids has some that the model has no row for.
void require_tokenizer_fits(const std::filesystem::path& directory, size_t size, const model::ModelConfig& config);

// Sampling as generation_config.json recommends it: greedy when do_sample is false, or when nothing is recommended.
engine::SamplingParams recommended_sampling(const model::GenerationConfig& config);

}  // namespace fourfold::cmd
