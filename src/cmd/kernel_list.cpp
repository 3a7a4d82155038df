#include "cmd/kernel_list.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "cmd/model_options.h"
#include "cuda/device/device.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "model/shape_source.h"
#include "plan/step/step.h"
#include "predict/step.h"

namespace fourfold::cmd {
bool is_whole_model(const std::string& model) {
  std::error_code error;
  if (std::filesystem::is_directory(model, error)) return true;
  const std::vector<std::string> names = model::shape_names();
  return std::find(names.begin(), names.end(), model) != names.end();
}

ModelKernels::ModelKernels(const plan::Gpu& card, const std::string& model, const std::string& mix) : card_(card) {
  std::error_code error;
  if (std::filesystem::is_directory(model, error)) {
    if (!mix.empty()) fail("--mix {}: {} is a checkpoint, whose formats are its own", mix, model);
    model::Checkpoint checkpoint(model);
    rehearse(*model::shapes_of(checkpoint));
    return;
  }
  model::ModelConfig config = model::shape_config(model);
  config.mtp_layers = 1;
  for (const plan::step::Mix& each : plan::step::mixes()) {
    if (!mix.empty() && plan::step::find_mix(mix).name != each.name) continue;
    for (const bool blocks : {false, true}) {
      rehearse(*model::shapes_of(config, predict::formats_of(each), blocks));
    }
  }
}

// Loads the model on backends that count and lets it take a step. Which kernels there are does not depend on how many
// rows.
void ModelKernels::rehearse(model::WeightSource& source) {
  constexpr int64_t kRows = 32, kPage = 64;
  constexpr uint64_t kBytes = uint64_t{1} << 50;  // nothing is too large for a card that only counts
  model::ModelOptions options;
  options.max_step_tokens = options.max_logit_rows = kRows;
  options.mtp = true;
  for (const bool fp8_cache : {false, true}) {
    cuda::CudaOptions cuda_options;
    cuda_options.fp8_cache = fp8_cache;
    backends_.push_back(cuda::make_counting_backend(cuda_options, cuda::info_of(card_), kBytes));
    const auto model = model::load_model(source, backends_.back(), options);
    model::Caches caches = model->make_caches(1, kPage, 1);
    model->make_stepper({.lanes = 1,
                         .rows = kRows,
                         .logit_rows = kRows,
                         .drafts = model->has_mtp() ? 1 : 0,
                         .context = kPage,
                         .page_size = kPage,
                         .vocabulary = model->config().vocabulary},
                        caches);
  }
}

std::vector<cuda::ListedKernel> ModelKernels::list(const std::set<std::string>& refused) const {
  std::vector<cuda::ListedKernel> all;
  std::set<std::string> seen;
  for (const auto& backend : backends_) {
    for (cuda::ListedKernel& kernel : cuda::kernels_of(*backend, refused)) {
      if (seen.insert(kernel.source.name).second) all.push_back(std::move(kernel));
    }
  }
  return all;
}

}  // namespace fourfold::cmd
