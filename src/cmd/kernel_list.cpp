#include "cmd/kernel_list.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "cmd/model_options.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "model/shape_source.h"
#include "plan/step/step.h"
#include "predict/step.h"

namespace fourfold::cmd {
namespace {

// Loads the model on the list and lets it take a step. Which kernels there are does not depend on how many rows.
void rehearse(model::WeightSource& source, const std::shared_ptr<cuda::KernelListing>& list) {
  constexpr int64_t kRows = 32, kPage = 64;
  model::ModelOptions options;
  options.max_step_tokens = options.max_logit_rows = kRows;
  options.mtp = true;
  const auto model = model::load_model(source, list, options);
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

}  // namespace

bool is_whole_model(const std::string& model) {
  std::error_code error;
  if (std::filesystem::is_directory(model, error)) return true;
  const std::vector<std::string> names = model::shape_names();
  return std::find(names.begin(), names.end(), model) != names.end();
}

ModelKernels::ModelKernels(const plan::Gpu& card, const std::string& model, const std::string& mix)
    : list_(std::make_shared<cuda::KernelListing>(card, cuda::ListingOptions{.fp8_caches = {false, true}})) {
  std::error_code error;
  if (std::filesystem::is_directory(model, error)) {
    if (!mix.empty()) fail("--mix {}: {} is a checkpoint, whose formats are its own", mix, model);
    model::Checkpoint checkpoint(model);
    rehearse(*model::shapes_of(checkpoint), list_);
    return;
  }
  model::ModelConfig config = model::shape_config(model);
  config.mtp_layers = 1;
  for (const plan::step::Mix& each : plan::step::mixes()) {
    if (!mix.empty() && plan::step::find_mix(mix).name != each.name) continue;
    for (const bool blocks : {false, true}) {
      rehearse(*model::shapes_of(config, predict::formats_of(each), blocks), list_);
    }
  }
}

}  // namespace fourfold::cmd
