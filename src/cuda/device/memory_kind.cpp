#include "cuda/device/memory_kind.h"

#include <algorithm>

namespace fourfold::cuda {
namespace {

constexpr uint64_t kSmallest = 512;

uint64_t up_to(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

const char* memory_kind_name(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kWeightsNvfp4:
      return "weights, nvfp4";
    case MemoryKind::kWeightsFp8:
      return "weights, fp8";
    case MemoryKind::kWeightsBf16:
      return "weights, bf16";
    case MemoryKind::kWeightsF32:
      return "weights, fp32";
    case MemoryKind::kKeysAndValues:
      return "keys and values";
    case MemoryKind::kStates:
      return "recurrent states";
    case MemoryKind::kActivations:
      return "activations";
    case MemoryKind::kWorkspaces:
      return "workspaces";
    case MemoryKind::kTables:
      return "tables";
    case MemoryKind::kLoading:
      return "loading";
  }
  return "unknown";
}

// Shared pages are never all full: one more of them.
uint64_t MemoryLedger::taken() const { return large_ + (small_ == 0 ? 0 : up_to(small_, kDevicePage) + kDevicePage); }

void MemoryLedger::add(MemoryKind kind, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  MemoryCount& count = counts_.of[static_cast<size_t>(kind)];
  count.bytes += bytes;
  count.most = std::max(count.most, count.bytes);
  ++count.buffers;
  (bytes <= kLargestShared ? small_ : large_) += up_to(bytes, bytes <= kLargestShared ? kSmallest : kDevicePage);
  counts_.taken = taken();
  counts_.most_taken = std::max(counts_.most_taken, counts_.taken);
}

void MemoryLedger::remove(MemoryKind kind, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  MemoryCount& count = counts_.of[static_cast<size_t>(kind)];
  count.bytes -= bytes;
  --count.buffers;
  (bytes <= kLargestShared ? small_ : large_) -= up_to(bytes, bytes <= kLargestShared ? kSmallest : kDevicePage);
  counts_.taken = taken();
}

MemoryCounts MemoryLedger::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace fourfold::cuda
