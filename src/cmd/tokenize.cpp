// fourfold tokenize: text to token ids and back.
#include <cstdio>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/options.h"
#include "text/tokenizer.h"

namespace fourfold::cmd {
namespace {

struct Options {
  std::string source, file = "-", control = "all";
  bool decode = false, offsets = false, no_special = false, skip_special = false;
};

void decode(const text::Tokenizer& tokenizer, const Options& options) {
  const std::string name = options.file == "-" ? "standard input" : options.file;
  const std::vector<int32_t> ids = parse_token_ids(read_input(options.file, text::Tokenizer::kMaxInput), name,
                                                   static_cast<int64_t>(tokenizer.size()));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!tokenizer.is_defined(ids[i])) fail("{}: token {} is {}, which {} has not", name, i, ids[i], options.source);
  }
  const std::string out = tokenizer.decode(ids, options.skip_special);
  std::fwrite(out.data(), 1, out.size(), stdout);
}

Json spans(const std::vector<text::Span>& offsets) {
  Json out = Json::array();
  for (const text::Span& span : offsets) out.push_back({span.begin, span.end});
  return out;
}

void run(const Options& options) {
  const auto tokenizer = directory_exists(options.source) ? text::Tokenizer::from_directory(options.source)
                                                          : text::Tokenizer::from_file(options.source);
  if (options.decode) return decode(tokenizer, options);
  text::EncodeOptions encode;
  encode.add_special_tokens = !options.no_special;
  encode.offsets = options.offsets;
  encode.added_tokens = options.control == "all"    ? text::AddedTokens::kAll
                        : options.control == "none" ? text::AddedTokens::kNone
                                                    : text::AddedTokens::kNotSpecial;
  const text::Encoding encoding = tokenizer.encode(read_input(options.file, text::Tokenizer::kMaxInput), encode);
  if (!options.offsets) {
    fmt::print("{}\n", Json(encoding.ids).dump());
    return;
  }
  Json out = Json::object();
  out["ids"] = encoding.ids;
  Json tokens = Json::array();
  for (int32_t id : encoding.ids) tokens.push_back(std::string(tokenizer.token(id)));
  out["tokens"] = std::move(tokens);
  out["byte_offsets"] = spans(encoding.byte_offsets);
  out["char_offsets"] = spans(encoding.char_offsets);
  fmt::print("{}\n", out.dump());
}

}  // namespace

void add_tokenize(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command("tokenize", "Print the token ids of a text as JSON, or the text of ids");
  command.add_option("TOKENIZER", options->source, "A checkpoint's directory, or a tokenizer.json").required();
  command.add_option("FILE", options->file, "The text, or with --decode the ids; - is standard input").show_default();
  command.add_flag("--decode", options->decode, "Read a JSON array of ids (or an object with ids), print the text");
  command.add_flag("--skip-special", options->skip_special, "With --decode: leave out tokens flagged as special");
  command.add_flag("--offsets", options->offsets,
                   "Print an object with ids, tokens, byte_offsets and char_offsets of the input");
  command.add_flag("--no-special", options->no_special, "Without the tokens a post-processor adds, such as <s>");
  command
      .add_option("--control", options->control,
                  "Which added tokens are recognised in the text: all, not-special or none")
      .one_of({"all", "not-special", "none"})
      .show_default();
  for (const char* other : {"--offsets", "--no-special", "--control"}) command.exclude("--decode", other);
  command.need("--skip-special", "--decode");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
