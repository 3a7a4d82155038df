// fourfold generate: checkpoints with random weights.
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/check.h"
#include "base/console.h"
#include "base/interrupt.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "model/generator.h"
#include "model/random_weights.h"

namespace fourfold::cmd {
namespace {

using model::ModelConfig;

struct Options {
  std::string output, shape = "tiny", format = "bf16", prefix = "model.language_model.", quantized = "all";
  std::optional<int64_t> hidden, layers, interval, vocabulary, positions, heads, kv_heads, head_dim, linear_key_heads,
      linear_value_heads, linear_key_dim, linear_value_dim, conv_taps, experts, top_k, moe_intermediate,
      shared_intermediate, intermediate;
  bool mtp = true, tied = false, kv_scales = false, visual = false;
  std::string experts_form;  // "fused", "per-expert", or empty for what the format's publishers do
  int64_t shards = 1, dead_experts = 0;
  uint64_t seed = 0;
  int threads = 0;
};

ModelConfig tiny() {
  ModelConfig config;
  config.model_type = "qwen3_5_moe_text";
  config.hidden = 128;
  config.vocabulary = 512;
  config.max_positions = 4096;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.rotary_dim = 16;
  config.rope_theta = 1e7;
  config.linear_key_heads = 2;
  config.linear_value_heads = 4;
  config.linear_key_dim = config.linear_value_dim = 32;
  config.conv_taps = 4;
  config.experts = 8;
  config.top_k = 2;
  config.moe_intermediate = config.shared_intermediate = 64;
  config.eos_tokens = {511};
  model::set_layers(config, 4);
  return config;
}

ModelConfig configure(const Options& options) {
  ModelConfig config = options.shape == "tiny" ? tiny() : model::shape_config(options.shape);
  const auto set = [](int64_t& field, const std::optional<int64_t>& value) {
    if (value) field = *value;
  };
  set(config.hidden, options.hidden);
  set(config.vocabulary, options.vocabulary);
  set(config.max_positions, options.positions);
  set(config.heads, options.heads);
  set(config.kv_heads, options.kv_heads);
  if (options.head_dim) {
    if (*options.head_dim % 8 != 0)
      fail("--head-dim {} is not a multiple of 8 (a quarter of it rotates)", *options.head_dim);
    config.head_dim = *options.head_dim;
    config.rotary_dim = config.head_dim / 4;
  }
  set(config.linear_key_heads, options.linear_key_heads);
  set(config.linear_value_heads, options.linear_value_heads);
  set(config.linear_key_dim, options.linear_key_dim);
  set(config.linear_value_dim, options.linear_value_dim);
  set(config.conv_taps, options.conv_taps);
  if (options.intermediate) {
    if (options.experts) fail("--intermediate makes a dense model, it does not go with --experts");
    config.intermediate = *options.intermediate;
    config.experts = config.top_k = config.moe_intermediate = config.shared_intermediate = 0;
    config.model_type = "qwen3_5_text";
  }
  if (config.experts == 0 &&
      (options.experts || options.top_k || options.moe_intermediate || options.shared_intermediate)) {
    fail("--experts, --top-k, --moe-intermediate and --shared-intermediate need a mixture-of-experts shape");
  }
  set(config.experts, options.experts);
  set(config.top_k, options.top_k);
  set(config.moe_intermediate, options.moe_intermediate);
  set(config.shared_intermediate, options.shared_intermediate);
  if (config.top_k > config.experts) fail("--top-k {} is more than the {} experts", config.top_k, config.experts);
  if (options.layers) model::set_layers(config, *options.layers);
  if (options.interval) {
    for (int64_t i = 0; i < config.layers; ++i) {
      config.layer_kinds[static_cast<size_t>(i)] =
          (i + 1) % *options.interval == 0 ? model::LayerKind::kAttention : model::LayerKind::kDeltaNet;
    }
  }
  config.mtp_layers = options.mtp ? 1 : 0;
  config.tied_head = options.tied;
  for (int32_t& token : config.eos_tokens) token = std::min(token, static_cast<int32_t>(config.vocabulary - 1));
  return config;
}

void run(const Options& options) {
  install_interrupt_handler();
  model::GeneratorOptions generator;
  generator.config = configure(options);
  for (const model::FormatName& entry : model::generated_formats()) {
    if (options.format == entry.name) generator.format = entry.format;
  }
  const bool plain = generator.format <= model::GeneratedFormat::kF32;
  generator.fused_experts = options.experts_form.empty() ? plain : options.experts_form == "fused";
  if (options.prefix == "language_model.model.") generator.prefix = model::PrefixStyle::kLanguageModelModel;
  if (options.prefix == "model.") generator.prefix = model::PrefixStyle::kModel;
  if (options.prefix == "none") generator.prefix = model::PrefixStyle::kNone;
  generator.only_experts = options.quantized == "experts";
  generator.kv_scales = options.kv_scales;
  generator.visual = options.visual;
  generator.dead_experts = options.dead_experts;
  generator.shards = options.shards;
  generator.seed = options.seed;
  generator.threads = options.threads;
  const auto start = std::chrono::steady_clock::now();
  const model::GeneratedFiles files = model::generate_checkpoint(options.output, generator);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  eprint("{}: {} tensors, {:.3f} GB in {} file{}, {:.1f} s ({:.2f} GB/s). No tokenizer.\n", options.output,
         files.tensors, static_cast<double>(files.bytes) * 1e-9, files.shards, files.shards == 1 ? "" : "s", seconds,
         static_cast<double>(files.bytes) * 1e-9 / seconds);
}

}  // namespace

void add_generate(Command& app) {
  auto options = std::make_shared<Options>();
  Command command =
      app.add_command("generate", "Write a checkpoint with random weights (no tokenizer), for tests and speed runs");
  command.add_option("OUT", options->output, "New or empty directory, or one that a killed run left").required();
  std::vector<std::string> shapes = {"tiny"};
  for (std::string& name : model::shape_names()) shapes.push_back(std::move(name));
  command.add_option("--shape", options->shape, "The other flags change it").one_of(shapes).show_default();
  std::string formats = "How the weights are stored:";
  std::vector<std::string> names;
  for (const model::FormatName& entry : model::generated_formats()) {
    formats += fmt::format("\n  {:<15} {}", entry.name, entry.meaning);
    names.emplace_back(entry.name);
  }
  command.add_option("--format", options->format, formats).one_of(names).show_default();
  command.add_option("--quantized", options->quantized, "What NVFP4 and FP8 apply to: experts or all")
      .one_of({"experts", "all"})
      .show_default();
  command.add_flag_callback(
      "--fused-experts", [options] { options->experts_form = "fused"; }, "One tensor for all experts of a layer");
  command.add_flag_callback(
      "--per-expert", [options] { options->experts_form = "per-expert"; }, "Separate tensors for each expert");
  command.exclude("--fused-experts", "--per-expert");
  command.add_option("--prefix", options->prefix, "Of tensor names")
      .one_of({"model.language_model.", "language_model.model.", "model.", "none"})
      .show_default();
  command.add_option("--shards", options->shards, "Number of files").range(1, 99999).show_default();
  command
      .add_option("--seed", options->seed,
                  "Same seed, same bytes, on every machine; in every format and layout the same values, rounded")
      .show_default();
  command.add_option("--dead-experts", options->dead_experts, "Experts per layer that are all zero or almost")
      .range(0, model::kMaxExperts);
  command.add_flag("--mtp,!--no-mtp", options->mtp, "With an MTP head (default: with)");
  command.add_flag("--tied", options->tied, "The head is the embedding");
  command.add_flag("--kv-scales", options->kv_scales, "Store FP8 KV-cache scales");
  command.add_flag("--visual", options->visual, "Store a few tensors of a vision tower");
  command.add_option("--threads", options->threads, "Threads (default: all)").range(1, 1024);
  const auto size = [&](const char* name, std::optional<int64_t>& field, const char* help, int64_t high,
                        int64_t low = 1) { command.add_option(name, field, help).range(low, high).group("Sizes"); };
  size("--hidden", options->hidden, "Hidden size", model::kMaxDimension);
  size("--layers", options->layers, "Layers; every fourth is attention", model::kMaxLayers);
  size("--attention-interval", options->interval, "Every N-th layer is attention", model::kMaxLayers);
  size("--vocab", options->vocabulary, "Rows of the embedding and the head", model::kMaxVocabulary);
  size("--max-positions", options->positions, "Longest context", model::kMaxPositions);
  size("--heads", options->heads, "Query heads", model::kMaxDimension);
  size("--kv-heads", options->kv_heads, "Key and value heads", model::kMaxDimension);
  size("--head-dim", options->head_dim, "Size of an attention head", 4096);
  size("--linear-key-heads", options->linear_key_heads, "Delta-net key heads", model::kMaxDimension);
  size("--linear-value-heads", options->linear_value_heads, "Delta-net value heads", model::kMaxDimension);
  size("--linear-key-dim", options->linear_key_dim, "Size of a delta-net key head", 4096);
  size("--linear-value-dim", options->linear_value_dim, "Size of a delta-net value head", 4096);
  size("--conv-taps", options->conv_taps, "Delta-net convolution width", 64, 2);
  size("--experts", options->experts, "Routed experts", model::kMaxExperts);
  size("--top-k", options->top_k, "Experts per token", model::kMaxExperts);
  size("--moe-intermediate", options->moe_intermediate, "Width of an expert", model::kMaxDimension);
  size("--shared-intermediate", options->shared_intermediate, "Width of the shared expert (0: none)",
       model::kMaxDimension, 0);
  size("--intermediate", options->intermediate, "Width of a dense MLP (makes the model dense)", model::kMaxDimension);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
