// The CUDA backend: a model's operations (ops/ops.h) on one NVIDIA GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "ops/ops.h"
#include "ranks/group.h"

namespace fourfold::cuda {

// How parts of a sum get from card to card (docs/kernels/comm.md): each row with a flag, or every word its own flag.
enum class SumWay { kBySize, kFlags, kWords };

struct CudaOptions {
  int device = 0;
  int threads = 0;              // of the host, for sampling; 0: the default of base/threads.h
  std::filesystem::path store;  // of compiled kernels; empty: jit::default_store_directory()
  bool overlap = true;          // kernels may start before the one before them has ended
  bool graphs = true;           // launches of a step's parts are recorded and replayed
  bool self_test = true;        // of the expert kernels
  bool fp8_cache = false;       // keys and values as e4m3, scale 1; otherwise bf16
  // Products and attention of more than 16 rows by kernels for many rows, and tokens chosen on the card; otherwise 16
  // rows follow each other, and the host chooses.
  bool wide = true;
  // Of a model that is split over cards: this rank. Null: the model is whole.
  std::shared_ptr<ranks::Member> member;
  uint64_t exchange_bytes = uint64_t{128} << 20;  // that each rank has for the others' parts of sums
  SumWay sums = SumWay::kBySize;
  // Of a kernel, for another rank. Less than what the ranks' threads have for each other (ranks::kPatience), so that
  // who did not come is said by whom waited.
  std::chrono::nanoseconds patience = std::chrono::seconds(5);
};

// Error when there is no such device, no NVRTC, or kernels for its architecture are missing.
std::shared_ptr<ops::Backend> make_backend(const CudaOptions& options);

// Of the driver; 0 without one.
int device_count();

// Why a model of so many bytes of weights cannot run on the device, or empty.
std::string refusal_of(int device, uint64_t weight_bytes);

}  // namespace fourfold::cuda
