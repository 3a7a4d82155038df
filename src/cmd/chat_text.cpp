#include "cmd/chat_text.h"

#include <algorithm>

#include "base/check.h"
#include "text/chat_template.h"
#include "text/output_parser.h"
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
  // -1 turns it off, as 0 does.
  if (config.top_k) sampling.top_k = static_cast<int32_t>(std::clamp<int64_t>(*config.top_k, 0, 1 << 24));
  return sampling;
}

void require_tokenizer_fits(const std::filesystem::path& directory, size_t size, const model::ModelConfig& config) {
  if (size <= static_cast<size_t>(config.vocabulary)) return;
  fail("{}: tokenizer.json has token {}, but the model's vocabulary has {} rows", directory.string(), size - 1,
       config.vocabulary);
}

ChatText::ChatText(const std::filesystem::path& directory, const model::ModelConfig& config)
    : parts_(std::make_unique<Parts>(
          Parts{text::Tokenizer::from_directory(directory), text::ChatTemplate::from_directory(directory)})) {
  const text::Tokenizer& tokenizer = parts_->tokenizer;
  require_tokenizer_fits(directory, tokenizer.size(), config);
  defined_ = static_cast<int32_t>(tokenizer.size());
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
  if (prompt.tokens.empty()) fail("the chat template makes an empty prompt of this conversation");
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

namespace {

text::OutputParserOptions parser_options(bool thinking, const Json& tools) {
  text::OutputParserOptions options;
  using Reasoning = text::OutputParserOptions::Reasoning;
  options.reasoning = thinking ? Reasoning::kInside : Reasoning::kNone;
  if (tools.is_array()) options.tools = tools;
  return options;
}

// Without the white space that stands around the parts of an answer.
std::string strip(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1));
}

// White space at the beginning of a part is dropped, and at its end held back until more follows.
class PartWriter {
 public:
  void add(std::string_view text, std::string& out) {
    for (const char c : text) {
      const bool blank = c == ' ' || c == '\n' || c == '\t' || c == '\r';
      if (blank) {
        if (begun_) held_ += c;
      } else {
        out += held_;
        out += c;
        held_.clear();
        begun_ = true;
      }
    }
  }

 private:
  std::string held_;
  bool begun_ = false;
};

}  // namespace

struct ChatText::Stream::State {
  State(const text::Tokenizer& tokenizer, bool inside)
      : detokenizer(tokenizer), parser(parser_options(inside, nullptr)) {}

  Piece take(const std::vector<text::OutputEvent>& events) {
    Piece piece;
    for (const text::OutputEvent& event : events) {
      if (event.kind == text::OutputEvent::Kind::kReasoning) thinking.add(event.text, piece.thinking);
      if (event.kind == text::OutputEvent::Kind::kContent) content.add(event.text, piece.content);
    }
    return piece;
  }

  text::Detokenizer detokenizer;
  text::OutputParser parser;  // without tools: calls are shown as the text they are
  PartWriter thinking, content;
};

ChatText::Stream::Stream(const ChatText& text, bool thinking)
    : state_(std::make_unique<State>(text.parts_->tokenizer, thinking)) {}
ChatText::Stream::~Stream() = default;

ChatText::Stream::Piece ChatText::Stream::push(int32_t token) {
  const std::string text = state_->detokenizer.push(token);
  all_ += text;
  return state_->take(state_->parser.push(text));
}

ChatText::Stream::Piece ChatText::Stream::finish() {
  const std::string text = state_->detokenizer.flush();
  all_ += text;
  Piece piece = state_->take(state_->parser.push(text));
  const Piece rest = state_->take(state_->parser.finish());
  piece.thinking += rest.thinking;
  piece.content += rest.content;
  return piece;
}

Answer ChatText::parse(std::string_view text, bool thinking, const Json& tools) const {
  const text::ParsedOutput parsed = text::parse_output(text, parser_options(thinking, tools));
  Answer answer;
  answer.thinking = strip(parsed.reasoning);
  answer.content = strip(parsed.content);
  for (const auto& call : parsed.calls) {
    answer.calls.push_back({call.name, parse_json(call.arguments, "the arguments of a tool call")});
    answer.closed = answer.closed && call.complete;
  }
  if (thinking && parsed.content.empty() && parsed.calls.empty() && text.find("</think>") == std::string_view::npos) {
    answer.closed = false;
  }
  return answer;
}

}  // namespace fourfold::cmd
