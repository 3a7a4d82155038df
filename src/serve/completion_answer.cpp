#include "serve/completion_answer.h"

#include <algorithm>
#include <numeric>

#include "serve/token_text.h"

namespace fourfold::serve {
namespace {

std::string event_line(const Json& json) { return "data: " + dump(json) + "\n\n"; }

}  // namespace

CompletionAnswer::CompletionAnswer(const chat::ChatText& text, CompletionAnswerOptions options)
    : text_(text), options_(std::move(options)), cached_(options_.prompts.size()) {
  chat::AnswerOptions answer;
  answer.plain = true;
  answer.stop = options_.fields.stop;
  const size_t count = options_.prompts.size() * static_cast<size_t>(options_.fields.answers);
  for (size_t i = 0; i < count; ++i) {
    choices_.push_back(Choice{
        .stream = chat::AnswerStream(text, answer), .text = {}, .logprobs = {}, .stop_reason = {}, .finish = {}});
  }
}

void CompletionAnswer::begin(std::string&) {}

void CompletionAnswer::Logprobs::add(Array array, const Json& value) {
  std::string& text = texts[array];
  if (!text.empty()) text += ',';
  text += dump(value);
}

Json CompletionAnswer::Logprobs::marks(size_t index) {
  const auto mark = [&](Array array) { return Json::array({json_mark(index * kArrays + array)}); };
  return {{"tokens", mark(kTokens)},
          {"token_logprobs", mark(kValues)},
          {"top_logprobs", mark(kTop)},
          {"text_offset", mark(kOffsets)}};
}

std::string CompletionAnswer::with_logprobs(const Json& json) const {
  return put_in(dump(json), [&](size_t mark) {
    return std::string_view(choices_[mark / Logprobs::kArrays].logprobs.texts[mark % Logprobs::kArrays]);
  });
}

// `logprobs`: the token's own first, then the alternatives; null where there is none (the first token of a prompt).
void CompletionAnswer::add_logprob(Choice& choice, int32_t token,
                                   const std::vector<engine::TokenLogprob>* logprobs) const {
  const text::Tokenizer& tokenizer = text_.tokenizer();
  Logprobs& out = choice.logprobs;
  out.add(Logprobs::kTokens, token_text(tokenizer, token));
  out.add(Logprobs::kOffsets, choice.offset);
  if (logprobs == nullptr || logprobs->empty()) {
    out.add(Logprobs::kValues, nullptr);
    out.add(Logprobs::kTop, nullptr);
    return;
  }
  out.add(Logprobs::kValues, finite(logprobs->front().logprob));
  Json top = Json::object();
  for (size_t i = 1; i < logprobs->size(); ++i) {
    top[token_text(tokenizer, (*logprobs)[i].token)] = finite((*logprobs)[i].logprob);
  }
  // Whatever was asked for, the chosen token is among them.
  top[token_text(tokenizer, logprobs->front().token)] = finite(logprobs->front().logprob);
  out.add(Logprobs::kTop, top);
}

// The prompt in front of the answer, with what the engine says of its tokens.
void CompletionAnswer::echo(size_t index, const engine::Event& event) {
  Choice& choice = choices_[index];
  const std::vector<int32_t>& prompt = options_.prompts[index / static_cast<size_t>(options_.fields.answers)];
  text::Detokenizer detokenizer(text_.tokenizer());
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (options_.logprobs) {
      const bool known = i > 0 && i - 1 < event.prompt_logprobs.size();
      add_logprob(choice, prompt[i], known ? &event.prompt_logprobs[i - 1] : nullptr);
    }
    const std::string piece = detokenizer.push(prompt[i]);
    choice.offset += count_characters(piece);
    choice.text += piece;
  }
  const std::string rest = detokenizer.flush();
  choice.offset += count_characters(rest);
  choice.text += rest;
}

void CompletionAnswer::add_text(Choice& choice, const std::vector<text::OutputEvent>& events) {
  for (const text::OutputEvent& event : events) choice.text += event.text;
}

bool CompletionAnswer::token(size_t index, const engine::Event& event, std::string& out) {
  Choice& choice = choices_[index];
  if (!choice.begun) {
    choice.begun = true;
    if (options_.echo) echo(index, event);
  }
  if (options_.no_output) return false;
  ++choice.tokens;
  // Of the token that ends the answer as well, as of every one in completion_tokens: programs that score a prompt ask
  // for one token more and take the last one off, whatever it is.
  if (options_.logprobs) add_logprob(choice, event.token, &event.logprobs);
  if (options_.fields.ends(event.token, text_)) {
    if (!text_.is_stop(event.token)) choice.stop_reason = event.token;
    return true;
  }
  const size_t before = choice.stream.text().size();
  add_text(choice, choice.stream.push(event.token));
  choice.offset += count_characters(std::string_view(choice.stream.text()).substr(before));
  if (choice.stream.stop()) choice.stop_reason = *choice.stream.stop();
  if (options_.fields.stream && !choice.text.empty()) text_chunk(index, out);
  return !choice.stream.stop();
}

// A piece of text: where nothing but the text differs from the piece before, the rest of the line is there already.
void CompletionAnswer::text_chunk(size_t index, std::string& out) {
  Choice& choice = choices_[index];
  if (options_.logprobs || options_.fields.continuous_usage) return chunk(index, nullptr, out);
  if (choice.line.empty()) {
    const std::string text = std::exchange(choice.text, TextLine::place());
    std::string line;
    chunk(index, nullptr, line);
    choice.line.set(line);
    choice.text = text;
  }
  choice.line.append(choice.text, out);
  choice.text.clear();
}

void CompletionAnswer::chunk(size_t index, const std::string* finish, std::string& out) {
  Choice& choice = choices_[index];
  Json one = {
      {"index", index}, {"text", std::exchange(choice.text, {})}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
  if (options_.logprobs) one["logprobs"] = Logprobs::marks(index);
  if (finish != nullptr) {
    one["finish_reason"] = *finish;
    one["stop_reason"] = choice.stop_reason;
  }
  Json line = {{"id", options_.id},
               {"object", "text_completion"},
               {"created", options_.created},
               {"model", options_.model},
               {"choices", Json::array({std::move(one)})}};
  if (options_.fields.continuous_usage) {
    line["usage"] = usage();
  } else if (options_.fields.include_usage) {
    line["usage"] = nullptr;
  }
  out += "data: " + (options_.logprobs ? with_logprobs(line) : dump(line)) + "\n\n";
  choice.logprobs = {};
}

std::string CompletionAnswer::finish(size_t index, const engine::Event& event, std::string& out) {
  Choice& choice = choices_[index];
  int64_t& cached = cached_[index / static_cast<size_t>(options_.fields.answers)];
  cached = std::max(cached, event.cached_tokens);
  add_text(choice, choice.stream.finish());
  const bool length = event.reason == engine::FinishReason::kLength || event.reason == engine::FinishReason::kDeadline;
  choice.finish = (length && !choice.stream.stop()) || options_.no_output ? "length" : "stop";
  if (options_.fields.stream) chunk(index, &choice.finish, out);
  return choice.finish;
}

Json CompletionAnswer::usage() const {
  int64_t output = 0;
  for (const Choice& choice : choices_) output += choice.tokens;
  return {{"prompt_tokens", options_.prompt_tokens},
          {"completion_tokens", output},
          {"total_tokens", options_.prompt_tokens + output},
          {"prompt_tokens_details", {{"cached_tokens", std::accumulate(cached_.begin(), cached_.end(), int64_t{0})}}}};
}

void CompletionAnswer::complete(std::string& out) {
  if (!options_.fields.stream) return;
  if (options_.fields.include_usage) {
    out += event_line({{"id", options_.id},
                       {"object", "text_completion"},
                       {"created", options_.created},
                       {"model", options_.model},
                       {"choices", Json::array()},
                       {"usage", usage()}});
  }
  out += "data: [DONE]\n\n";
}

std::string CompletionAnswer::whole() const {
  Json choices = Json::array();
  for (size_t index = 0; index < choices_.size(); ++index) {
    const Choice& choice = choices_[index];
    choices.push_back({{"index", index},
                       {"text", choice.text},
                       {"logprobs", options_.logprobs ? Logprobs::marks(index) : Json()},
                       {"finish_reason", choice.finish},
                       {"stop_reason", choice.stop_reason}});
  }
  return with_logprobs({{"id", options_.id},
                        {"object", "text_completion"},
                        {"created", options_.created},
                        {"model", options_.model},
                        {"choices", std::move(choices)},
                        {"usage", usage()}});
}

std::string CompletionAnswer::failure(const ApiError& error) const {
  return event_line(error.body(ErrorForm::kOpenAi)) + "data: [DONE]\n\n";
}

}  // namespace fourfold::serve
