#include "serve/completions_api.h"

#include <ctime>
#include <memory>
#include <utility>

#include "serve/completion_answer.h"
#include "serve/generation_fields.h"
#include "serve/generation_job.h"
#include "serve/routes.h"
#include "serve/structured.h"

namespace fourfold::serve {
namespace {

using enum Treatment;

constexpr FieldRule kOwnRules[] = {
    {"prompt", kHonoured, "a text, an array of texts, of tokens, or of arrays of tokens; up to 256 prompts"},
    {"max_tokens", kHonoured, "16 where it is missing; 0 with echo: the prompt alone"},
    {"n", kHonoured, "1 to 64, and up to 256 answers in all"},
    {"stop", kHonoured, "a string or up to 64"},
    {"logprobs", kHonoured,
     "0 to 20 alternatives of each token, the one that ends the answer included; of the prompt's as well with echo"},
    {"echo", kHonoured, "the prompt in front of the answer"},
    {"add_special_tokens", kHonoured, "true where it is missing; of a prompt that is text"},
    {"best_of", kHonoured, "no other than n"},
    {"suffix", kRefused, "the model fills no gaps; put the text into the prompt"},
    {"prompt_embeds", kRefused, "prompts are text or tokens"},
    {"prompt_logprobs", kRefused, "use echo and logprobs"},
};
constexpr auto kFields = join_rules(kOwnRules, kGenerationRules, kOpenAiRules, kStructureRules);

constexpr size_t kMaxPrompts = 256, kMaxAnswersInAll = 256;

std::vector<int32_t> token_prompt(const Fields& fields, const Json& tokens, const std::string& place,
                                  const ServedModel& model) {
  std::vector<int32_t> out;
  out.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Json& token = tokens[i];
    if (!token.is_number_integer() || token.get<int64_t>() < 0 || token.get<int64_t>() >= model.config.vocabulary) {
      fields.refuse(fmt::format("{}[{}]", place, i),
                    fmt::format("is {}, a token from 0 to {} is wanted", printable(dump(token), 60),
                                model.config.vocabulary - 1));
    }
    out.push_back(token.get<int32_t>());
  }
  return out;
}

std::vector<int32_t> text_prompt(const Fields& fields, const Json& text, const std::string& place,
                                 const ServedModel& model, bool special) {
  if (!text.is_string()) fields.refuse(place, fmt::format("is {}, a text or tokens are wanted", json_kind(text)));
  text::EncodeOptions options;
  options.add_special_tokens = special;
  return model.text->tokenizer().encode_ids(text.get_ref<const std::string&>(), options);
}

std::vector<std::vector<int32_t>> read_prompts(const Fields& fields, const ServedModel& model) {
  const Json* prompt = fields.find("prompt");
  if (prompt == nullptr) fields.refuse("prompt", "is missing, a text or tokens are wanted");
  const bool special = fields.boolean("add_special_tokens").value_or(true);
  std::vector<std::vector<int32_t>> out;
  if (!prompt->is_array()) {
    out.push_back(text_prompt(fields, *prompt, "prompt", model, special));
  } else if (!prompt->empty() && prompt->front().is_number()) {
    out.push_back(token_prompt(fields, *prompt, "prompt", model));
  } else {
    if (prompt->size() > kMaxPrompts) {
      fields.refuse("prompt", fmt::format("has {} prompts, at most {} are taken", prompt->size(), kMaxPrompts));
    }
    for (size_t i = 0; i < prompt->size(); ++i) {
      const std::string place = fmt::format("prompt[{}]", i);
      const Json& one = (*prompt)[i];
      out.push_back(one.is_array() ? token_prompt(fields, one, place, model)
                                   : text_prompt(fields, one, place, model, special));
    }
  }
  if (out.empty()) fields.refuse("prompt", "is empty, at least one token is wanted");
  for (const auto& tokens : out) {
    if (tokens.empty()) fields.refuse("prompt", "is empty, at least one token is wanted");
  }
  return out;
}

}  // namespace

std::span<const FieldRule> completion_fields() { return kFields; }

void completions(Service& service, const std::shared_ptr<ApiCall>& call) {
  const ModelRequest incoming(service, *call, kFields);
  const Fields& fields = incoming.fields;
  const ServedModel& model = incoming.model;

  CompletionAnswerOptions options;
  options.fields = GenerationFields::read(fields, model);
  options.echo = fields.boolean("echo").value_or(false);
  options.fields.max_tokens = fields.integer("max_tokens", options.echo ? 0 : 1, kMaxTokens).value_or(16);
  options.no_output = options.fields.max_tokens == 0;
  if (options.no_output) options.fields.max_tokens = 1;
  // A number of alternatives; some clients send true and false.
  const Json* logprobs = fields.find("logprobs");
  if (logprobs != nullptr && logprobs->is_boolean()) {
    if (logprobs->get<bool>()) options.logprobs = 1;
  } else if (const auto count = fields.integer("logprobs", 0, 20)) {
    options.logprobs = static_cast<int32_t>(*count);
  }
  if (fields.boolean("use_beam_search").value_or(false)) fields.refuse("use_beam_search", "is true: there is none");
  fields.integer("best_of", options.fields.answers, options.fields.answers);
  const Structure structure = Structure::of_fields(fields);
  structure.require_end(fields, options.fields);
  options.prompts = read_prompts(fields, model);
  if (options.prompts.size() * static_cast<size_t>(options.fields.answers) > kMaxAnswersInAll) {
    fields.refuse("n", fmt::format("is {} for {} prompts, at most {} answers are taken", options.fields.answers,
                                   options.prompts.size(), kMaxAnswersInAll));
  }
  options.id = random_id("cmpl-");
  options.model = model.name();
  options.created = std::time(nullptr);

  std::vector<GenerationJob::Part> parts;
  for (const std::vector<int32_t>& tokens : options.prompts) {
    options.prompt_tokens += static_cast<int64_t>(tokens.size());
    chat::Prompt prompt;
    prompt.tokens = tokens;
    GenerationJob::Part part;
    part.request = options.fields.request(std::move(prompt), model, *call);
    if (options.logprobs) {
      part.request.sampling.logprobs = *options.logprobs;
      if (options.echo) part.request.prompt_logprobs = *options.logprobs;
    }
    part.answers = options.fields.answers;
    parts.push_back(std::move(part));
  }
  const bool stream = options.fields.stream;
  start_generation(service, call, structure, chat::Reasoning::kNone, std::move(parts),
                   std::make_unique<CompletionAnswer>(*model.text, std::move(options)), stream);
}

}  // namespace fourfold::serve
