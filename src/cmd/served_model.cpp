#include "cmd/served_model.h"

#include <algorithm>

#include "base/check.h"
#include "base/console.h"
#include "base/file.h"
#include "chat/model_directory.h"
#include "cuda/device/loader.h"
#include "model/config.h"

namespace fourfold::cmd {

void add_served_model_options(Command& command, ServedModelArgs& args) {
  command.add_option("dir", args.directory, "Checkpoint directory (default: the demo model)");
  command
      .add_option(
          "--max-model-len", args.context,
          "Tokens of prompt and answer (default: 8192, or what the model has; on a GPU all that it has, if they fit)")
      .range(2, 1 << 28);
  command
      .add_option("--max-num-seqs", args.sequences,
                  fmt::format("Answers computed at once (default: {}; on a GPU {} to {}, or what fits)",
                              args.usual_sequences, memory::kUsualCardSequences, memory::kCardSequences))
      .range(1, 1024);
  command
      .add_option("--max-num-batched-tokens", args.step_tokens,
                  fmt::format("Tokens of one step of the model (default: {}; on a GPU {}, or what fits)",
                              engine::EngineOptions().max_step_tokens, memory::kCardStepTokens))
      .range(1, 65536);
  command
      .add_option(
          "--kv-cache-tokens", args.cache_tokens,
          "Tokens that the cache holds (default: half of the context for each answer at once; on a GPU what is left)")
      .range(1, int64_t{1} << 30);
  add_backend_options(command, args.backend);
  add_memory_options(command, args.memory);
}

void set_served_model(serve::ServiceOptions& service, const ServedModelArgs& args, const char* command) {
  service.directory = args.directory.empty() ? chat::default_model_directory().string() : args.directory;
  if (!directory_exists(service.directory)) {
    fail("{}: {} is no directory", command, printable(service.directory.string(), 200));
  }
  service.names = args.names;
  service.make_backend = backend_factory(args.backend);
  service.kernels_disabled = [] { return static_cast<int64_t>(cuda::fallbacks().size()); };
  service.ranks = rank_options(args.backend);
  service.context = args.context;
  service.engine.max_sequences = args.sequences > 0 ? args.sequences : args.usual_sequences;
  if (args.step_tokens > 0) service.engine.max_step_tokens = args.step_tokens;
  service.engine.cache_tokens = args.cache_tokens;
}

std::optional<memory::Plan> plan_served_model(serve::ServiceOptions& service, const ServedModelArgs& args) {
  const model::ModelConfig config = model::read_config(service.directory);
  chat::choose_context(args.context, config.max_positions, "--max-model-len");
  Planned planned;
  planned.directory = service.directory;
  planned.mtp = service.engine.drafts != 0;
  planned.engine = service.engine;
  std::optional<memory::Plan> plan = largest_memory(
      args.backend, args.memory, planned, {args.context, args.sequences, args.cache_tokens, args.step_tokens},
      std::max(memory::kUsualCardSequences, args.usual_sequences), config.max_positions);
  if (!plan) return plan;
  service.context = plan->engine.max_context;
  service.engine.max_sequences = plan->engine.max_sequences;
  service.engine.max_step_tokens = plan->engine.max_step_tokens;
  service.engine.spare_logit_rows = plan->engine.spare_logit_rows;
  service.engine.cache_tokens = plan->engine.cache_tokens;
  service.engine.cached_states = plan->engine.cached_states;
  return plan;
}

}  // namespace fourfold::cmd
