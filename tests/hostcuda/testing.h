// What tests on the host driver share.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>

#include "cuda/backend/backend.h"
#include "hostcuda/host_cuda.h"

namespace fourfold::hostcuda {

// A folder that goes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fourfold-hostcuda-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// One for the whole test program.
inline const std::filesystem::path& kernel_store() {
  static const TemporaryFolder folder;
  return folder.path();
}

// The backend on the card that is installed. Self-tests of the expert kernels are tests of their own.
inline std::shared_ptr<ops::Backend> cuda_backend(bool overlap = true, bool fp8_cache = false, bool wide = true,
                                                  bool graphs = true,
                                                  std::chrono::milliseconds step_deadline = cuda::kStepDeadline) {
  cuda::CudaOptions options;
  options.store = kernel_store();
  options.overlap = overlap;
  options.self_test = false;
  options.fp8_cache = fp8_cache;
  options.wide = wide;
  options.graphs = graphs;
  options.threads = 2;
  options.step_deadline = step_deadline;
  return cuda::make_backend(options);
}

}  // namespace fourfold::hostcuda
