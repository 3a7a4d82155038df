// What run, eval and bench have in common: options of the backend, random weights instead of a checkpoint, loading with
// a progress bar, and what a decode step costs at least.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "chat/model_directory.h"
#include "chat/sampling.h"
#include "cmd/arguments.h"
#include "cpu/backend.h"
#include "cuda/backend/backend.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "model/ranked.h"
#include "plan/step/step.h"

namespace fourfold::cmd {

struct BackendArgs {
  std::string isa, activations = "bf16";
  std::string device;  // empty: FOURFOLD_DEVICE, or auto
  std::string kv_cache = "auto";
  std::string emulate;  // a card whose kernels are to run on the GPU
  bool no_self_test = false;
  int threads = 0;
  int64_t ranks = 1;
  bool by_expert = false;
  int64_t check_sums = 0;
};
// --device, --emulate, --no-self-test, --threads, --isa, --activations, --kv-cache-dtype, --tensor-parallel-size,
// --enable-expert-parallel, --check-sums
void add_backend_options(Command& command, BackendArgs& args);
// Makes the backend, or one for each rank, which share the threads; on the CPU, with a warning, where nobody asked for
// the GPU and it has no kernels for the model.
chat::BackendFactory backend_factory(const BackendArgs& args);
// The same without a second choice. `weight_bytes`: of the model, for --device auto; 0: not known, it runs on the CPU.
model::BackendFactory rank_backends(const BackendArgs& args, uint64_t weight_bytes = 0);
model::RankOptions rank_options(const BackendArgs& args);
// The CUDA device that was asked for, a rank's, or that `auto` takes for so many bytes of weights; none: the CPU.
std::optional<int> chosen_device(const BackendArgs& args, uint64_t weight_bytes, int64_t rank = 0);
std::string device_name(const BackendArgs& args);  // as it was asked for
// What a backend on a card is made with.
cuda::CudaOptions cuda_options(const BackendArgs& args, int device);
// Rows from which on products on a GPU go to cuBLASLt: FOURFOLD_PRODUCTS, or 0 (none).
int64_t library_rows();
// How ranks on GPUs add up: FOURFOLD_SUMS, or as measured.
cuda::SumTable sum_table();
cpu::Isa chosen_isa(const BackendArgs& args);
int chosen_threads(const BackendArgs& args);

// --temperature, --top-k, --top-p, --min-p, --repetition-penalty, --presence-penalty, --frequency-penalty
void add_sampling_options(Command& command, chat::SamplingChoice& sampling);

// A published shape with random weights, instead of a checkpoint.
struct DummyArgs {
  std::string shape;
  int64_t layers = 0, vocabulary = 0;  // 0: as published
  std::string mix;                     // of formats (plan::step::find_mix); empty: NVFP4 but for head and router
};
// --dummy, --layers, --vocab, --mix
void add_dummy_options(Command& command, DummyArgs& args);
model::ModelConfig dummy_config(const DummyArgs& args, bool mtp = false);
model::FormatOf dummy_formats(const DummyArgs& args);
uint64_t dummy_bytes(const DummyArgs& args, bool mtp);

// --activations nvfp4 is an error where it applies to no matrix of the checkpoint, and elsewhere a note says to how
// many. Called by load_checkpoint().
void check_activations(const BackendArgs& args, const std::filesystem::path& directory);

// With a progress bar; `options.progress` is set here.
chat::LoadedModel load_checkpoint(const std::filesystem::path& directory, const BackendArgs& backend,
                                  model::ModelOptions options);
chat::LoadedModel load_dummy(const DummyArgs& dummy, const BackendArgs& backend, model::ModelOptions options);

// Bytes that one decode step must read at least, as a function of the tokens before it: weights, which do not depend on
// it, and caches, which are proportional. Taken from Model::cost(), for when the engine owns the model.
class CostOfDecode {
 public:
  CostOfDecode(const model::Model& model, int64_t max_context);
  double bytes(double context) const { return base_ + slope_ * context; }

 private:
  double base_ = 0, slope_ = 0;
};

// Whether a good part of the weights stays in the processor's cache from token to token, so that the bandwidth of
// memory says nothing about their speed.
bool fits_in_cache(const chat::LoadedModel& loaded);

}  // namespace fourfold::cmd
