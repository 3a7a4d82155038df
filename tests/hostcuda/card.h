// The cards of the host driver: memory, streams with what was queued on them, graphs, and kernels that wait for those
// of other ranks.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "executor/cuda.h"
#include "hostcuda/compiler.h"
#include "hostcuda/host_cuda.h"
#include "hostcuda/worker.h"
#include "jit/cublaslt.h"
#include "jit/driver.h"
#include "jit/nccl.h"
#include "kernels/comm/reduce_args.h"
#include "kernels/gemm/dense_tile.h"

namespace fourfold::hostcuda {
using jit::DeviceAddress;

// Values of CUresult (cuda.h).
inline constexpr int kInvalid = 1, kPeerUnsupported = 217, kNotFound = 500, kPeerAlreadyEnabled = 704,
                     kCaptureUnsupported = 900;
inline constexpr unsigned kPlainShared = 48 * 1024;  // of a block, without being asked for more

inline void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

struct Event {
  std::chrono::steady_clock::time_point at;
  int pending = 0;  // records that have not taken place
};

struct Function {
  const HostKernel* kernel = nullptr;
  int64_t shared = kPlainShared;  // that a launch may ask for
};

struct Module {
  std::string text;
  std::map<std::string, Function> functions;
};

// A launch whose kernel waits for those of other ranks.
struct Meeting {
  const HostKernel* kernel = nullptr;  // null: no kernel but NCCL, which gathers:
  const void* from = nullptr;
  void* to = nullptr;
  size_t bytes = 0;
  executor::LaunchConfig how;
  std::shared_ptr<std::vector<std::vector<std::max_align_t>>> values;
  int rank = 0, ranks = 0;
};

// What stands on a stream, or in a graph. Whether it may start before the one before it has ended is the operation's
// own business.
struct Operation {
  std::function<void(bool early)> run;
  bool programmatic = false;
  std::shared_ptr<const Meeting> meeting = nullptr;  // not null: in place of `run`
};
// A graph's, and what it keeps: a communicator whose gathers are in it.
struct Operations : std::vector<Operation> {
  std::vector<std::shared_ptr<const void>> kept;
};

struct Stream {
  std::unique_ptr<Operations> capture;
  std::deque<Operation> queue;
  bool settled = true;   // nothing of the operations before can still be running
  bool waiting = false;  // for other ranks, since:
  std::chrono::steady_clock::time_point since;
};

// The context that is current on a thread.
inline thread_local int current_device = 0;

inline bool waits_for_ranks(const std::string& kernel) {
  return kernel.find("comm::reduce_norm_") != std::string::npos ||
         kernel.find("comm::gather_parts") != std::string::npos;
}

// CTAs of a cluster, as the kernel says by __cluster_dims__: of some a tile's seventh number.
inline int cluster_of(const std::string& kernel) {
  if (kernel.find("gemm_cluster") != std::string::npos) return gemm::kClusterCtas;
  if (kernel.find("delta_recurrent_split") == std::string::npos) return 1;
  size_t at = 0;
  for (int i = 0; i < 6; ++i) at = kernel.find(',', at) + 1;
  return std::stoi(kernel.substr(at));
}

class Card {
 public:
  explicit Card(const HostCard& card) : card_(card) {
    worker_.run([this] { device_ = std::make_unique<executor::Device>(card_.executor); });
  }
  ~Card() {
    worker_.run([this] { device_.reset(); });
  }

  std::recursive_mutex mutex;
  Live live;
  uint64_t peak = 0;
  std::string error;    // not empty: nothing works any more
  int64_t gathers = 0;  // NCCL's
  int64_t library_products = 0, library_questions = 0;
  int64_t corrupt_in = 0;  // sums until one is wrong
  int held_rank = -1;      // whose kernels do not come to meetings
  int64_t calls[static_cast<size_t>(Call::kCount)] = {};
  int64_t hang_in = 0;  // launches until nothing ends
  bool hangs = false;
  int64_t endless = 0;  // calls that would wait for ever
  struct Fault {
    int64_t in = 0;
    int result = 0;
  } faults[static_cast<size_t>(Call::kCount)];

  const HostCard& card() const { return card_; }

  // 0, or why the call does nothing.
  int begin(Call call) {
    const auto i = static_cast<size_t>(call);
    ++calls[i];
    if (call == Call::kLaunch && hang_in > 0 && --hang_in == 0) hangs = true;
    if (call == Call::kSynchronize && hangs) return jit::kNotReady;
    if (faults[i].in > 0 && --faults[i].in == 0) {
      if (faults[i].result == kLaunchFailed) error = "a fault that a test asked for";
      return faults[i].result;
    }
    return error.empty() ? 0 : kLaunchFailed;
  }

  int allocate(DeviceAddress* address, size_t bytes) {
    if (const int result = begin(Call::kAllocate)) return result;
    if (capturing_ > 0) return kCaptureUnsupported;
    if (bytes == 0) return kInvalid;
    if (bytes > card_.memory - live.bytes) return kOutOfMemory;
    void* p = device_->alloc<unsigned char>(bytes, fmt::format("allocation {} of {} bytes", ++named_, bytes));
    allocations_[reinterpret_cast<uintptr_t>(p)] = {bytes, current_device};
    *address = static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(p));
    ++live.allocations;
    live.bytes += bytes;
    peak = std::max(peak, live.bytes);
    return 0;
  }
  int release(DeviceAddress address) {
    const auto it = allocations_.find(static_cast<uintptr_t>(address));
    if (it == allocations_.end()) return kInvalid;
    --live.allocations;
    live.bytes -= it->second.bytes;
    device_->release(pointer(address));
    allocations_.erase(it);
    return 0;
  }
  int host_allocate(void** memory, size_t bytes) {
    if (const int result = begin(Call::kHostAllocate)) return result;
    // Kernels reach it, too.
    *memory = device_->alloc<unsigned char>(bytes, fmt::format("page-locked block {} of {} bytes", ++named_, bytes));
    pinned_[reinterpret_cast<uintptr_t>(*memory)] = {bytes};
    ++live.host_allocations;
    return 0;
  }
  int host_free(void* memory) {
    if (pinned_.erase(reinterpret_cast<uintptr_t>(memory)) == 0) return kInvalid;
    device_->release(memory);
    --live.host_allocations;
    return 0;
  }
  int enable_peer(int device) {
    if (!card_.peers || device == current_device) return kPeerUnsupported;
    return peers_.insert({current_device, device}).second ? 0 : kPeerAlreadyEnabled;
  }

  int add(Stream* stream, Operation operation) {
    if (!error.empty()) return kLaunchFailed;
    if (stream->capture) {
      stream->capture->push_back(std::move(operation));
    } else {
      stream->queue.push_back(std::move(operation));
    }
    return 0;
  }
  // Something that is no kernel: what it follows has ended.
  int add(Stream* stream, std::function<void()> work) {
    return add(stream, {[this, work = std::move(work)](bool) {
                          work();
                          running_->settled = true;
                        },
                        false});
  }

  int copy_to_device(DeviceAddress to, const void* from, size_t bytes, Stream* stream) {
    if (const int result = begin(Call::kCopy)) return result;
    if (!on_device(to, bytes)) return kInvalid;
    if (pinned(from, bytes)) {  // read when it takes place
      return add(stream, [this, to, from, bytes] {
        if (!pinned(from, bytes)) return fault("a copy from page-locked memory that was freed");
        if (!on_device(to, bytes)) return fault("a copy to memory that was freed");
        std::memcpy(pointer(to), from, bytes);
      });
    }
    if (stream->capture) return kCaptureUnsupported;
    std::vector<unsigned char> bytes_now(static_cast<const unsigned char*>(from),
                                         static_cast<const unsigned char*>(from) + bytes);
    return add(stream, [this, to, data = std::move(bytes_now)] {
      if (!on_device(to, data.size())) return fault("a copy to memory that was freed");
      std::memcpy(pointer(to), data.data(), data.size());
    });
  }
  int copy_to_host(void* to, DeviceAddress from, size_t bytes, Stream* stream) {
    if (const int result = begin(Call::kCopy)) return result;
    if (!on_device(from, bytes)) return kInvalid;
    const bool locked = pinned(to, bytes);
    if (stream->capture && !locked) return kCaptureUnsupported;
    std::memset(to, 0xff, bytes);  // what is read too early
    return add(stream, [this, to, from, bytes, locked] {
      if (locked && !pinned(to, bytes)) return fault("a copy to page-locked memory that was freed");
      if (!on_device(from, bytes)) return fault("a copy from memory that was freed");
      std::memcpy(to, pointer(from), bytes);
    });
  }
  int copy_on_device(DeviceAddress to, DeviceAddress from, size_t bytes, Stream* stream) {
    if (const int result = begin(Call::kCopy)) return result;
    if (!on_device(from, bytes) || !on_device(to, bytes)) return kInvalid;
    return add(stream, [this, to, from, bytes] {
      if (!on_device(from, bytes) || !on_device(to, bytes)) return fault("a copy of memory that was freed");
      if (!card_.peer_copies && device_of(from) != device_of(to)) return;
      std::memmove(pointer(to), pointer(from), bytes);
    });
  }
  int fill(DeviceAddress to, unsigned char value, size_t bytes, Stream* stream) {
    if (const int result = begin(Call::kCopy)) return result;
    if (!on_device(to, bytes)) return kInvalid;
    return add(stream, [this, to, value, bytes] {
      if (!on_device(to, bytes)) return fault("memory that was freed is filled");
      std::memset(pointer(to), value, bytes);
    });
  }

  int launch(const jit::LaunchConfig& config, const Function& function, void** arguments) {
    if (const int result = begin(Call::kLaunch)) return result;
    const unsigned* grid = config.grid;
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 || grid[2] > 65535) return kInvalid;
    if (config.block[0] == 0 || config.block[0] > 1024 || config.block[1] != 1 || config.block[2] != 1) return kInvalid;
    if (config.smem_bytes > function.shared) return kInvalid;
    const HostKernel& kernel = *function.kernel;
    auto values = std::make_shared<std::vector<std::vector<std::max_align_t>>>();
    for (size_t i = 0; i < kernel.sizes.size(); ++i) {
      std::vector<std::max_align_t> value(kernel.sizes[i] / sizeof(std::max_align_t) + 5);
      std::memcpy(aligned(value), arguments[i], kernel.sizes[i]);
      values->push_back(std::move(value));
    }
    bool programmatic = false;
    for (unsigned i = 0; i < config.attribute_count; ++i) {
      programmatic =
          programmatic || (config.attributes[i].id == jit::kProgrammaticLaunch && config.attributes[i].value.flag != 0);
    }
    if (programmatic && card_.major < 9) return kInvalid;
    executor::LaunchConfig how;
    how.name = kernel.expression;
    how.grid = {grid[0], grid[1], grid[2]};
    how.threads = static_cast<int>(config.block[0]);
    how.shared_bytes = config.smem_bytes;
    // Its CTAs wait for each other: all have room on the card.
    if (kernel.expression.find("gemm_middle") != std::string::npos) how.resident = static_cast<int>(grid[0]);
    if (kernel.expression.find("attention_narrow") != std::string::npos ||
        (kernel.expression.find("sample_tokens") != std::string::npos && grid[0] > 1)) {
      how.resident = static_cast<int>(grid[0] * grid[1] * grid[2]);
    }
    how.cluster = cluster_of(kernel.expression);
    auto* stream = static_cast<Stream*>(config.stream);
    if (waits_for_ranks(kernel.expression)) {
      const auto& peers = *static_cast<const comm::Peers*>(aligned(values->front()));
      auto meeting = std::make_shared<Meeting>();
      meeting->kernel = &kernel;
      meeting->how = how;
      meeting->values = values;
      meeting->rank = peers.rank;
      meeting->ranks = peers.exchange.ranks;
      return add(stream, {{}, programmatic, std::move(meeting)});
    }
    return add(stream, {[this, how, values, &kernel](bool early) mutable {
                          // With what other streams ran before it there is no order to check.
                          how.programmatic = early && !running_->settled && running_ == last_;
                          std::vector<void*> pointers;
                          for (auto& value : *values) pointers.push_back(aligned(value));
                          device_->launch(how, [&] { kernel.run(pointers.data()); });
                          running_->settled = false;
                          last_ = running_;
                        },
                        programmatic});
  }

  // Runs what was queued, on all streams, as far as it goes: a kernel that waits for other ranks runs when theirs are
  // there. 0, or what went wrong.
  int progress() {
    if (!error.empty()) return kLaunchFailed;
    if (std::all_of(streams_.begin(), streams_.end(), [](const auto& s) { return s->queue.empty(); })) return 0;
    worker_.run([this] {
      try {
        for (bool moved = true; moved && error.empty();) {
          moved = false;
          for (const auto& stream : streams_) moved = run_until_meeting(*stream) || moved;
          moved = meet() || moved;
        }
      } catch (const std::exception& e) {
        fault(e.what());
      }
      if (!error.empty()) {
        for (const auto& stream : streams_) stream->queue.clear();
      }
    });
    return error.empty() ? 0 : kLaunchFailed;
  }
  // 0: all that was queued has run; kNotReady: something waits for another rank.
  int drain() {
    if (hangs) {
      ++endless;
      return 0;
    }
    if (const int result = progress()) return result;
    const bool empty = std::all_of(streams_.begin(), streams_.end(), [](const auto& s) { return s->queue.empty(); });
    return empty ? 0 : jit::kNotReady;
  }
  int drain(const Stream& stream) {
    if (const int result = progress()) return result;
    return stream.queue.empty() ? 0 : jit::kNotReady;
  }

  // NCCL's, of one rank. A graph that it is recorded in keeps `communicator`.
  int all_gather(const void* from, void* to, size_t bytes, int rank, int ranks,
                 const std::shared_ptr<const void>& communicator, Stream* stream) {
    if (stream->capture) stream->capture->kept.push_back(communicator);
    auto meeting = std::make_shared<Meeting>();
    meeting->from = from;
    meeting->to = to;
    meeting->bytes = bytes;
    meeting->rank = rank;
    meeting->ranks = ranks;
    return add(stream, {{}, false, std::move(meeting)});
  }

  Stream* make_stream() {
    streams_.push_back(std::make_unique<Stream>());
    return streams_.back().get();
  }
  void destroy(Stream* stream) {
    if (last_ == stream) last_ = nullptr;
    std::erase_if(streams_, [&](const auto& s) { return s.get() == stream; });
  }

  int begin_capture(Stream* stream) {
    if (stream->capture) return kInvalid;
    stream->capture = std::make_unique<Operations>();
    ++capturing_;
    return 0;
  }
  std::unique_ptr<Operations> end_capture(Stream* stream) {
    if (stream->capture) --capturing_;
    return std::move(stream->capture);
  }
  int launch_graph(const Operations& graph, Stream* stream) {
    if (const int result = begin(Call::kLaunch)) return result;
    // The first node waits for what stands before the graph, and what follows for the last.
    if (const int result = add(stream, [] {})) return result;
    for (const Operation& operation : graph) {
      if (const int result = add(stream, operation)) return result;
    }
    return add(stream, [] {});
  }
  int capturing() const { return capturing_; }

 private:
  struct Pinned {
    size_t bytes;
  };
  struct Allocation {
    size_t bytes;
    int device;
  };

  // On the worker.
  bool run_until_meeting(Stream& stream) {
    bool moved = false;
    while (!stream.queue.empty() && error.empty() && stream.queue.front().meeting == nullptr) {
      const Operation operation = std::move(stream.queue.front());
      stream.queue.pop_front();
      running_ = &stream;
      operation.run(operation.programmatic);
      moved = true;
    }
    return moved;
  }
  bool meet() {
    std::vector<Stream*> come;
    for (const auto& stream : streams_) {
      if (stream->queue.empty() || !error.empty() || stream->queue.front().meeting->rank == held_rank) continue;
      come.push_back(stream.get());
    }
    if (come.empty()) return false;
    const auto now = std::chrono::steady_clock::now();
    for (Stream* stream : come) {
      if (!std::exchange(stream->waiting, true)) stream->since = now;
    }
    std::vector<Stream*> together;
    if (come.size() == static_cast<size_t>(come[0]->queue.front().meeting->ranks)) {
      together = come;
    } else if (card_.lone_after.count() > 0) {
      for (Stream* stream : come) {
        if (now - stream->since >= card_.lone_after) together = {stream};
      }
    }
    if (together.empty()) return false;
    std::sort(together.begin(), together.end(), [](const Stream* a, const Stream* b) {
      return a->queue.front().meeting->rank < b->queue.front().meeting->rank;
    });
    const auto first = together[0]->queue.front().meeting;
    if (first->kernel == nullptr) return gather(together);
    executor::LaunchConfig how = first->how;
    std::vector<std::vector<void*>> pointers;
    std::vector<std::shared_ptr<const Meeting>> meetings;
    how.programmatic = false;
    for (Stream* stream : together) {
      const auto meeting = stream->queue.front().meeting;
      if (meeting->kernel == nullptr || meeting->kernel != first->kernel || meeting->how.grid.x != how.grid.x) {
        return fault(fmt::format("ranks meet in {} with {} CTAs and {} with {}", first->kernel->expression, how.grid.x,
                                 meeting->kernel == nullptr ? "NCCL" : meeting->kernel->expression,
                                 meeting->how.grid.x)),
               false;
      }
      pointers.emplace_back();
      for (auto& value : *meeting->values) pointers.back().push_back(aligned(value));
      meetings.push_back(meeting);
      stream->queue.pop_front();
      stream->waiting = false;
      stream->settled = false;
    }
    how.grid.y = static_cast<unsigned>(together.size());
    how.resident = static_cast<int>(how.grid.x * how.grid.y);
    device_->launch(how, [&] { meetings[blockIdx.y]->kernel->run(pointers[blockIdx.y].data()); });
    if (first->kernel->expression.find("comm::reduce_norm_") != std::string::npos && together.size() > 1 &&
        corrupt_in > 0 && --corrupt_in == 0) {
      auto& args = *static_cast<comm::ReduceArgs*>(pointers[1][0]);
      reinterpret_cast<uint32_t*>(args.norm.residual_out)[3] ^= 1u << 14;
    }
    last_ = together.size() == 1 ? together[0] : nullptr;
    return true;
  }
  // What each rank has from all of them.
  bool gather(const std::vector<Stream*>& together) {
    for (const Stream* to : together) {
      const Meeting& mine = *to->queue.front().meeting;
      for (size_t rank = 0; rank < together.size(); ++rank) {
        const Meeting& theirs = *together[rank]->queue.front().meeting;
        if (theirs.kernel != nullptr || theirs.bytes != mine.bytes) {
          return fault("ranks meet in NCCL with different numbers of bytes"), false;
        }
        if (!card_.nccl_loses) std::memcpy(static_cast<char*>(mine.to) + rank * mine.bytes, theirs.from, mine.bytes);
      }
    }
    for (Stream* stream : together) {
      stream->queue.pop_front();
      stream->waiting = false;
      stream->settled = true;
    }
    last_ = nullptr;
    return true;
  }
  int device_of(DeviceAddress address) const {
    return std::prev(allocations_.upper_bound(static_cast<uintptr_t>(address)))->second.device;
  }

  // 32 bytes and more, as kernels' arguments may be.
  static void* aligned(std::vector<std::max_align_t>& value) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(value.data()) + 63) / 64 * 64);
  }
  bool on_device(DeviceAddress address, size_t bytes) const {
    auto it = allocations_.upper_bound(static_cast<uintptr_t>(address));
    if (it == allocations_.begin()) return false;
    --it;
    const size_t offset = static_cast<uintptr_t>(address) - it->first;
    return offset <= it->second.bytes && bytes <= it->second.bytes - offset;
  }
  bool pinned(const void* memory, size_t bytes) const {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    auto it = pinned_.upper_bound(at);
    if (it == pinned_.begin()) return false;
    --it;
    return at - it->first <= it->second.bytes && bytes <= it->second.bytes - (at - it->first);
  }
  void fault(const std::string& what) { error = what; }

  HostCard card_;
  Worker worker_;
  std::unique_ptr<executor::Device> device_;
  std::vector<std::unique_ptr<Stream>> streams_;
  Stream *running_ = nullptr, *last_ = nullptr;  // of the operation that runs; of the launch before
  std::map<uintptr_t, Allocation> allocations_;
  std::set<std::pair<int, int>> peers_;
  std::map<uintptr_t, Pinned> pinned_;
  int64_t named_ = 0;
  int capturing_ = 0;
};

inline Stream* stream_of(void* handle) { return static_cast<Stream*>(handle); }

std::shared_ptr<const jit::Nccl::Functions> nccl_functions();
std::shared_ptr<const jit::CublasLt::Functions> cublaslt_functions();

// The ones that are installed.
Card& card();

}  // namespace fourfold::hostcuda
