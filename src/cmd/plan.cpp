// fourfold plan: what would run for an expert layer on a card, and why. Pure arithmetic, needs no GPU.
#include "plan/moe/plan.h"
#include "cmd/arguments.h"

#include <cstdio>
#include <memory>

#include "base/check.h"
#include "cmd/commands.h"
#include "cmd/shape_options.h"

namespace fourfold::cmd {

void add_plan(Command& app) {
  struct Options {
    ShapeOptions shape;
    int64_t tokens = 1;
    bool json = false, all = false, reachable = false;
  };
  auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "plan", "Show the kernel plan of an expert layer: tile, shared memory to the byte, predicted time, rejections");
  options->shape.add_to(command);
  command.add_option("--tokens", options->tokens, "Tokens in the batch")
      .show_default()
      .range(0, plan::moe::kLimits.tokens);
  command.add_flag("--reachable", options->reachable, "Consider only kernels that are built");
  command.add_flag("--all", options->all, "Name every ranked and every rejected candidate (megabytes)");
  command.add_flag("--json", options->json, "Print JSON");
  command.callback([options] {
    plan::moe::Problem problem = options->shape.problem();
    problem.tokens = options->tokens;
    const plan::moe::LayerPlan result =
        plan::moe::plan_layer(problem, options->shape.card(), {.only_implemented = options->reachable});
    const plan::moe::PrintOptions print = {.all = options->all};
    const std::string text =
        options->json ? plan::moe::to_json(result, print) + "\n" : plan::moe::to_text(result, print);
    std::fputs(text.c_str(), stdout);
  });
}

}  // namespace fourfold::cmd
