#include "cmd/chat_text.h"

#include <algorithm>

#include "base/check.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace fourfold::cmd {

struct ChatText::Parts {
  text::Tokenizer tokenizer;
  text::ChatTemplate chat_template;
};

engine::SamplingParams recommended_sampling(const model::GenerationConfig& config) {
  engine::SamplingParams sampling;
  const bool recommended = config.temperature || config.top_k || config.top_p || config.min_p;
  if (!config.do_sample.value_or(recommended)) sampling.temperature = 0;
  const auto set = [](float& field, const std::optional<double>& value) {
    if (value) field = static_cast<float>(*value);
  };
  if (sampling.temperature != 0) set(sampling.temperature, config.temperature);
  set(sampling.top_p, config.top_p);
  set(sampling.min_p, config.min_p);
  set(sampling.repetition_penalty, config.repetition_penalty);
  set(sampling.presence_penalty, config.presence_penalty);
  set(sampling.frequency_penalty, config.frequency_penalty);
  if (config.top_k) sampling.top_k = static_cast<int32_t>(std::min<int64_t>(*config.top_k, 1 << 24));
  return sampling;
}

ChatText::ChatText(const std::filesystem::path& directory, const model::ModelConfig& config)
    : parts_(std::make_unique<Parts>(Parts{text::Tokenizer::from_directory(directory),
                                           text::ChatTemplate::from_directory(directory)})) {
  const text::Tokenizer& tokenizer = parts_->tokenizer;
  const auto size = static_cast<int64_t>(tokenizer.size());
  if (size > config.vocabulary) {
    fail("{}: tokenizer.json has token {}, but the model's vocabulary has {} rows", directory.string(), size - 1,
         config.vocabulary);
  }
  defined_ = static_cast<int32_t>(size);
  for (int32_t id = 0; id < defined_; ++id) {
    if (!tokenizer.is_defined(id)) undefined_tokens_.push_back(id);
  }
  const model::GenerationConfig generation = model::read_generation_config(directory);
  sampling_ = recommended_sampling(generation);
  // Every source of a stop token counts: config.json often lacks the one that ends a turn.
  stop_tokens_ = generation.eos_tokens;
  stop_tokens_.insert(stop_tokens_.end(), config.eos_tokens.begin(), config.eos_tokens.end());
  const auto& named = parts_->chat_template.special_tokens();
  if (const auto eos = named.find("eos_token"); eos != named.end()) {
    if (const auto id = tokenizer.find(eos->second)) stop_tokens_.push_back(*id);
  }
  std::sort(stop_tokens_.begin(), stop_tokens_.end());
  stop_tokens_.erase(std::unique(stop_tokens_.begin(), stop_tokens_.end()), stop_tokens_.end());
  std::erase_if(stop_tokens_, [&](int32_t id) { return id < 0 || id >= config.vocabulary; });
}

ChatText::~ChatText() = default;

ChatText::Prompt ChatText::render(const Json& messages, const Json& tools, std::optional<bool> thinking) const {
  text::ChatRequest request;
  request.messages = messages;
  request.tools = tools;
  request.add_generation_prompt = true;
  request.parse_arguments = true;
  if (thinking) request.variables["enable_thinking"] = *thinking;
  const std::string rendered = parts_->chat_template.render(request);
  text::EncodeOptions options;
  options.add_special_tokens = false;  // the template writes them
  Prompt prompt;
  prompt.tokens = parts_->tokenizer.encode_ids(rendered, options);
  const size_t open = rendered.rfind("<think>");
  const size_t close = rendered.rfind("</think>");
  prompt.thinking = open != std::string::npos && (close == std::string::npos || close < open);
  return prompt;
}

engine::Request ChatText::request(Prompt prompt) const {
  engine::Request request;
  request.prompt = std::move(prompt.tokens);
  request.sampling = sampling_;
  request.stop_tokens = stop_tokens_;
  request.banned_tokens = undefined_tokens_;
  request.defined_tokens = defined_;
  return request;
}

bool ChatText::is_stop(int32_t token) const {
  return std::binary_search(stop_tokens_.begin(), stop_tokens_.end(), token);
}

struct ChatText::Stream::State {
  State(const text::Tokenizer& tokenizer, bool is_thinking) : detokenizer(tokenizer), thinking(is_thinking) {}

  text::Detokenizer detokenizer;
  bool thinking;
  std::string held;  // of the thinking: white space at its end, or what may be the beginning of the closing tag
  bool any_content = false;

  // What of the thinking may be shown, with `held` updated; nothing is held back when `last`.
  Piece cut(std::string text, bool last) {
    Piece piece;
    if (thinking) {
      held += text;
      text.clear();
      constexpr std::string_view kClose = "</think>";
      const size_t close = held.find(kClose);
      size_t certain = held.size();
      if (close != std::string::npos) {
        certain = close;
      } else if (!last) {
        for (size_t tail = std::min(kClose.size() - 1, held.size()); tail > 0; --tail) {
          if (std::string_view(held).substr(held.size() - tail) == kClose.substr(0, tail)) {
            certain -= tail;
            break;
          }
        }
      }
      size_t shown = certain;
      while (shown > 0 && (held[shown - 1] == '\n' || held[shown - 1] == ' ')) --shown;
      piece.thinking = held.substr(0, shown);
      if (close == std::string::npos) {
        held.erase(0, shown);
      } else {
        text = held.substr(close + kClose.size());
        held.clear();
        thinking = false;
      }
    }
    if (!any_content) text.erase(0, std::min(text.find_first_not_of('\n'), text.size()));
    any_content = any_content || !text.empty();
    piece.content = std::move(text);
    return piece;
  }
};

ChatText::Stream::Stream(const ChatText& text, bool thinking)
    : state_(std::make_unique<State>(text.parts_->tokenizer, thinking)) {}
ChatText::Stream::~Stream() = default;

ChatText::Stream::Piece ChatText::Stream::push(int32_t token) {
  std::string text = state_->detokenizer.push(token);
  all_ += text;
  return state_->cut(std::move(text), false);
}

ChatText::Stream::Piece ChatText::Stream::finish() {
  std::string text = state_->detokenizer.flush();
  all_ += text;
  return state_->cut(std::move(text), true);
}

Answer ChatText::parse(std::string_view text, bool thinking, const Json& tools) const {
  (void)tools;
  Answer answer;
  if (thinking) {
    const size_t close = text.find("</think>");
    answer.closed = close != std::string_view::npos;
    answer.thinking = text.substr(0, close);
    text = answer.closed ? text.substr(close + 8) : std::string_view();
  }
  answer.content = text.substr(std::min(text.find_first_not_of('\n'), text.size()));
  return answer;
}

}  // namespace fourfold::cmd
