#include "jit/driver.h"

#include "base/check.h"

namespace fourfold::jit {
namespace {
// Values of CUdevice_attribute and CUfunction_attribute (cuda.h).
constexpr int kClockKhz = 13, kSms = 16, kIntegrated = 18, kMemoryClockKhz = 36, kBusBits = 37, kL2Bytes = 38,
              kMajor = 75, kMinor = 76, kSmemPerSm = 81, kSmemPerBlockOptIn = 97, kUsesHostPageTables = 100;
constexpr int kFunctionDynamicSmem = 8;
constexpr int kFunctionSharedCarveout = 9;  // percent of what an SM can have at most
}  // namespace

std::string DeviceInfo::arch() const { return fmt::format("sm_{}{}{}", major, minor, major >= 9 ? "a" : ""); }

const char* host_memory_name(HostMemory memory) {
  switch (memory) {
    case HostMemory::kApart:
      return "memory of its own";
    case HostMemory::kCoherent:
      return "memory of its own, coherent with the processor's";
    case HostMemory::kOnePool:
      return "one pool of memory with the processor";
  }
  return "unknown";
}

HostMemory host_memory(bool integrated, bool uses_host_page_tables) {
  if (integrated) return HostMemory::kOnePool;
  return uses_host_page_tables ? HostMemory::kCoherent : HostMemory::kApart;
}

namespace {

Driver::Functions functions_of(const SharedLibrary& library) {
  Driver::Functions call = {};
  library.load("cuInit", &call.init);
  library.load("cuDriverGetVersion", &call.version);
  library.load("cuDeviceGetCount", &call.device_count);
  library.load("cuDeviceGet", &call.device_get);
  library.load("cuDeviceGetName", &call.device_name);
  library.load("cuDeviceGetAttribute", &call.device_attribute);
  library.load("cuDevicePrimaryCtxRetain", &call.primary_context);
  library.load("cuCtxSetCurrent", &call.set_current);
  library.load("cuDeviceCanAccessPeer", &call.can_access_peer);
  library.load("cuCtxEnablePeerAccess", &call.enable_peer);
  library.load("cuDeviceGetP2PAttribute", &call.peer_attribute);
  library.load("cuDeviceGetPCIBusId", &call.device_bus);
  library.load("cuModuleLoadData", &call.module_load);
  library.load("cuModuleUnload", &call.module_unload);
  library.load("cuModuleGetFunction", &call.module_function);
  library.load("cuFuncSetAttribute", &call.function_set);
  library.load("cuLaunchKernel", &call.launch);
  library.load("cuGetErrorString", &call.error_string);
  library.load("cuMemGetInfo_v2", &call.memory_info);
  library.load("cuMemAlloc_v2", &call.memory_allocate);
  library.load("cuMemFree_v2", &call.memory_free);
  library.load("cuMemHostAlloc", &call.host_allocate);
  library.load("cuMemFreeHost", &call.host_free);
  library.load("cuMemcpyHtoDAsync_v2", &call.copy_to_device);
  library.load("cuMemcpyDtoHAsync_v2", &call.copy_to_host);
  library.load("cuMemcpyDtoDAsync_v2", &call.copy_on_device);
  library.load("cuMemsetD8Async", &call.fill_bytes);
  library.load("cuStreamCreate", &call.stream_create);
  library.load("cuStreamDestroy_v2", &call.stream_destroy);
  library.load("cuStreamQuery", &call.stream_query);
  library.load("cuStreamBeginCapture_v2", &call.stream_begin_capture);
  library.load("cuStreamEndCapture", &call.stream_end_capture);
  library.load("cuEventCreate", &call.event_create);
  library.load("cuEventDestroy_v2", &call.event_destroy);
  library.load("cuEventRecord", &call.event_record);
  library.load("cuEventQuery", &call.event_query);
  library.load("cuEventElapsedTime", &call.event_elapsed);
  library.load("cuGraphInstantiateWithFlags", &call.graph_instantiate);
  library.load("cuGraphLaunch", &call.graph_launch);
  library.load("cuGraphExecDestroy", &call.graph_executable_destroy);
  library.load("cuGraphDestroy", &call.graph_destroy);
  library.load("cuLaunchKernelEx", &call.launch_with);
  library.load("cuTensorMapEncodeTiled", &call.tensor_map_encode);
  return call;
}

// In place of the machine's own.
std::unique_ptr<Driver>& substituted() {
  static std::unique_ptr<Driver> driver;
  return driver;
}

}  // namespace

Driver::Driver(std::shared_ptr<const Functions> functions, std::optional<SharedLibrary> library)
    : library_(std::move(library)), call_(std::move(functions)) {
  check(call_->init(0), "cuInit");
  check(call_->version(&version_), "cuDriverGetVersion");
  check(call_->device_count(&count_), "cuDeviceGetCount");
}

void Driver::substitute(std::shared_ptr<const Functions> functions) {
  substituted().reset(new Driver(std::move(functions)));
}

std::unique_ptr<const Driver> Driver::of(std::shared_ptr<const Functions> functions) {
  return std::unique_ptr<const Driver>(new Driver(std::move(functions)));
}

const Driver* Driver::find(std::string* why) {
  if (substituted() != nullptr) return substituted().get();
  struct Found {
    std::unique_ptr<Driver> driver;
    std::string why;
  };
  static const Found found = [] {
    Found f;
    try {
      if (auto library = SharedLibrary::open({"libcuda.so.1", "libcuda.so"}, &f.why)) {
        auto functions = std::make_shared<const Functions>(functions_of(*library));
        f.driver.reset(new Driver(std::move(functions), std::move(*library)));
        if (f.driver->device_count() == 0) {
          f.driver.reset();
          f.why = "\n  the driver has no device";
        }
      }
    } catch (const Error& error) {
      f.why = fmt::format("\n  {}", error.what());
    }
    return f;
  }();
  if (found.driver == nullptr && why != nullptr) *why = found.why;
  return found.driver.get();
}

const Driver& Driver::get() {
  std::string why;
  const Driver* driver = find(&why);
  if (driver == nullptr) fail("no CUDA device can be used; wanted an NVIDIA driver and a card:{}", why);
  return *driver;
}

void Driver::check(int result, std::string_view what) const {
  if (result == 0) return;
  const char* text = nullptr;
  call_->error_string(result, &text);
  fail("{}: CUDA error {} ({})", what, result, text != nullptr ? text : "unknown");
}

int Driver::attribute(int device, int attribute) const {
  int value = 0;
  check(call_->device_attribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

int Driver::attribute_or_zero(int device, int attribute) const {
  int value = 0;
  return call_->device_attribute(&value, attribute, device) == 0 ? value : 0;
}

DeviceInfo Driver::device(int index) const {
  if (index < 0 || index >= count_) fail("CUDA device {}: wanted 0 to {}", index, count_ - 1);
  int device = 0;
  check(call_->device_get(&device, index), "cuDeviceGet");
  char name[256] = {};
  check(call_->device_name(name, sizeof(name) - 1, device), "cuDeviceGetName");
  DeviceInfo info;
  info.name = name;
  info.major = attribute(device, kMajor);
  info.minor = attribute(device, kMinor);
  info.sms = attribute(device, kSms);
  info.smem_per_block = attribute(device, kSmemPerBlockOptIn);
  info.smem_per_sm = attribute(device, kSmemPerSm);
  info.l2_bytes = attribute(device, kL2Bytes);
  // Newer drivers answer 0 for the clocks of some cards.
  info.clock_ghz = attribute(device, kClockKhz) * 1e-6;
  info.memory_tbs = 2.0 * attribute(device, kMemoryClockKhz) * 1e3 * attribute(device, kBusBits) / 8 * 1e-12;
  info.host_memory =
      host_memory(attribute_or_zero(device, kIntegrated) != 0, attribute_or_zero(device, kUsesHostPageTables) != 0);
  return info;
}

void Driver::use(int index) const {
  int device = 0;
  void* context = nullptr;
  check(call_->device_get(&device, index), "cuDeviceGet");
  check(call_->primary_context(&context, device), "cuDevicePrimaryCtxRetain");
  check(call_->set_current(context), "cuCtxSetCurrent");
}

bool Driver::enable_peer(int index, int peer_index, std::string* why) const {
  constexpr int kAlreadyEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
  int device = 0, peer = 0, can = 0;
  check(call_->device_get(&device, index), "cuDeviceGet");
  check(call_->device_get(&peer, peer_index), "cuDeviceGet");
  check(call_->can_access_peer(&can, device, peer), "cuDeviceCanAccessPeer");
  if (can == 0) {
    *why = fmt::format("the driver has no peer access from device {} to device {}", index, peer_index);
    return false;
  }
  void* context = nullptr;
  check(call_->primary_context(&context, peer), "cuDevicePrimaryCtxRetain");
  use(index);
  const int result = call_->enable_peer(context, 0);
  if (result == 0 || result == kAlreadyEnabled) return true;
  const char* text = nullptr;
  call_->error_string(result, &text);
  *why = fmt::format("peer access from device {} to device {}: CUDA error {} ({})", index, peer_index, result,
                     text != nullptr ? text : "unknown");
  return false;
}

Module::Module(const Driver& driver, std::string_view cubin, std::string_view name) : driver_(driver), name_(name) {
  driver_.check(driver_.call().module_load(&handle_, cubin.data()), name_);
}

Module::~Module() {
  if (handle_ != nullptr) driver_.call().module_unload(handle_);
}

void* Module::function(const std::string& mangled, int64_t smem_bytes, bool all_shared) const {
  void* function = nullptr;
  driver_.check(driver_.call().module_function(&function, handle_, mangled.c_str()),
                fmt::format("{}: kernel {}", name_, mangled));
  driver_.check(driver_.call().function_set(function, kFunctionDynamicSmem, static_cast<int>(smem_bytes)),
                fmt::format("{}: {} bytes of shared memory", name_, smem_bytes));
  if (all_shared) {
    driver_.check(driver_.call().function_set(function, kFunctionSharedCarveout, 100),
                  fmt::format("{}: SMs with as much shared memory as possible", name_));
  }
  return function;
}

}  // namespace fourfold::jit
