// The driver's functions, over the cards of card.h.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "hostcuda/card.h"

namespace fourfold::hostcuda {
namespace {

std::unique_ptr<Card>& slot() {
  static std::unique_ptr<Card> card;
  return card;
}
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

Card& card() { return *slot(); }

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
  jit::Nccl::substitute(card.nccl == 0 ? nullptr : nccl_functions());
  jit::CublasLt::substitute(card.cublaslt ? cublaslt_functions() : nullptr);
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
void corrupt_sum(int64_t nth) {
  const std::lock_guard lock(card().mutex);
  card().corrupt_in = nth;
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
