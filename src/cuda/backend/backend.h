// The CUDA backend: a model's operations (ops/ops.h) on one NVIDIA GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/backend/sum_ways.h"
#include "cuda/device/device.h"
#include "ops/ops.h"
#include "plan/kernel.h"
#include "plan/step/work.h"
#include "ranks/group.h"

namespace fourfold::cuda {

inline constexpr int64_t kMostLayerRows = 16384;  // of one launch of an expert layer

struct CudaOptions {
  int device = 0;
  int threads = 0;              // of the host, for sampling; 0: the default of base/threads.h
  std::filesystem::path store;  // of compiled kernels; empty: jit::default_store_directory()
  bool overlap = true;          // kernels may start before the one before them has ended
  bool graphs = true;           // launches of a step's parts are recorded and replayed
  bool self_test = true;        // of the expert kernels
  bool test_kernels = true;     // self-test of all other kernels when a stepper is made
  bool measured_ways = true;    // of products, where `fourfold tune --products` has measured them on this card
  int64_t library_rows = 0;     // products of so many rows and more by cuBLASLt; 0: by the backend's own kernels
  bool fp8_cache = false;       // keys and values as e4m3, scale 1; otherwise bf16
  // Products and attention of more than 16 rows by kernels for many rows, and tokens chosen on the card; otherwise 16
  // rows follow each other, and the host chooses.
  bool wide = true;
  // Of a model that is split over cards: this rank. Null: the model is whole.
  std::shared_ptr<ranks::Member> member;
  uint64_t exchange_bytes = 0;  // that each rank has for the others' parts of sums; 0: by their number
  int64_t check_sums = 0;       // not 0: steps from one comparison of the ranks' sums to the next
  SumTable sums;                // how they get from card to card
  // Tokens are chosen from what each rank finds in its own columns of the logits; where more is needed than that
  // (log-probabilities of rows with biases, masks, banned tokens or penalties), columns are brought together as they
  // are without this.
  bool choose_by_parts = true;
  // And in steps of so many rows at most where one is drawn or asks for log-probabilities, or where there are only one
  // or two: bringing logits together takes less than the rounds of a search for limits. 0: never.
  int64_t gathered_rows = 16;
  // Steps of lanes with drafts begin before the host knows the tokens of the one before: the card verifies, feeds the
  // drafter and drafts without it.
  bool rounds_ahead = true;
  // Of a kernel, for another rank. Less than what the ranks' threads have for each other (ranks::kPatience), so that
  // who did not come is said by whom waited.
  std::chrono::nanoseconds patience = std::chrono::seconds(5);
  std::chrono::milliseconds step_deadline = kStepDeadline;  // of a step that does not end
  // A card as `plan --gpu` names it: its kernels run here, compiled for this card, within that card's shared memory and
  // with its multiplications emulated where this one has none; a check, no measurement. Empty: this card's own.
  std::string emulate;
};

// Error when there is no such device, no NVRTC, or an architecture that plan/arch.h does not list.
std::shared_ptr<ops::Backend> make_backend(const CudaOptions& options);

// Of the driver; 0 without one.
int device_count();

// A backend of the same kind that computes nothing and allocates nothing: what a model loaded on it, its caches and its
// stepper would take is counted (memory_of()). Weights need shapes and formats only. For a card `info` with so many
// bytes of memory, which need not be there.
std::shared_ptr<ops::Backend> make_counting_backend(const CudaOptions& options, const jit::DeviceInfo& info,
                                                    uint64_t memory_bytes);
// What operations on such a backend would launch while `run` runs, in order.
std::vector<plan::step::Work> works_of(ops::Backend& counting, const std::function<void()>& run);
// The kernels that a model loaded on such a backend, and its stepper, have asked for: each source once.
struct ListedKernel {
  plan::KernelSource source;
  std::string operation;  // what it computes, for people
};
// Kernels of experts that `refused` names are done without, as build_all() wants it; those for more than `most_rows`
// rows of a step are left out.
std::vector<ListedKernel> kernels_of(const ops::Backend& counting, const std::set<std::string>& refused = {},
                                     int64_t most_rows = int64_t{1} << 20);
// What the self-tests of these kernels find on the card that `options` names, those of experts for steps of up to
// `most_rows` rows. Compiles what the store lacks.
struct KernelReport {
  std::string device;
  int64_t kernels = 0;                       // that were tested
  std::map<std::string, std::string> wrong;  // what was wrong, by name
};
KernelReport test_kernels_of(const ops::Backend& counting, const CudaOptions& options,
                             int64_t most_rows = kMostLayerRows);
const Device& device_of(const ops::Backend& backend);
// Of the buffers of such a backend, or of one on a card.
MemoryCounts memory_of(const ops::Backend& backend);

// What a card has beside buffers, at most: kernels and the memory that they spill to, and recorded graphs.
inline constexpr uint64_t kBesideBuffers = uint64_t{768} << 20;
// That weights are loaded through, before there are caches.
extern const uint64_t kLoadingBytes;
struct CardMemory {
  jit::DeviceInfo info;
  DeviceMemory memory;  // now, with the program's context in it
  int device = 0;       // its number
};
CardMemory card_memory(int device);

// Why a model of so many bytes of weights cannot run on the device, or empty.
std::string refusal_of(int device, uint64_t weight_bytes);

}  // namespace fourfold::cuda
