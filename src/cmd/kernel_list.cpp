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

ModelKernels::ModelKernels(const jit::DeviceInfo& card, const std::string& model, const std::string& mix,
                           const model::RankOptions& ranks)
    : card_(card), ranks_(ranks) {
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
    if (library_rows() > 0) cuda_options.library_rows = kRows;
    const size_t first = backends_.size();
    backends_.resize(first + static_cast<size_t>(ranks_.ranks));
    const auto make_backend = [&](const std::shared_ptr<ranks::Member>& member) {
      const auto rank = static_cast<size_t>(member == nullptr ? 0 : member->rank());
      cuda::CudaOptions mine = cuda_options;
      mine.member = member;
      mine.device = static_cast<int>(rank);
      backends_[first + rank] = {cuda::make_counting_backend(mine, card_, kBytes), fp8_cache};
      return backends_[first + rank].backend;
    };
    const auto model = model::load_model(source, make_backend, ranks_, options);
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
  for (const Counted& counted : backends_) {
    for (cuda::ListedKernel& kernel : cuda::kernels_of(*counted.backend, refused)) {
      if (seen.insert(kernel.source.name).second) all.push_back(std::move(kernel));
    }
  }
  return all;
}

Json ModelKernels::test(int device, const std::filesystem::path& store) const {
  std::set<std::string> seen;
  int64_t kernels = 0;
  for (const cuda::ListedKernel& kernel : list()) kernels += static_cast<int64_t>(kernel.source.entries.size());
  Json wrong = Json::array();
  std::string name;
  for (const Counted& counted : backends_) {
    cuda::CudaOptions options;
    options.device = device;
    options.store = store;
    options.fp8_cache = counted.fp8_cache;
    const cuda::KernelReport report = cuda::test_kernels_of(*counted.backend, options);
    name = report.device;
    for (const auto& [kernel, reason] : report.wrong) {
      if (seen.insert(kernel).second) wrong.push_back({{"kernel", kernel}, {"reason", reason}});
    }
  }
  return {{"device", name}, {"kernels", kernels}, {"wrong", std::move(wrong)}};
}

}  // namespace fourfold::cmd
