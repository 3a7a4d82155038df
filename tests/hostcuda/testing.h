// What tests on the host driver share.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "base/temporary_directory.h"
#include "cuda/backend/backend.h"
#include "hostcuda/host_cuda.h"
#include "model/config.h"
#include "model/random_weights.h"
#include "model/ranked.h"

namespace fourfold::hostcuda {

// The demo model's shape with one layer of each kind, for what does not depend on how many there are.
inline model::ModelConfig one_layer_of_each_kind() {
  model::ModelConfig config = model::read_config(std::filesystem::path(FOURFOLD_SOURCE_DIR) / "models" / "demo");
  config.mtp_layers = 0;
  config.layer_kinds = {model::LayerKind::kDeltaNet, model::LayerKind::kAttention};
  config.layers = 2;
  return config;
}

// With such formats a shared expert has no place among the others: its share is added by itself, or taken along.
inline ops::Format experts_in_bf16(model::WeightKind kind) {
  const bool expert = kind == model::WeightKind::kSharedExpert || kind == model::WeightKind::kRoutedExpert;
  return expert ? ops::Format::kBf16 : model::default_format(kind);
}

// One for the whole test program.
inline const std::filesystem::path& kernel_store() {
  static const TemporaryDirectory folder;
  return folder.path();
}

// Emulated steps take seconds where tests run side by side; those of the deadline have their own.
inline constexpr std::chrono::milliseconds kEmulatedStep{std::chrono::minutes(1)};

// Self-tests of kernels are tests of their own.
inline cuda::CudaOptions cuda_options(bool overlap = true, bool fp8_cache = false, bool wide = true,
                                      bool graphs = true) {
  cuda::CudaOptions options;
  options.store = kernel_store();
  options.overlap = overlap;
  options.self_test = options.test_kernels = false;
  options.fp8_cache = fp8_cache;
  options.wide = wide;
  options.graphs = graphs;
  options.threads = 2;
  options.step_deadline = kEmulatedStep;
  return options;
}

// The backend on the card that is installed.
inline std::shared_ptr<ops::Backend> cuda_backend(bool overlap = true, bool fp8_cache = false, bool wide = true,
                                                  bool graphs = true,
                                                  std::chrono::milliseconds step_deadline = kEmulatedStep,
                                                  const std::string& emulate = "") {
  cuda::CudaOptions options = cuda_options(overlap, fp8_cache, wide, graphs);
  options.step_deadline = step_deadline;
  options.emulate = emulate;
  return cuda::make_backend(options);
}

// Of each rank, on a card of its own or all on the first. What kernels wait is counted in looks here.
inline model::BackendFactory rank_backends(bool one_card = false, int64_t looks = 100000,
                                           const cuda::CudaOptions& base = cuda_options()) {
  return [=](const std::shared_ptr<ranks::Member>& member) {
    cuda::CudaOptions options = base;
    options.member = member;
    options.device = one_card || member == nullptr ? 0 : static_cast<int>(member->rank());
    options.exchange_bytes = 1 << 18;
    options.patience = std::chrono::nanoseconds(looks);
    return cuda::make_backend(options);
  };
}

}  // namespace fourfold::hostcuda
