// A CUDA device and what lives on it: memory, streams, events, graphs and kernels, through the driver's functions that
// src/jit opens at run time. Owners free what they hold; all of them must go before the process ends, none of them may
// outlive it. Not thread-safe: one thread at a time uses a device (Device::make_current() moves it to another thread).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/memory/available.h"
#include "cuda/device/load_times.h"
#include "cuda/device/memory_kind.h"
#include "jit/driver.h"
#include "kernels/ptx/tensor_map.h"
#include "plan/arch.h"

namespace fourfold::cuda {

using jit::DeviceAddress;

template <typename T>
T* device_pointer(DeviceAddress address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

struct DeviceMemory {
  uint64_t free = 0, total = 0;  // bytes
};
struct Kernel;
struct Grid;

// Of what a driver says is free. In one pool with the processor it leaves out what the system can free, such as pages
// of files that were read, and knows no limit of a control group: there `available` counts, where it is known.
DeviceMemory memory_of_device(jit::HostMemory kind, const DeviceMemory& driver, const cpu::AvailableMemory& available);

class Device {
 public:
  // Makes the device's context current on this thread. Error when there is no driver, no such device, or when no kernel
  // family knows its architecture.
  explicit Device(int index = 0);
  // A card that is not there (counting_driver.h), with so many bytes of memory.
  Device(const jit::DeviceInfo& info, uint64_t memory_bytes);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void make_current() const;
  const jit::DeviceInfo& info() const { return info_; }
  // The planner's row: the card of the table that this is, or the fastest of its architecture with this one's limits.
  const plan::Gpu& gpu() const { return gpu_; }
  const jit::Driver& driver() const { return driver_; }
  DeviceMemory memory() const;  // memory_of_device()
  bool only_counts() const { return own_driver_ != nullptr; }
  // Called before each launch; on a card that only counts launches do nothing else. `early`: it may start before the
  // launch ahead of it has ended.
  using LaunchNote = std::function<void(const Kernel& kernel, const Grid& grid, bool early)>;
  void set_launch_note(LaunchNote note) const { launch_note_ = std::move(note); }
  const LaunchNote& launch_note() const { return launch_note_; }
  // Of all buffers that are there.
  MemoryLedger& ledger() const { return ledger_; }
  LoadTimes& load_times() const { return load_times_; }
  MemoryKind memory_kind() const { return memory_kind_; }
  // How long a wait may take before it is given up.
  std::chrono::milliseconds deadline() const { return deadline_; }
  void set_deadline(std::chrono::milliseconds deadline) const { deadline_ = deadline; }
  // Asks until `query` answers something else than jit::kNotReady. Error when it is one, or when nothing comes within
  // the deadline, with `what`; the device is lost then.
  void wait(const std::function<int()>& query, const std::string& what) const;
  // A wait was given up: what the device still does is unknown. Nothing on it is freed any more, because freeing waits.
  bool lost() const { return lost_; }
  void lose() const { lost_ = true; }
  void check(int result, std::string_view what) const { driver_.check(result, what); }

 private:
  friend class MemoryScope;
  std::unique_ptr<const jit::Driver> own_driver_;
  const jit::Driver& driver_;
  uint64_t counted_memory_ = 0;
  mutable MemoryLedger ledger_;
  mutable LoadTimes load_times_;
  mutable LaunchNote launch_note_;
  mutable std::chrono::milliseconds deadline_{std::chrono::minutes(2)};
  mutable MemoryKind memory_kind_ = MemoryKind::kWorkspaces;
  int index_;
  jit::DeviceInfo info_;
  plan::Gpu gpu_;
  mutable bool lost_ = false;
};

// While it lives, memory that its thread allocates is of this kind. One thread at a time.
class MemoryScope {
 public:
  MemoryScope(const Device& device, MemoryKind kind) : device_(device), before_(device.memory_kind_) {
    device_.memory_kind_ = kind;
  }
  ~MemoryScope() { device_.memory_kind_ = before_; }
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  const Device& device_;
  MemoryKind before_;
};

// Longer than anything takes that the program puts on a stream at once, and longer than any step of a model does, so
// that requests end soon where one does not.
inline constexpr std::chrono::milliseconds kDeviceDeadline{std::chrono::minutes(2)};
inline constexpr std::chrono::milliseconds kStepDeadline{std::chrono::seconds(8)};

class DeadlineScope {
 public:
  DeadlineScope(const Device& device, std::chrono::milliseconds deadline)
      : device_(device), before_(device.deadline()) {
    device_.set_deadline(deadline);
  }
  ~DeadlineScope() { device_.set_deadline(before_); }
  DeadlineScope(const DeadlineScope&) = delete;
  DeadlineScope& operator=(const DeadlineScope&) = delete;

 private:
  const Device& device_;
  std::chrono::milliseconds before_;
};

// Asks `query` until it answers something else than jit::kNotReady: at first without a pause, later every 50 us. The
// answer, or kNotReady when `deadline` has passed. (The driver's own waits have no limit.)
int wait_until_ready(const std::function<int()>& query, std::chrono::milliseconds deadline);

// The planner's row for a device (exposed for tests; Device keeps the strings that the row points to).
plan::Gpu gpu_row_of(const jit::DeviceInfo& info);
// A card of the planner's table, as a driver would describe it.
jit::DeviceInfo info_of(const plan::Gpu& gpu);

class Stream {
 public:
  explicit Stream(const Device& device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  // Waits for all that is on the stream. Error when it does not end within the device's deadline, with what was
  // launched last; the device is lost then.
  void synchronize() const;
  void* handle() const { return handle_; }
  // For that error.
  void launched(std::string_view name) const;
  // The next launch starts when everything before it has ended, whatever its Overlap.
  void end_overlap() const { overlaps_ = false; }
  bool take_overlap() const { return std::exchange(overlaps_, true); }
  const Device& device() const { return device_; }

 private:
  const Device& device_;
  void* handle_ = nullptr;
  mutable bool overlaps_ = true;
  mutable std::array<char, 120> last_ = {};  // of the last launch's name, as much as there is room for
};

// Device memory. `what` is for the error: "expert weights: 14.5 GB asked for, 3.2 of 139.8 GB free on NVIDIA H200".
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Device& device, uint64_t bytes, std::string_view what);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  DeviceAddress address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return device_pointer<T>(address_);
  }

  // Copies and fills are ordered on the stream. `bytes` at `offset` must lie inside (our own mistake otherwise).
  // Host memory is ordinary (pageable) memory: a copy from it has left it when the call returns; a copy to it is
  // complete when the stream has been synchronized.
  void upload(const Stream& stream, const void* from, uint64_t size, uint64_t offset = 0);
  void download(const Stream& stream, void* to, uint64_t size, uint64_t offset = 0) const;
  void copy(const Stream& stream, const Buffer& from, uint64_t size);
  void fill(const Stream& stream, unsigned char value);

  template <typename T>
  void upload(const Stream& stream, const std::vector<T>& from) {
    upload(stream, from.data(), from.size() * sizeof(T));
  }
  template <typename T>
  std::vector<T> download(const Stream& stream, size_t count) const {
    std::vector<T> to(count);
    download(stream, to.data(), count * sizeof(T));
    stream.synchronize();
    return to;
  }

 private:
  const Device* device_ = nullptr;
  DeviceAddress address_ = 0;
  uint64_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kWorkspaces;
};

// Rows of `columns` bf16 values in device memory, `stride` bytes from one to the next, as kernels copy them in pieces
// of `copied` rows and 64 columns (ptx::tensor_copy_rows). `address` and `stride`: multiples of 16.
ptx::TensorMap row_pieces(const Device& device, DeviceAddress address, uint64_t rows, uint64_t columns, uint64_t stride,
                          unsigned copied = 1);

class Event {
 public:
  explicit Event(const Device& device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const Stream& stream) const;
  // Whether all that was on the stream before it has ended; an Error when the device has failed.
  bool reached() const;
  // Waits for that; an Error when it does not happen within the deadline, and the device is lost then.
  void wait() const;
  void* handle() const { return handle_; }
  // Microseconds between two recorded events; waits for the later one.
  static double microseconds(const Event& start, const Event& stop);

 private:
  const Device& device_;
  void* handle_ = nullptr;
};

// While it lives, what is put on the stream is recorded instead of run; nothing may be allocated or waited for. What
// was recorded is dropped where no graph takes it.
class Recording {
 public:
  explicit Recording(const Stream& stream);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  friend class Graph;
  const Stream& stream_;
  bool open_ = true;
};

// What was recorded, to be launched any number of times.
class Graph {
 public:
  // Ends the recording.
  explicit Graph(Recording& recording);
  // Of what `enqueue` puts on the stream.
  Graph(const Stream& stream, const std::function<void()>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(const Stream& stream) const;

 private:
  void take(Recording& recording);
  const Device& device_;
  void* executable_ = nullptr;
};

// A kernel ready to be launched; valid while the module it came from lives.
struct Kernel {
  std::string name;
  void* function = nullptr;
  unsigned threads = 0;
  unsigned smem_bytes = 0;
};

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

enum class Overlap {
  kNone,          // starts when everything before it on the stream has ended
  kProgrammatic,  // may start early; the kernel itself waits (griddepcontrol.wait)
};

void launch_raw(const Stream& stream, const Kernel& kernel, Grid grid, Overlap overlap, void** arguments);

template <typename... Args>
void launch(const Stream& stream, const Kernel& kernel, Grid grid, Overlap overlap, Args... args) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  launch_raw(stream, kernel, grid, overlap, arguments);
}

}  // namespace fourfold::cuda
