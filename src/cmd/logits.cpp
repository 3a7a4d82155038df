// fourfold logits: what the model computes for given tokens, as a safetensors file.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/file.h"
#include "base/json.h"
#include "base/progress.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/model_options.h"
#include "cmd/options.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/safetensors.h"
#include "model/text_logits.h"

namespace fourfold::cmd {
namespace {

struct Options {
  std::string directory, tokens, output;
  BackendArgs backend;
  bool hidden = false, mtp = false;
  int64_t chunk = 256;
};

void run(const Options& options) {
  require_replaceable(options.output);
  model::Checkpoint checkpoint(options.directory);
  const auto keep = [&](const std::filesystem::path& input) {
    std::error_code error;
    if (std::filesystem::equivalent(input, options.output, error)) {
      fail("{} is the input {} too; wanted another file", options.output, input.string());
    }
  };
  keep(options.tokens);
  for (const model::SafetensorsFile& shard : checkpoint.shards()) keep(shard.path());
  const model::ModelConfig config = checkpoint.config();
  if (options.mtp && config.mtp_layers == 0) fail("{} has no MTP head, --mtp cannot be used", options.directory);
  const std::vector<int32_t> tokens =
      parse_token_ids(read_input(options.tokens, JsonLimits().max_bytes),
                      options.tokens == "-" ? "standard input" : options.tokens, config.vocabulary);
  const auto count = static_cast<int64_t>(tokens.size());
  if (count > config.max_positions) {
    fail("{}: {} tokens, the model has {} positions", options.tokens, count, config.max_positions);
  }

  check_activations(options.backend, options.directory);
  const int64_t chunk = std::min(options.chunk, count);
  model::ModelOptions model_options;
  model_options.max_step_tokens = chunk;
  model_options.max_logit_rows = chunk;
  model_options.mtp = options.mtp;
  const auto model =
      model::load_model(checkpoint, rank_backends(options.backend), rank_options(options.backend), model_options);

  Progress progress("computing", static_cast<uint64_t>(count), "tokens");
  const model::TextLogits text = model::compute_text_logits(
      *model, tokens,
      {chunk, options.hidden, options.mtp, [&](int64_t done) { progress.set(static_cast<uint64_t>(done)); }});
  progress.finish();

  const std::vector<float>& logits = text.logits;
  std::vector<model::NamedTensor> tensors;
  tensors.push_back({"logits", {count, config.vocabulary}, logits});
  for (size_t layer = 0; layer < text.hidden.size(); ++layer) {
    tensors.push_back({fmt::format("hidden.{}", layer), {count, config.hidden}, text.hidden[layer]});
  }
  if (options.mtp) tensors.push_back({"mtp.logits", {count - 1, config.vocabulary}, text.mtp_logits});
  model::write_safetensors_f32(options.output, tensors);
  const auto bad = std::find_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); });
  if (bad != logits.end()) {
    const int64_t place = bad - logits.begin();
    fail(
        "{} was written, but row {} has the logit {} of token {}, wanted finite numbers; `fourfold inspect --deep {}` "
        "names weights that are not finite",
        options.output, place / config.vocabulary, *bad, place % config.vocabulary, options.directory);
  }
  eprint("{}: {} tokens, {} ({})\n", options.output, count, options.hidden ? "logits and hidden states" : "logits",
         model->backend().description());
}

}  // namespace

void add_logits(Command& app) {
  auto options = std::make_shared<Options>();
  Command command = app.add_command("logits", "Write the logits (and hidden states) of given tokens as safetensors");
  command.add_option("DIR", options->directory, "Checkpoint directory").required();
  command.add_option("TOKENS", options->tokens, "JSON array of token ids, or an object with ids; - is standard input")
      .required();
  command.add_option("OUT", options->output, "File to write: fp32 'logits' [tokens, vocabulary]").required();
  command.add_flag("--hidden", options->hidden,
                   "Also 'hidden.N' [tokens, hidden], the residual stream after each layer");
  command.add_flag("--mtp", options->mtp,
                   "Also 'mtp.logits' [tokens - 1, vocabulary]: row t from hidden state t and token t + 1");
  command.add_option("--chunk", options->chunk, "Tokens computed at once").range(1, 65536);
  add_backend_options(command, options->backend);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
