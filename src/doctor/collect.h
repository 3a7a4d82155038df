// The facts of this machine. Nothing here says whether they are good.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <string_view>

#include "base/json.h"

namespace fourfold::doctor {

struct CollectOptions {
  std::filesystem::path model;  // empty: no model is looked at
  int threads = 0;              // of the CPU's probes; 0: as a backend would have
  bool probes = true;
  std::chrono::milliseconds probe_limit{20'000};  // of each
};

// Everything: cpu, memory, system, environment, gpu, model, probes.
Json collect(const CollectOptions& options);

// ---- parts

// From /proc and /sys below `root`, which is "/" but in tests.
Json host_facts(const std::filesystem::path& root);
// Variables that change speed or results here or in libraries below, where they are set.
Json environment_facts();
// Libraries, PCI devices and IOMMU groups below `root`; what nvidia-smi and dmesg say.
Json gpu_facts(const std::filesystem::path& root, std::chrono::milliseconds limit);
// Lines of `nvidia-smi --query-gpu=kSmiFields --format=csv,noheader,nounits`.
extern const char* const kSmiFields;
Json parse_nvidia_smi(std::string_view csv);
// With the driver: what it says of each device, and bytes that were copied, in this process.
Json gpu_probe();
Json model_facts(const std::filesystem::path& directory);

}  // namespace fourfold::doctor
