#include "chat/chat_text.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "chat/sampling.h"
#include "text/chat_template.h"

namespace fourfold::chat {
namespace {

// The template writes the special tokens.
text::EncodeOptions as_it_stands() {
  text::EncodeOptions options;
  options.add_special_tokens = false;
  return options;
}

// The token with which the model's turn begins, and so every message: what a template writes first when it is asked for
// the turn. Nothing where that is no added token, or where the template refuses a plain question.
std::optional<int32_t> first_token_of_a_turn(const text::Tokenizer& tokenizer,
                                             const text::ChatTemplate& chat_template) {
  text::ChatRequest request;
  request.messages = Json::array({{{"role", "user"}, {"content", "a"}}});
  std::string without, with;
  try {
    without = chat_template.render(request);
    request.add_generation_prompt = true;
    with = chat_template.render(request);
  } catch (const Error&) {
    return std::nullopt;
  }
  if (!with.starts_with(without) || with.size() == without.size()) return std::nullopt;
  const std::vector<int32_t> tokens = tokenizer.encode_ids(with.substr(without.size()), as_it_stands());
  const auto added = tokenizer.added_tokens();
  const bool known = std::any_of(added.begin(), added.end(), [&](const auto& token) { return token.id == tokens[0]; });
  return known ? std::optional(tokens[0]) : std::nullopt;
}

}  // namespace

struct ChatText::Parts {
  text::Tokenizer tokenizer;
  text::ChatTemplate chat_template;
};

void require_tokenizer_fits(const std::filesystem::path& directory, size_t size, const model::ModelConfig& config) {
  if (size <= static_cast<size_t>(config.vocabulary)) return;
  fail("{}: tokenizer.json has token {}, but the model's vocabulary has {} rows", directory.string(), size - 1,
       config.vocabulary);
}

ChatText::ChatText(const std::filesystem::path& directory, const model::ModelConfig& config)
    : parts_(std::make_unique<Parts>(
          Parts{text::Tokenizer::from_directory(directory),
                text::ChatTemplate::from_directory(directory, text::ChatTemplate::Absence::kAllowed)})) {
  const text::Tokenizer& tokenizer = parts_->tokenizer;
  require_tokenizer_fits(directory, tokenizer.size(), config);
  defined_ = static_cast<int32_t>(tokenizer.size());
  for (int32_t id = 0; id < defined_; ++id) {
    if (!tokenizer.is_defined(id)) undefined_tokens_.push_back(id);
  }
  if (const auto turn = first_token_of_a_turn(tokenizer, parts_->chat_template)) {
    turn_token_ = *turn;
    turn_ = tokenizer.token_bytes(*turn);
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

void ChatText::require_template() const { parts_->chat_template.require(); }

std::string ChatText::render(const Conversation& conversation) const {
  return parts_->chat_template.render(template_request(conversation));
}

Prompt ChatText::prompt(const Conversation& conversation) const {
  const std::string rendered = render(conversation);
  Prompt prompt;
  prompt.tokens = parts_->tokenizer.encode_ids(rendered, as_it_stands());
  if (prompt.tokens.empty()) fail("the chat template makes an empty prompt of this conversation");
  if (turn_token_ >= 0) {
    for (size_t i = 1; i < prompt.tokens.size(); ++i) {
      if (prompt.tokens[i] == turn_token_) prompt.turns.push_back(static_cast<int64_t>(i));
    }
  }
  if (!conversation.add_generation_prompt) return prompt;
  // Only what opens the model's turn counts: messages may speak of these tags.
  const size_t turn = turn_.empty() ? std::string::npos : rendered.rfind(turn_);
  const std::string_view opening = std::string_view(rendered).substr(turn == std::string::npos ? 0 : turn);
  const size_t open = opening.rfind("<think>"), close = opening.rfind("</think>");
  if (open != std::string_view::npos && (close == std::string_view::npos || close < open)) {
    prompt.reasoning = Reasoning::kInside;
  } else if (open == std::string_view::npos && close == std::string_view::npos &&
             parts_->tokenizer.find("<think>").has_value()) {
    prompt.reasoning = Reasoning::kMaybe;
  }
  return prompt;
}

Prompt ChatText::plain_prompt(std::string_view text) const {
  Prompt prompt;
  prompt.tokens = parts_->tokenizer.encode_ids(text);
  if (prompt.tokens.empty()) fail("the prompt is empty, at least one token is wanted");
  return prompt;
}

engine::Request ChatText::request(Prompt prompt) const {
  engine::Request request;
  request.prompt = std::move(prompt.tokens);
  request.cache.boundaries = std::move(prompt.turns);
  request.sampling = sampling_;
  request.stop_tokens = stop_tokens_;
  request.banned_tokens = undefined_tokens_;
  request.defined_tokens = defined_;
  return request;
}

bool ChatText::is_stop(int32_t token) const {
  return std::binary_search(stop_tokens_.begin(), stop_tokens_.end(), token);
}

const text::Tokenizer& ChatText::tokenizer() const { return parts_->tokenizer; }

}  // namespace fourfold::chat
