// The model that `serve` and `batch` answer with: which one, by which names, on what, and how large its engine is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cmd/arguments.h"
#include "cmd/card_memory.h"
#include "cmd/model_options.h"
#include "serve/service.h"

namespace fourfold::cmd {

struct ServedModelArgs {
  // `answers`: --max-num-seqs on a CPU where it is not given.
  explicit ServedModelArgs(int64_t answers) : usual_sequences(answers) {}

  std::string directory;  // empty: the demo model
  std::vector<std::string> names;
  int64_t usual_sequences;
  int64_t context = 0, sequences = 0, step_tokens = 0, cache_tokens = 0;  // 0: not given
  MemoryArgs memory;
  BackendArgs backend;
};
// dir, --max-model-len, --max-num-seqs, --max-num-batched-tokens, --kv-cache-tokens, and those of the backend. How many
// names an option takes is the command's: --served-model-name.
void add_served_model_options(Command& command, ServedModelArgs& args);
// An Error where the directory is none; `command` is who says so.
void set_served_model(serve::ServiceOptions& service, const ServedModelArgs& args, const char* command);

// On a GPU: sizes that fit its memory, or an Error. After everything else of the engine was set. The plan, if there is
// one.
std::optional<memory::Plan> plan_served_model(serve::ServiceOptions& service, const ServedModelArgs& args);

}  // namespace fourfold::cmd
