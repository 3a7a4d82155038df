// The CUDA driver (libcuda), opened at run time: devices, and kernels loaded from cubins. Memory, streams and graphs
// are built on it in src/cuda.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jit/library.h"

namespace fourfold::jit {

// How a device's memory stands to the processor's: its own, behind a bus; its own, where it also follows the
// processor's page tables and reads the processor's memory as it lies (GH200, GB200); or one pool for both (DGX Spark).
enum class HostMemory : uint8_t { kApart, kCoherent, kOnePool };
const char* host_memory_name(HostMemory memory);  // "memory of its own", "... coherent with ...", "one pool ..."
// From CU_DEVICE_ATTRIBUTE_INTEGRATED and CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES. Access to
// pageable memory alone says nothing: with a driver that moves pages when they are missed, cards behind a bus have it.
HostMemory host_memory(bool integrated, bool uses_host_page_tables);

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int sms = 0;
  int64_t smem_per_block = 0;  // bytes, opt-in
  int64_t smem_per_sm = 0;
  int64_t l2_bytes = 0;
  double clock_ghz = 0;   // highest; 0 where the driver does not tell
  double memory_tbs = 0;  // from memory clock and bus width, double data rate; 0 likewise
  HostMemory host_memory = HostMemory::kApart;
  // The architecture that kernels are compiled for: "sm_90a", with the features that no other one has (sm_90 and
  // later).
  std::string arch() const;
};

class Module;

class Driver {
 public:
  // The driver, or null (no library, or no device that it can use); *why then says which. Opened once.
  static const Driver* find(std::string* why);
  static const Driver& get();  // or an Error
  struct Functions;
  // For tests: what find() gives from then on is a driver of these functions, whatever the machine has. Owners of what
  // an earlier one gave must be gone.
  static void substitute(std::shared_ptr<const Functions> functions);
  // A driver of these functions for whoever holds it; find() knows nothing of it.
  static std::unique_ptr<const Driver> of(std::shared_ptr<const Functions> functions);

  int version() const { return version_; }  // 13000 for CUDA 13.0
  int device_count() const { return count_; }
  DeviceInfo device(int index) const;
  // Makes the device's primary context current on this thread; the context lives until the process ends.
  void use(int index) const;
  // From then on kernels of `device` reach the memory of `peer`, another one, by its addresses, whatever is allocated
  // there. False: the driver cannot; *why is then what it says.
  bool enable_peer(int device, int peer, std::string* why) const;

  const Functions& call() const { return *call_; }
  // Error, naming `what`, unless result is 0.
  void check(int result, std::string_view what) const;

 private:
  // The library's functions; it stays open as long as they are used.
  explicit Driver(std::shared_ptr<const Functions> functions, std::optional<SharedLibrary> library = {});
  int attribute(int device, int attribute) const;
  // 0 where the driver does not know the attribute.
  int attribute_or_zero(int device, int attribute) const;
  std::optional<SharedLibrary> library_;
  std::shared_ptr<const Functions> call_;
  int version_ = 0, count_ = 0;
};

using DeviceAddress = unsigned long long;

inline constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

inline constexpr unsigned kHostMapped = 2;  // CU_MEMHOSTALLOC_DEVICEMAP: kernels reach it, by the same address

// CUlaunchAttribute and CUlaunchConfig (cuda.h).
struct LaunchAttribute {
  int id;
  int padding;
  union {
    int flag;
    unsigned char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);
inline constexpr int kProgrammaticLaunch = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned smem_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// The driver's entry points that are used, with the types of its ABI: handles are pointers, results are 0 for success.
struct Driver::Functions {
  int (*init)(unsigned flags);
  int (*version)(int*);
  int (*device_count)(int*);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int size, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*primary_context)(void** context, int device);
  int (*set_current)(void* context);
  int (*can_access_peer)(int* can, int device, int peer);
  int (*enable_peer)(void* context, unsigned flags);  // of the current context to that one
  int (*peer_attribute)(int* value, int attribute, int device, int peer);
  int (*device_bus)(char* id, int size, int device);
  int (*module_load)(void** module, const void* image);
  int (*module_unload)(void* module);
  int (*module_function)(void** function, void* module, const char* name);
  int (*function_set)(void* function, int attribute, int value);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned smem_bytes, void* stream, void** arguments, void** extra);
  int (*error_string)(int result, const char** text);
  int (*memory_info)(size_t* free, size_t* total);
  int (*memory_allocate)(DeviceAddress* address, size_t bytes);
  int (*memory_free)(DeviceAddress address);
  int (*host_allocate)(void** memory, size_t bytes, unsigned flags);
  int (*host_free)(void* memory);
  int (*copy_to_device)(DeviceAddress to, const void* from, size_t bytes, void* stream);
  int (*copy_to_host)(void* to, DeviceAddress from, size_t bytes, void* stream);
  int (*copy_on_device)(DeviceAddress to, DeviceAddress from, size_t bytes, void* stream);
  int (*fill_bytes)(DeviceAddress address, unsigned char value, size_t count, void* stream);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*stream_query)(void* stream);  // kNotReady while there is work
  int (*stream_begin_capture)(void* stream, int mode);
  int (*stream_end_capture)(void* stream, void** graph);
  int (*event_create)(void** event, unsigned flags);
  int (*event_destroy)(void* event);
  int (*event_record)(void* event, void* stream);
  int (*event_query)(void* event);
  int (*event_elapsed)(float* milliseconds, void* start, void* stop);
  int (*graph_instantiate)(void** executable, void* graph, unsigned long long flags);
  int (*graph_launch)(void* executable, void* stream);
  int (*graph_executable_destroy)(void* executable);
  int (*graph_destroy)(void* graph);
  int (*launch_with)(const LaunchConfig* config, void* function, void** arguments, void** extra);
  int (*tensor_map_encode)(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int l2_promotion, int fill);
};

// A loaded cubin. Its functions are valid while it lives and only in the context that was current when it was loaded.
class Module {
 public:
  Module(const Driver& driver, std::string_view cubin, std::string_view name);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // The kernel of that mangled name, allowed `smem_bytes` of dynamic shared memory. `all_shared`: it runs on SMs that
  // are set up for as much shared memory as they can have, so that other kernels with much of it fit beside this one.
  void* function(const std::string& mangled, int64_t smem_bytes, bool all_shared = false) const;

 private:
  const Driver& driver_;
  std::string name_;
  void* handle_ = nullptr;
};

}  // namespace fourfold::jit
