#include "cmd/served_model.h"

#include "base/check.h"
#include "base/console.h"
#include "base/file.h"
#include "chat/model_directory.h"

namespace fourfold::cmd {

void add_served_model_options(Command& command, ServedModelArgs& args) {
  command.add_option("dir", args.directory, "Checkpoint directory (default: the demo model)");
  command
      .add_option("--max-model-len", args.context, "Tokens of prompt and answer (default: 8192, or what the model has)")
      .range(2, 1 << 28);
  command.add_option("--max-num-seqs", args.sequences, "Answers computed at once").range(1, 1024).show_default();
  command.add_option("--max-num-batched-tokens", args.step_tokens, "Tokens of one step of the model")
      .range(1, 65536)
      .show_default();
  command
      .add_option("--kv-cache-tokens", args.cache_tokens,
                  "Tokens that the cache holds (default: half of the context for each answer at once)")
      .range(1, int64_t{1} << 30);
  add_backend_options(command, args.backend);
}

void set_served_model(serve::ServiceOptions& service, const ServedModelArgs& args, const char* command) {
  service.directory = args.directory.empty() ? chat::default_model_directory().string() : args.directory;
  if (!directory_exists(service.directory)) {
    fail("{}: {} is no directory", command, printable(service.directory.string(), 200));
  }
  service.names = args.names;
  service.make_backend = backend_factory(args.backend);
  service.ranks = rank_options(args.backend);
  service.context = args.context;
  service.engine.max_sequences = args.sequences;
  service.engine.max_step_tokens = args.step_tokens;
  service.engine.cache_tokens = args.cache_tokens;
}

}  // namespace fourfold::cmd
