// fourfold batch: a file of requests through the engine at full throughput.
#include "batch/batch.h"

#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/check.h"
#include "base/console.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/progress.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/engine_load.h"
#include "cmd/served_model.h"

namespace fourfold::cmd {
namespace {

struct Options {
  std::string input, output, draft = "0", draft_tokens = "auto";
  ServedModelArgs model{32};
  bool json = false;
};

void run(const Options& options) {
  install_interrupt_handler();
  batch::BatchOptions batch;
  batch.input = options.input;
  batch.output = options.output;
  serve::ServiceOptions& service = batch.service;
  set_served_model(service, options.model, "batch");
  // The batch bounds its requests by itself; each may ask for several answers.
  service.engine.max_queued = 1 << 20;
  service.engine.drafts = parse_drafts(options.draft);
  service.engine.draft_tokens = parse_draft_tokens(options.draft_tokens);
  service.log_requests = false;
  if (const auto plan = plan_served_model(service, options.model)) eprint("{}", memory::text(*plan));
  std::unique_ptr<Progress> progress;
  int64_t done = 0, lines = 0;
  batch::BatchResult result;
  try {
    result = batch::run_batch(batch, [&](int64_t now, int64_t all) {
      if (!progress) progress = std::make_unique<Progress>("batch", static_cast<uint64_t>(all), "answers");
      progress->set(static_cast<uint64_t>(now));
      done = now;
      lines = all;
    });
  } catch (const Interrupted&) {
    progress.reset();
    throw Interrupted(
        fmt::format("interrupted: {} of {} lines have their answers, the same command goes on", done, lines));
  }
  progress.reset();
  const double rate = result.seconds > 0 ? static_cast<double>(result.output_tokens) / result.seconds : 0;
  if (options.json) {
    const Json out = {{"lines", result.lines},
                      {"answered", result.answered},
                      {"answered_before", result.before},
                      {"failed", result.failures},
                      {"prompt_tokens", result.prompt_tokens},
                      {"output_tokens", result.output_tokens},
                      {"seconds", result.seconds},
                      {"output_tokens_per_s", rate}};
    fmt::print("{}\n", out.dump(2));
  } else {
    eprint("{} lines: {} answered in {:.1f} s, {} before; {} output tokens, {:.1f} a second\n", result.lines,
           result.answered, result.seconds, result.before, result.output_tokens, rate);
  }
  if (result.failures > 0) {
    warn(fmt::format("{} of {} lines have an error instead of an answer, each in its line of {}", result.failures,
                     result.lines, options.output));
    throw ExitStatus{2};
  }
}

}  // namespace

void add_batch(Command& app) {
  const auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "batch",
      "Answer a file of requests, in OpenAI's batch format\n\n"
      "  fourfold batch IN.jsonl OUT.jsonl           the demo model\n"
      "  fourfold batch IN.jsonl OUT.jsonl DIR       a checkpoint\n\n"
      "A line of IN is {\"custom_id\", \"method\": \"POST\", \"url\", \"body\"}, with the urls and bodies of `serve`. "
      "Whatever\n"
      "ends it, the same command goes on: lines that have an answer in OUT are left alone. Exit status 2 where a line "
      "failed.");
  command.add_option("in", options->input, "The requests").required();
  command.add_option("out", options->output, "The answers; those that are there stay").required();
  add_served_model_options(command, options->model);
  command
      .add_option("--served-model-name", options->model.names,
                  "Names that requests may give the model (default: the directory's)")
      .one_each();
  command.add_option("--draft", options->draft, "Drafts of the MTP head a step: 0 to 5, or auto").show_default();
  add_draft_tokens_option(command, options->draft_tokens);
  command.add_flag("--json", options->json, "Print the figures as one JSON object");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
