// What memory of a device is for, and how much of it there is for each purpose.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace fourfold::cuda {

enum class MemoryKind : uint8_t {
  kWeightsNvfp4,  // a stack of several formats counts as what most of it is
  kWeightsFp8,
  kWeightsBf16,  // and f16
  kWeightsF32,
  kKeysAndValues,
  kStates,
  kActivations,
  kWorkspaces,
  kTables,
  kLoading,  // only while weights are loaded
};
inline constexpr size_t kMemoryKinds = 10;
const char* memory_kind_name(MemoryKind kind);

struct MemoryCount {
  uint64_t bytes = 0, most = 0;  // now, and at most so far
  int64_t buffers = 0;
};
struct MemoryCounts {
  std::array<MemoryCount, kMemoryKinds> of = {};
  // Of all buffers together, as the driver hands memory out (driver_bytes()); now, and at most so far.
  uint64_t taken = 0, most_taken = 0;
};

// What an allocation takes of a device's memory: those of at most 1 MiB come out of blocks that they share, larger ones
// are whole pages of 2 MiB.
inline constexpr uint64_t kDevicePage = uint64_t{2} << 20, kLargestShared = uint64_t{1} << 20;

// Counts the buffers of one device. Thread-safe.
class MemoryLedger {
 public:
  void add(MemoryKind kind, uint64_t bytes);
  void remove(MemoryKind kind, uint64_t bytes);
  MemoryCounts counts() const;

 private:
  uint64_t taken() const;

  mutable std::mutex mutex_;
  MemoryCounts counts_;
  uint64_t small_ = 0, large_ = 0;  // bytes of buffers that share pages, in pieces of 512; of those with their own
};

}  // namespace fourfold::cuda
