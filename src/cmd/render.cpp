// fourfold render: the prompt a model would see.
#include <cstdio>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "chat/conversation.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/options.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace fourfold::cmd {
namespace {

struct Options {
  std::string source, conversation;
  bool tokens = false, generation_prompt = false, parse_arguments = false, verbatim = false;
};

void run(const Options& options) {
  const bool directory = directory_exists(options.source);
  if (options.tokens && !directory) {
    fail("--tokens needs a directory with a tokenizer.json, '{}' is a file", printable(options.source));
  }
  const auto chat_template =
      directory ? text::ChatTemplate::from_directory(options.source) : text::ChatTemplate::from_file(options.source);
  const std::string name = options.conversation == "-" ? "standard input" : options.conversation;
  JsonLimits limits;
  limits.reject_duplicate_keys = false;
  auto request =
      text::ChatRequest::from_json(parse_json(read_input(options.conversation, limits.max_bytes), name, limits), name);
  request.add_generation_prompt = request.add_generation_prompt || options.generation_prompt;
  request.parse_arguments = request.parse_arguments || options.parse_arguments;
  if (!options.verbatim) request.messages = chat::normalise(request.messages);
  const std::string prompt = chat_template.render(request);
  if (!options.tokens) {
    std::fwrite(prompt.data(), 1, prompt.size(), stdout);
    return;
  }
  text::EncodeOptions encode;
  encode.add_special_tokens = false;
  const auto tokenizer = text::Tokenizer::from_directory(options.source);
  fmt::print("{}\n", Json(tokenizer.encode_ids(prompt, encode)).dump());
}

}  // namespace

void add_render(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command("render", "Print the prompt that a chat template makes of a conversation");
  command.add_option("TEMPLATE", options->source, "A checkpoint's directory, or a template file").required();
  command
      .add_option("CONVERSATION", options->conversation,
                  "JSON: an object with messages, and if wanted tools, documents, add_generation_prompt,\n"
                  "parse_arguments and any variable of the template; or an array of messages; - is standard input")
      .required();
  command.add_flag("--tokens", options->tokens, "Print the token ids as JSON instead of the text");
  command.add_flag("--add-generation-prompt", options->generation_prompt, "As if the conversation asked for it");
  command.add_flag("--verbatim", options->verbatim,
                   "The messages as they are, as transformers takes them; otherwise they are normalised as for run");
  command.add_flag("--parse-arguments", options->parse_arguments,
                   "With --verbatim: tool-call arguments given as strings of JSON become objects");
  command.need("--parse-arguments", "--verbatim");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
