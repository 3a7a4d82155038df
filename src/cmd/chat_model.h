// What run, eval and bench have in common: which model, on which backend, loaded with a progress bar.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "cmd/arguments.h"
#include "cpu/backend.h"
#include "model/model.h"

namespace fourfold::cmd {

struct BackendArgs {
  std::string isa, activations = "bf16";
  int threads = 0;
};
// --threads, --isa, --activations
void add_backend_options(Command& command, BackendArgs& args);
std::shared_ptr<ops::Backend> make_backend(const BackendArgs& args);
cpu::Isa chosen_isa(const BackendArgs& args);
int chosen_threads(const BackendArgs& args);

// A published shape with random weights, instead of a checkpoint.
struct DummyArgs {
  std::string shape;
  int64_t layers = 0, vocabulary = 0;  // 0: as published
};
// --dummy, --layers, --vocab
void add_dummy_options(Command& command, DummyArgs& args);
model::ModelConfig dummy_config(const DummyArgs& args);

// FOURFOLD_MODEL, or the demo model: beside the executable's data (../share/fourfold/models/demo) or in the source tree
// that it was built in. An Error says where it looked.
std::filesystem::path default_model_directory();

struct Loaded {
  std::unique_ptr<model::Model> model;
  std::string name;  // for people
  double seconds = 0;
};
// `options.progress` is set here.
Loaded load_checkpoint(const std::filesystem::path& directory, const BackendArgs& backend, model::ModelOptions options);
Loaded load_dummy(const DummyArgs& dummy, const BackendArgs& backend, model::ModelOptions options);

// Bytes that one decode step must read at least, as a function of the tokens before it: weights, which do not depend on
// it, and caches, which are proportional. Taken from Model::cost(), for when the engine owns the model.
class CostOfDecode {
 public:
  CostOfDecode(const model::Model& model, int64_t max_context);
  double bytes(double context) const { return base_ + slope_ * context; }

 private:
  double base_ = 0, slope_ = 0;
};

// Bytes per second that `threads` threads read from memory together, in about 0.2 s: good to a few
// percent. cpu/ceilings.h takes longer and is what benchmarks use.
double quick_read_bandwidth(int threads);

}  // namespace fourfold::cmd
