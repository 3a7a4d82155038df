// The plan of a card's memory (memory/plan.h) for the commands that run a model: made before anything is loaded, where
// the model is to run on a GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "cmd/model_options.h"
#include "engine/engine.h"
#include "memory/plan.h"

namespace fourfold::cmd {

struct MemoryArgs {
  std::optional<double> utilization;  // of the card; none: memory::kUtilization
};
// --gpu-memory-utilization
void add_memory_options(Command& command, MemoryArgs& args);

// What is loaded: a checkpoint's directory, or random weights where that is empty.
struct Planned {
  std::filesystem::path directory;
  const DummyArgs* dummy = nullptr;
  bool mtp = false;
  model::ModelOptions model = {.max_step_tokens = 0, .max_logit_rows = 0, .mtp = false, .progress = {}, .shard = {}};
  engine::EngineOptions engine;
  int64_t more_pages = 0, more_slots = 0;  // memory::Demand
  // What is tried in the place of these three where the card has no room for them, one after the other.
  struct Less {
    engine::EngineOptions engine;
    int64_t more_pages = 0, more_slots = 0;
  };
  std::vector<Less> less;
};

// memory::require() for the card that the backend will run on; none where that is the CPU, where
// --gpu-memory-utilization is an error. `less`: how many of planned.less had to be tried.
std::optional<memory::Plan> require_memory(const BackendArgs& backend, const MemoryArgs& args, const Planned& planned,
                                           size_t* less = nullptr);
// memory::largest() likewise. `positions`: the longest context that is sensible without being asked for.
std::optional<memory::Plan> largest_memory(const BackendArgs& backend, const MemoryArgs& args, const Planned& planned,
                                           const memory::Wishes& wishes, int64_t usual_sequences, int64_t positions);

// What the plan's cards have in use now beyond what they had then, in bytes.
uint64_t taken_since(const memory::Plan& plan);
// "31.20 of 31.80 GB planned are taken", of all cards.
std::string taken_text(const memory::Plan& plan, uint64_t taken);

}  // namespace fourfold::cmd
