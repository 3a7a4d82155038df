// Runs device kernels on the host: one fiber per thread, one CTA after the other, several kernels of a chain.
//
// The kernels are the unchanged sources of src/kernels; only the wrappers of kernels/ptx are replaced, by include path
// (tests/executor/include comes first). Asynchronous copies complete at the last allowed moment, at once, or at random
// times; the bytes they will write hold NaN patterns until then. Threads are scheduled in random orders from a seed.
// Every access to shared memory is checked against the accesses of other threads that nothing orders before it, and
// every access to global memory against its buffer. docs/kernels/executor.md describes the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/ptx/tensor_map.h"

namespace fourfold::executor {

// When an asynchronous copy (or an asynchronous multiplication) takes place between its issue and the wait for it.
enum class Delivery { kAtOnce, kRandom, kLate };
// Which of the threads that can run goes on: any; one warp until it must wait; warps and lanes by random priorities, so
// that some stay behind for long.
enum class Order { kUniform, kSticky, kPriority };

// A call of a wrapper in a kernel's source.
struct Site {
  const char* file = "";
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  std::string text() const;  // "stream_sm90.cuh:312"
};

// The wrappers that a mutation can change.
enum class Op {
  kSyncThreads,
  kSyncWarp,
  kNamedBarrier,
  kBarrierWait,
  kBarrierArrive,
  kBarrierFence,
  kBulkCopy,
  kBulkStore,
  kBulkStoreCommit,
  kBulkStoreWait,
  kAsyncCopyCommit,
  kAsyncCopyWait,
  kAsyncFence,
  kWgmmaFence,
  kWgmmaCommit,
  kWgmmaWait,
  kGridWait,
  kFence,
  kFlagRaise,
  kFlagWait,
  kClusterArrive,
  kClusterWait,
  kShuffle,
  kMatrixLoad,
  kMatrixStore,
  kMma,
  kWgmma,
};
std::string_view to_string(Op op);

// A defect put into a kernel from outside: calls of `op` at `site` misbehave.
struct Mutation {
  enum class Kind {
    kNone,
    kDrop,    // the call does nothing
    kWeaken,  // a wait for at most n groups under way waits for at most n + 1
    kEarly,   // an arrival happens already at this thread's preceding mbarrier wait (`early_line`)
    kStale,   // the first fragments of each warp are overwritten before they are multiplied
  };
  Kind kind = Kind::kNone;
  Op op = Op::kSyncThreads;
  std::string file;  // name without folders
  int line = 0;
  int early_line = 0;
  std::string text() const;
};

struct Options {
  std::uint64_t seed = 1;
  Delivery delivery = Delivery::kLate;
  Order order = Order::kUniform;
  Mutation mutation;
};
// The combinations a test runs under: n of them, every delivery and order among the first nine.
std::vector<Options> schedules(int n, std::uint64_t seed = 1);

// A rule broken by the kernel. The message names kernel, CTA, thread, source line and what was violated.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  std::string name;
  Index3 grid;
  int threads = 32;
  unsigned shared_bytes = 0;
  // Programmatic dependent launch: the kernel may start before the one before it has ended, and must not touch what
  // that one reads or writes before grid_dependency_wait().
  bool programmatic = true;
  int resident = 1;  // CTAs that run at the same time, in turns
  int cluster = 1;   // CTAs of a cluster, one beside the other in x: they run at the same time
};

struct LaunchStats {
  std::uint64_t switches = 0;
  std::uint64_t bulk_copies = 0;
  std::uint64_t mma = 0;
  unsigned shared_high_water = 0;  // last byte of dynamic shared memory touched, plus one
};

// A call of a wrapper seen while running, for enumerating mutations.
using SeenSite = std::tuple<Op, std::string, int>;

// What tensor copies take: `rows` of `columns` 16-bit values, `stride` bytes from one to the next.
// `copied`: rows that one copy brings.
ptx::TensorMap make_tensor_map(const void* first, std::uint64_t rows, std::uint64_t columns, std::uint64_t stride,
                               std::uint64_t copied = 1);

class Machine;

// A device: its global memory and the chain of kernels launched on it.
class Device {
 public:
  explicit Device(const Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Global memory between red zones. Filled with 0xff (NaN in every format) and readable and writable by kernels.
  template <typename T>
  T* alloc(std::size_t count, const std::string& name) {
    return static_cast<T*>(alloc_bytes(count * sizeof(T), name));
  }
  // The same with contents; kernels may only read it.
  template <typename T>
  const T* constant(const std::vector<T>& values, const std::string& name) {
    T* p = alloc<T>(values.size(), name);
    for (std::size_t i = 0; i < values.size(); ++i) p[i] = values[i];
    make_constant(p);
    return p;
  }
  // Pages come into being when they are written, so that a buffer may be far larger than the host's memory.
  // Not filled.
  void* reserve(std::size_t bytes, const std::string& name);
  // Addresses are not used again: whoever still looks there is reported.
  void release(const void* buffer);
  void make_constant(const void* buffer);
  // The contents come from a kernel launched just before the next one, which must therefore wait for them.
  void produced(const void* buffer);

  // Runs `body` (a call of the kernel) in every thread of every CTA.
  LaunchStats launch(const LaunchConfig& config, const std::function<void()>& body);

  const std::set<SeenSite>& seen() const;
  // False in builds where plain loads and stores of kernels cannot be seen (sanitizer builds).
  static bool checks_plain_accesses();

 private:
  void* alloc_bytes(std::size_t bytes, const std::string& name);
  std::unique_ptr<Machine> machine_;
};

}  // namespace fourfold::executor
