// fourfold plan: what would run for an expert layer, or for a whole step, on a card, and why. Pure arithmetic, needs no
// GPU.
#include <cstdio>
#include <memory>

#include "base/check.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/shape_options.h"
#include "model/random_weights.h"
#include "plan/moe/plan.h"
#include "plan/step/step.h"

namespace fourfold::cmd {
namespace {

struct Options {
  ShapeOptions shape;
  int64_t tokens = 1, context = 128, drafts = 0;
  bool json = false, all = false, reachable = false, step = false, prefill = false, by_expert = false;
  std::string mix = "A", cache = "bf16", link = "nvlink";
};

plan::step::Model step_model(const std::string& name) {
  const model::ModelConfig c = model::shape_config(name);
  return {.name = name,
          .hidden = c.hidden,
          .vocabulary = c.vocabulary,
          .attention_layers = c.attention_layers(),
          .delta_layers = c.delta_net_layers(),
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .head_dim = c.head_dim,
          .key_heads = c.linear_key_heads,
          .value_heads = c.linear_value_heads,
          .key_dim = c.linear_key_dim,
          .value_dim = c.linear_value_dim,
          .conv_taps = c.conv_taps,
          .experts = c.experts,
          .top_k = c.top_k,
          .expert_width = c.moe_intermediate,
          .shared_width = c.shared_intermediate,
          .dense_width = c.intermediate};
}

std::string step_text(const Options& o) {
  if (o.shape.model.empty()) fail("--step: no model, wanted --model with one of the shapes that `generate` knows");
  if (o.cache != "bf16" && o.cache != "fp8") fail("--kv-cache-dtype '{}': wanted bf16 or fp8", printable(o.cache));
  const plan::step::Shape shape = {.tokens = o.tokens,
                                   .context = o.context,
                                   .prefill = o.prefill,
                                   .drafts = o.drafts,
                                   .fp8_cache = o.cache == "fp8",
                                   .ranks = o.shape.ranks,
                                   .link = plan::step::find_link(o.link),
                                   .by_expert = o.by_expert};
  const plan::step::StepPlan plan =
      plan_step(step_model(o.shape.model), plan::step::find_mix(o.mix), shape, o.shape.card());
  return o.json ? to_json(plan) + "\n" : to_text(plan);
}

std::string layer_text(const Options& o) {
  plan::moe::Problem problem = o.shape.problem();
  problem.tokens = o.tokens;
  const plan::moe::LayerPlan plan = plan::moe::plan_layer(problem, o.shape.card(), {.only_implemented = o.reachable});
  const plan::moe::PrintOptions print = {.all = o.all};
  return o.json ? plan::moe::to_json(plan, print) + "\n" : plan::moe::to_text(plan, print);
}

}  // namespace

void add_plan(Command& app) {
  auto options = std::make_shared<Options>();
  Options& o = *options;
  Command command = app.add_command(
      "plan",
      "Show the kernel plan of an expert layer: tile, shared memory to the byte, predicted time, rejections;\n"
      "with --step, predict a whole step of a model, operation by operation\n\n"
      "  fourfold plan --gpu rtx-pro-6000 --model 397B-A17B --tokens 8\n"
      "  fourfold plan --step --gpu h200 --model 35B-A3B --mix A --tokens 64 --context 2048\n"
      "  fourfold plan --step --gpu h200 --model 35B-A3B --tokens 8192 --context 0 --prefill");
  o.shape.add_to(command);
  command.add_option("--tokens", o.tokens, "Tokens in the batch; of a step, its sequences, or the tokens of a prefill")
      .show_default()
      .range(0, plan::moe::kLimits.tokens);
  command.add_flag("--reachable", o.reachable, "Consider only kernels that are built");
  command.add_flag("--all", o.all, "Name every ranked and every rejected candidate (megabytes)");
  command.add_flag("--json", o.json, "Print JSON");
  const char* group = "Of a whole step";
  command.add_flag("--step", o.step, "Predict a step of the model instead of one expert layer");
  command.add_option("--mix", o.mix, "Formats of the weights: " + plan::step::mix_names()).show_default().group(group);
  command.add_option("--context", o.context, "Positions before these tokens")
      .show_default()
      .range(0, int64_t{1} << 28)
      .group(group);
  command.add_flag("--prefill", o.prefill, "The tokens are a prompt's");
  command.add_option("--draft", o.drafts, "Drafts of the MTP head in a round, verified together")
      .show_default()
      .range(0, 15)
      .group(group);
  command.add_option("--kv-cache-dtype", o.cache, "Keys and values: bf16 or fp8").show_default().group(group);
  command.add_option("--link", o.link, "Between ranks: nvlink, pcie (peer copies), host").show_default().group(group);
  command.add_flag("--enable-expert-parallel", o.by_expert, "Ranks have whole experts instead of a part of each");
  for (const char* name :
       {"--enable-expert-parallel", "--mix", "--context", "--prefill", "--draft", "--kv-cache-dtype", "--link"}) {
    command.need(name, "--step");
  }
  for (const char* name : {"--experts", "--top-k", "--hidden", "--intermediate", "--activations", "--weights",
                           "--activation", "--shared", "--reachable", "--all"}) {
    command.exclude("--step", name);
  }
  command.callback([options] {
    const std::string text = options->step ? step_text(*options) : layer_text(*options);
    std::fputs(text.c_str(), stdout);
  });
}

}  // namespace fourfold::cmd
