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
#include "jit/driver.h"
#include "kernels/comm/reduce_args.h"

namespace fourfold::hostcuda {
namespace {

using jit::DeviceAddress;

// Values of CUresult (cuda.h).
constexpr int kInvalid = 1, kPeerUnsupported = 217, kNotFound = 500, kPeerAlreadyEnabled = 704,
              kCaptureUnsupported = 900;
constexpr unsigned kPlainShared = 48 * 1024;  // of a block, without being asked for more

void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

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
  const HostKernel* kernel = nullptr;
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
using Operations = std::vector<Operation>;

struct Stream {
  std::unique_ptr<Operations> capture;
  std::deque<Operation> queue;
  bool settled = true;   // nothing of the operations before can still be running
  bool waiting = false;  // for other ranks, since:
  std::chrono::steady_clock::time_point since;
};

// The context that is current on a thread.
thread_local int current_device = 0;

bool waits_for_ranks(const std::string& kernel) {
  return kernel.find("comm::reduce_norm_") != std::string::npos ||
         kernel.find("comm::gather_parts") != std::string::npos;
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
  std::string error;   // not empty: nothing works any more
  int held_rank = -1;  // whose kernels do not come to meetings
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
    auto* stream = static_cast<Stream*>(config.stream);
    if (waits_for_ranks(kernel.expression)) {
      const auto& peers = *static_cast<const comm::Peers*>(aligned(values->front()));
      auto meeting = std::make_shared<Meeting>(Meeting{&kernel, how, values, peers.rank, peers.exchange.ranks});
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
    executor::LaunchConfig how = first->how;
    std::vector<std::vector<void*>> pointers;
    std::vector<std::shared_ptr<const Meeting>> meetings;
    how.programmatic = false;
    for (Stream* stream : together) {
      const auto meeting = stream->queue.front().meeting;
      if (meeting->kernel != first->kernel || meeting->how.grid.x != how.grid.x) {
        return fault(fmt::format("ranks meet in {} with {} CTAs and {} with {}", first->kernel->expression, how.grid.x,
                                 meeting->kernel->expression, meeting->how.grid.x)),
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
    last_ = together.size() == 1 ? together[0] : nullptr;
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

std::unique_ptr<Card>& slot() {
  static std::unique_ptr<Card> card;
  return card;
}
Card& card() { return *slot(); }

// A call of the driver: one at a time.
template <typename F>
int locked(F f) {
  const std::lock_guard lock(card().mutex);
  return f(card());
}
// The same once all that was queued has run, as the driver has it where memory is freed or a module unloaded. Where it
// never does, the ranks wait for each other.
template <typename F>
int drained(F f) {
  constexpr auto kDeadline = std::chrono::seconds(120);
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    {
      const std::lock_guard lock(card().mutex);
      if (card().drain() != jit::kNotReady) return f(card());
      if (std::chrono::steady_clock::now() - begin > kDeadline) {
        card().error = "a call of the driver waits for kernels that wait for other ranks";
        return f(card());
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}
Stream* stream_of(void* handle) { return static_cast<Stream*>(handle); }

int attribute_of(const HostCard& c, int attribute) {
  switch (attribute) {  // CUdevice_attribute
    case 13:
      return kClockKhz;
    case 16:
      return c.sms;
    case 18:  // integrated
      return c.one_pool ? 1 : 0;
    case 36:
      return kMemoryClockKhz;
    case 37:
      return kBusBits;
    case 38:
      return c.l2_mb << 20;
    case 75:
      return c.major;
    case 76:
      return c.minor;
    case 81:
      return static_cast<int>(c.smem_per_sm);
    case 97:
      return static_cast<int>(c.smem_per_block);
    default:
      return 0;
  }
}

void set_device(jit::Driver::Functions& call) {
  call.init = [](unsigned) { return 0; };
  call.version = [](int* version) {
    *version = 13000;
    return 0;
  };
  call.device_count = [](int* count) {
    *count = card().card().devices;
    return 0;
  };
  call.device_get = [](int* device, int ordinal) {
    *device = ordinal;
    return 0;
  };
  call.device_name = [](char* name, int size, int) {
    std::snprintf(name, static_cast<size_t>(size), "%s", card().card().name.c_str());
    return 0;
  };
  call.device_attribute = [](int* value, int attribute, int) {
    *value = attribute_of(card().card(), attribute);
    return 0;
  };
  // A context is the card's number and one.
  call.primary_context = [](void** context, int device) {
    *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
    return 0;
  };
  call.set_current = [](void* context) {
    current_device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
    return 0;
  };
  call.can_access_peer = [](int* can, int device, int peer) {
    *can = card().card().peers && device != peer ? 1 : 0;
    return 0;
  };
  call.enable_peer = [](void* context, unsigned) {
    return locked([&](Card& c) { return c.enable_peer(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1); });
  };
  call.peer_attribute = [](int* value, int, int, int) {
    *value = card().card().peers ? 1 : 0;
    return 0;
  };
  call.device_bus = [](char* id, int size, int device) {
    std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return 0;
  };
  call.error_string = [](int result, const char** text) {
    *text = result == kOutOfMemory          ? "out of memory"
            : result == kInvalid            ? "invalid value"
            : result == kNotFound           ? "named symbol not found"
            : result == kCaptureUnsupported ? "operation not permitted when stream is capturing"
            : card().error.empty()          ? "unspecified launch failure"
                                            : card().error.c_str();
    return 0;
  };
}

void set_modules(jit::Driver::Functions& call) {
  call.module_load = [](void** module, const void* image) {
    return locked([&](Card& c) {
      if (!knows_source(text_of_cubin(image))) return kNotFound;
      auto loaded = std::make_unique<Module>();
      loaded->text = text_of_cubin(image);
      *module = loaded.release();
      ++c.live.modules;
      return 0;
    });
  };
  call.module_unload = [](void* module) {
    return drained([&](Card& c) {
      delete static_cast<Module*>(module);
      --c.live.modules;
      return 0;
    });
  };
  call.module_function = [](void** function, void* module, const char* name) {
    return locked([&](Card&) {
      auto& m = *static_cast<Module*>(module);
      const HostKernel* kernel = find_kernel(m.text, name);
      if (kernel == nullptr) return kNotFound;
      m.functions[name].kernel = kernel;
      *function = &m.functions[name];
      return 0;
    });
  };
  call.function_set = [](void* function, int attribute, int value) {
    constexpr int kDynamicShared = 8;
    return locked([&](Card& c) {
      if (attribute != kDynamicShared) return 0;
      if (value > c.card().smem_per_block) return kInvalid;
      static_cast<Function*>(function)->shared = std::max<int64_t>(value, kPlainShared);
      return 0;
    });
  };
  call.launch_with = [](const jit::LaunchConfig* config, void* function, void** arguments, void**) {
    return locked([&](Card& c) { return c.launch(*config, *static_cast<Function*>(function), arguments); });
  };
  call.launch = [](void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned smem_bytes, void* stream, void** arguments, void**) {
    const jit::LaunchConfig config = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, smem_bytes, stream, nullptr, 0};
    return locked([&](Card& c) { return c.launch(config, *static_cast<Function*>(function), arguments); });
  };
  call.tensor_map_encode = [](void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                              const uint64_t* strides, const unsigned* box, const unsigned* steps, int, int swizzle,
                              int, int) {
    constexpr int kBf16 = 9, kSwizzle128 = 3;
    const bool known = type == kBf16 && rank == 2 && box[0] == 64 && box[1] >= 1 && box[1] <= 256 && steps[0] == 1 &&
                       steps[1] == 1 && swizzle == kSwizzle128;
    if (!known || reinterpret_cast<uintptr_t>(address) % 16 != 0 || strides[0] % 16 != 0 || sizes[0] == 0 ||
        sizes[1] == 0) {
      return kInvalid;
    }
    const ptx::TensorMap host = executor::make_tensor_map(address, sizes[1], sizes[0], strides[0], box[1]);
    std::memcpy(map, &host, sizeof(host));
    return 0;
  };
}

void set_memory(jit::Driver::Functions& call) {
  call.memory_info = [](size_t* free, size_t* total) {
    return locked([&](Card& c) {
      *total = c.card().memory;
      *free = c.card().memory - c.live.bytes;
      return 0;
    });
  };
  call.memory_allocate = [](DeviceAddress* address, size_t bytes) {
    return locked([&](Card& c) { return c.allocate(address, bytes); });
  };
  call.memory_free = [](DeviceAddress address) { return drained([&](Card& c) { return c.release(address); }); };
  call.host_allocate = [](void** memory, size_t bytes, unsigned) {
    return locked([&](Card& c) { return c.host_allocate(memory, bytes); });
  };
  call.host_free = [](void* memory) { return drained([&](Card& c) { return c.host_free(memory); }); };
  call.copy_to_device = [](DeviceAddress to, const void* from, size_t bytes, void* stream) {
    return locked([&](Card& c) { return c.copy_to_device(to, from, bytes, stream_of(stream)); });
  };
  call.copy_to_host = [](void* to, DeviceAddress from, size_t bytes, void* stream) {
    return locked([&](Card& c) { return c.copy_to_host(to, from, bytes, stream_of(stream)); });
  };
  call.copy_on_device = [](DeviceAddress to, DeviceAddress from, size_t bytes, void* stream) {
    return locked([&](Card& c) { return c.copy_on_device(to, from, bytes, stream_of(stream)); });
  };
  call.fill_bytes = [](DeviceAddress to, unsigned char value, size_t bytes, void* stream) {
    return locked([&](Card& c) { return c.fill(to, value, bytes, stream_of(stream)); });
  };
}

void set_streams(jit::Driver::Functions& call) {
  call.stream_create = [](void** stream, unsigned) {
    return locked([&](Card& c) {
      *stream = c.make_stream();
      ++c.live.streams;
      return 0;
    });
  };
  call.stream_destroy = [](void* stream) {
    return drained([&](Card& c) {
      c.destroy(stream_of(stream));
      --c.live.streams;
      return 0;
    });
  };
  call.stream_query = [](void* stream) {
    return locked([&](Card& c) {
      if (const int result = c.begin(Call::kSynchronize)) return result;
      return stream_of(stream)->capture ? kCaptureUnsupported : c.drain(*stream_of(stream));
    });
  };
  call.event_create = [](void** event, unsigned) {
    return locked([&](Card& c) {
      *event = std::make_unique<Event>().release();
      ++c.live.events;
      return 0;
    });
  };
  call.event_destroy = [](void* event) {
    const auto destroy = [&](Card& c) {
      delete static_cast<Event*>(event);
      --c.live.events;
      return 0;
    };
    return static_cast<Event*>(event)->pending > 0 ? drained(destroy) : locked(destroy);
  };
  call.event_record = [](void* event, void* stream) {
    return locked([&](Card& c) {
      auto* e = static_cast<Event*>(event);
      ++e->pending;
      return c.add(stream_of(stream), [e] {
        e->at = std::chrono::steady_clock::now();
        --e->pending;
      });
    });
  };
  call.event_query = [](void* event) {
    return locked([&](Card& c) {
      if (const int result = c.begin(Call::kSynchronize)) return result;
      if (const int result = c.progress()) return result;
      return static_cast<Event*>(event)->pending > 0 ? jit::kNotReady : 0;
    });
  };
  call.event_elapsed = [](float* milliseconds, void* start, void* stop) {
    const auto time = static_cast<Event*>(stop)->at - static_cast<Event*>(start)->at;
    *milliseconds = std::chrono::duration<float, std::milli>(time).count();
    return 0;
  };
}

void set_graphs(jit::Driver::Functions& call) {
  call.stream_begin_capture = [](void* stream, int) {
    return locked([&](Card& c) { return c.begin_capture(stream_of(stream)); });
  };
  call.stream_end_capture = [](void* stream, void** graph) {
    return locked([&](Card& c) {
      auto captured = c.end_capture(stream_of(stream));
      if (captured == nullptr) return kInvalid;
      *graph = captured.release();
      ++c.live.graphs;
      return 0;
    });
  };
  call.graph_instantiate = [](void** executable, void* graph, unsigned long long) {
    return locked([&](Card& c) {
      *executable = std::make_unique<Operations>(*static_cast<Operations*>(graph)).release();
      ++c.live.graphs;
      return 0;
    });
  };
  call.graph_launch = [](void* executable, void* stream) {
    return locked([&](Card& c) { return c.launch_graph(*static_cast<Operations*>(executable), stream_of(stream)); });
  };
  const auto destroy = [](void* graph) {
    return locked([&](Card& c) {
      delete static_cast<Operations*>(graph);
      --c.live.graphs;
      return 0;
    });
  };
  call.graph_destroy = destroy;
  call.graph_executable_destroy = destroy;
}

}  // namespace

void install(const HostCard& card) {
  slot().reset();
  slot() = std::make_unique<Card>(card);
  auto call = std::make_shared<jit::Driver::Functions>();
  set_device(*call);
  set_modules(*call);
  set_memory(*call);
  set_streams(*call);
  set_graphs(*call);
  jit::Driver::substitute(std::move(call));
  jit::Nvrtc::substitute(compiler_functions());
}

Live live() {
  const std::lock_guard lock(card().mutex);
  return card().live;
}
uint64_t peak_bytes() { return card().peak; }
int64_t calls(Call call) { return card().calls[static_cast<size_t>(call)]; }
void fail_call(Call call, int64_t nth, int result) {
  const std::lock_guard lock(card().mutex);
  card().faults[static_cast<size_t>(call)] = {nth, result};
}
void hold_meetings_of(int rank) {
  const std::lock_guard lock(card().mutex);
  card().held_rank = rank;
}
void hang_launch(int64_t nth) {
  const std::lock_guard lock(card().mutex);
  card().hang_in = nth;
  card().hangs = false;
}
int64_t endless_waits() {
  const std::lock_guard lock(card().mutex);
  return card().endless;
}
std::unique_lock<std::recursive_mutex> hold() { return std::unique_lock(card().mutex); }

}  // namespace fourfold::hostcuda
