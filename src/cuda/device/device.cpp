#include "cuda/device/device.h"

#include <algorithm>
#include <cctype>
#include <thread>

#include "base/check.h"
#include "cuda/device/counting_driver.h"

namespace fourfold::cuda {
namespace {

constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventDefault = 0;   // with timing
constexpr int kCaptureThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr int kOutOfMemory = 2;         // CUDA_ERROR_OUT_OF_MEMORY
constexpr double kGigabyte = 1e9;

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Whether a device's name has every word of a row's model number: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
// has "rtx-pro-6000".
bool names(std::string_view device, std::string_view row) {
  const std::string text = fmt::format(" {} ", lower(device));
  for (size_t at = 0; at <= row.size();) {
    const size_t end = std::min(row.find('-', at), row.size());
    std::string word(row.substr(at, end - at));
    const size_t found = text.find(word);
    if (found == std::string::npos) return false;
    // A number must be whole: "5070" is not "50705"; "h100" is followed by a space or a dash.
    const auto in_word = [&](size_t i) { return std::isalnum(static_cast<unsigned char>(text[i])) != 0; };
    if (in_word(found - 1) || in_word(found + word.size())) return false;
    at = end + 1;
  }
  return true;
}

[[noreturn]] void give_up(const Device& device, const std::string& what) {
  device.lose();
  fail("{}: no end within {:.3g} s of waiting; {}", device.info().name,
       std::chrono::duration<double>(device.deadline()).count(), what);
}

}  // namespace

int wait_until_ready(const std::function<int()>& query, std::chrono::milliseconds deadline) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kEager = std::chrono::milliseconds(2);
  const Clock::time_point start = Clock::now();
  for (;;) {
    const int result = query();
    if (result != jit::kNotReady) return result;
    const auto waited = Clock::now() - start;
    if (waited >= deadline) return result;
    if (waited >= kEager) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

plan::Gpu gpu_row_of(const jit::DeviceInfo& info) {
  const plan::Arch& arch = plan::find_arch(info.arch());
  const plan::Gpu* best = nullptr;
  for (const plan::Gpu& row : plan::kGpus) {
    // The longest name wins: "RTX 5070 Ti" is not the "RTX 5070".
    if (row.arch == arch.name && names(info.name, row.name) &&
        (best == nullptr || row.name.size() > best->name.size())) {
      best = &row;
    }
  }
  plan::Gpu gpu = best != nullptr ? *best : plan::representative_gpu(arch);
  if (best != nullptr && info.sms == best->sms) return gpu;
  // Another card of that architecture, or another edition: its own size and speed.
  gpu.name = "this card";
  gpu.sms = info.sms;
  gpu.l2_mb = static_cast<double>(info.l2_bytes) / 1e6;
  gpu.bf16_tflops = gpu.bf16_sustained_tflops = 0;
  if (info.clock_ghz > 0) gpu.clock_ghz = gpu.sustained_ghz = info.clock_ghz;
  if (info.memory_tbs > 0) {
    gpu.read_tbs = info.memory_tbs;
    gpu.read_source = plan::Source::kDatasheet;
  }
  return gpu;
}

jit::DeviceInfo info_of(const plan::Gpu& gpu) {
  const plan::Arch& arch = plan::arch_of(gpu);
  const int capability = std::stoi(std::string(gpu.arch.substr(3)));
  jit::DeviceInfo info;
  info.name = gpu.title;
  info.major = capability / 10;
  info.minor = capability % 10;
  info.sms = gpu.sms;
  info.smem_per_block = arch.smem_per_block;
  info.smem_per_sm = arch.smem_per_sm;
  return info;
}

Device::Device(int index)
    : driver_(jit::Driver::get()), index_(index), info_(driver_.device(index)), gpu_(gpu_row_of(info_)) {
  gpu_.title = info_.name;
  make_current();
}

Device::Device(const jit::DeviceInfo& info, uint64_t memory_bytes)
    : own_driver_(counting_driver()),
      driver_(*own_driver_),
      counted_memory_(memory_bytes),
      index_(0),
      info_(info),
      gpu_(gpu_row_of(info_)) {
  gpu_.title = info_.name;
}

void Device::make_current() const { driver_.use(index_); }

DeviceMemory memory_of_device(jit::HostMemory kind, const DeviceMemory& driver, const cpu::AvailableMemory& available) {
  if (kind != jit::HostMemory::kOnePool || available.bytes < 0) return driver;
  return {std::min(static_cast<uint64_t>(available.bytes), driver.total), driver.total};
}

DeviceMemory Device::memory() const {
  if (only_counts()) {
    const uint64_t taken = ledger_.counts().taken;
    return {counted_memory_ - std::min(counted_memory_, taken), counted_memory_};
  }
  size_t free = 0, total = 0;
  check(driver_.call().memory_info(&free, &total), "cuMemGetInfo");
  return memory_of_device(info_.host_memory, {free, total}, cpu::available_memory());
}

Stream::Stream(const Device& device) : device_(device) {
  device_.check(device_.driver().call().stream_create(&handle_, kNonBlocking), "cuStreamCreate");
}
Stream::~Stream() {
  if (!device_.lost()) device_.driver().call().stream_destroy(handle_);
}
void Stream::synchronize() const {
  const char* last = last_.data();
  device_.wait([&] { return device_.driver().call().stream_query(handle_); },
               fmt::format("what was launched last is {}", *last == 0 ? "a copy" : last));
}
void Device::wait(const std::function<int()>& query, const std::string& what) const {
  const int result = wait_until_ready(query, deadline());
  if (result == jit::kNotReady) give_up(*this, what);
  check(result, "waiting for the device");
}
void Stream::launched(std::string_view name) const {
  const size_t count = std::min(name.size(), last_.size() - 1);
  std::copy_n(name.begin(), count, last_.begin());
  last_[count] = 0;
}

Buffer::Buffer(const Device& device, uint64_t bytes, std::string_view what)
    : device_(&device), bytes_(bytes), kind_(device.memory_kind()) {
  // In one pool a driver gives more than there is, and the system ends some process for it.
  constexpr uint64_t kLarge = uint64_t{64} << 20;
  if (bytes >= kLarge && device.info().host_memory == jit::HostMemory::kOnePool && !device.only_counts()) {
    cpu::check_available(std::string(what), static_cast<int64_t>(bytes), 0, cpu::available_memory());
  }
  int result = 0;
  {
    const LoadWatch watch(device.load_times().allocating);
    result = device.driver().call().memory_allocate(&address_, std::max<uint64_t>(bytes, 1));
  }
  if (result == 0) {
    device.ledger().add(kind_, bytes);
    return;
  }
  device_ = nullptr;
  if (result == kOutOfMemory) {
    const DeviceMemory memory = device.memory();
    fail("{}: {:.3f} GB asked for, {:.3f} of {:.3f} GB free on {}", what, static_cast<double>(bytes) / kGigabyte,
         static_cast<double>(memory.free) / kGigabyte, static_cast<double>(memory.total) / kGigabyte,
         device.info().name);
  }
  device.check(result, fmt::format("{}: {} bytes of device memory", what, bytes));
}

Buffer::~Buffer() {
  if (device_ == nullptr || device_->lost()) return;
  device_->driver().call().memory_free(address_);
  device_->ledger().remove(kind_, bytes_);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
  return *this;
}

void Buffer::upload(const Stream& stream, const void* from, uint64_t size, uint64_t offset) {
  FF_ASSERT(offset <= bytes_ && size <= bytes_ - offset);
  if (size == 0) return;
  stream.device().check(stream.device().driver().call().copy_to_device(address_ + offset, from, size, stream.handle()),
                        "copy to the device");
}

void Buffer::download(const Stream& stream, void* to, uint64_t size, uint64_t offset) const {
  FF_ASSERT(offset <= bytes_ && size <= bytes_ - offset);
  if (size == 0) return;
  stream.device().check(stream.device().driver().call().copy_to_host(to, address_ + offset, size, stream.handle()),
                        "copy from the device");
}

void Buffer::copy(const Stream& stream, const Buffer& from, uint64_t size) {
  FF_ASSERT(size <= bytes_ && size <= from.bytes_);
  if (size == 0) return;
  stream.device().check(stream.device().driver().call().copy_on_device(address_, from.address_, size, stream.handle()),
                        "copy on the device");
}

void Buffer::fill(const Stream& stream, unsigned char value) {
  if (bytes_ == 0) return;
  stream.device().check(stream.device().driver().call().fill_bytes(address_, value, bytes_, stream.handle()),
                        "filling device memory");
}

ptx::TensorMap row_pieces(const Device& device, DeviceAddress address, uint64_t rows, uint64_t columns, uint64_t stride,
                          unsigned copied) {
  // Values of CUtensorMapDataType and the like (cuda.h). 256 bytes come to L2 at once: the next piece is wanted soon.
  constexpr int kBf16 = 9, kNoInterleave = 0, kSwizzle128 = 3, kPromote256 = 3, kZeros = 0;
  ptx::TensorMap map = {};
  if (device.only_counts()) return map;
  const uint64_t sizes[2] = {columns, rows};
  const unsigned box[2] = {64, copied}, steps[2] = {1, 1};
  const int result = device.driver().call().tensor_map_encode(
      &map, kBf16, 2, reinterpret_cast<void*>(static_cast<uintptr_t>(address)), sizes, &stride, box, steps,
      kNoInterleave, kSwizzle128, kPromote256, kZeros);
  if (result != 0) {
    device.check(result,
                 fmt::format("tensor map of {} x {} values at {:#x}, {} bytes a row", rows, columns, address, stride));
  }
  return map;
}

Event::Event(const Device& device) : device_(device) {
  device_.check(device_.driver().call().event_create(&handle_, kEventDefault), "cuEventCreate");
}
Event::~Event() {
  if (!device_.lost()) device_.driver().call().event_destroy(handle_);
}
void Event::record(const Stream& stream) const {
  device_.check(device_.driver().call().event_record(handle_, stream.handle()), "cuEventRecord");
}
bool Event::reached() const {
  const int result = device_.driver().call().event_query(handle_);
  if (result == jit::kNotReady) return false;
  device_.check(result, "waiting for the device");
  return true;
}
void Event::wait() const {
  device_.wait([&] { return device_.driver().call().event_query(handle_); }, "an event was waited for");
}
double Event::microseconds(const Event& start, const Event& stop) {
  const Device& device = stop.device_;
  stop.wait();
  float milliseconds = 0;
  device.check(device.driver().call().event_elapsed(&milliseconds, start.handle_, stop.handle_), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e3;
}

Recording::Recording(const Stream& stream) : stream_(stream) {
  const Device& device = stream.device();
  device.check(device.driver().call().stream_begin_capture(stream.handle(), kCaptureThreadLocal), "beginning a graph");
}
Recording::~Recording() {
  if (!open_) return;
  const jit::Driver::Functions& call = stream_.device().driver().call();
  void* graph = nullptr;
  if (call.stream_end_capture(stream_.handle(), &graph) == 0 && graph != nullptr) call.graph_destroy(graph);
}

void Graph::take(Recording& recording) {
  const jit::Driver::Functions& call = device_.driver().call();
  void* graph = nullptr;
  recording.open_ = false;
  device_.check(call.stream_end_capture(recording.stream_.handle(), &graph), "ending a graph");
  const int result = call.graph_instantiate(&executable_, graph, 0);
  call.graph_destroy(graph);
  device_.check(result, "instantiating a graph");
}
Graph::Graph(Recording& recording) : device_(recording.stream_.device()) { take(recording); }
Graph::Graph(const Stream& stream, const std::function<void()>& enqueue) : device_(stream.device()) {
  Recording recording(stream);
  enqueue();
  take(recording);
}
Graph::~Graph() {
  if (!device_.lost()) device_.driver().call().graph_executable_destroy(executable_);
}
void Graph::launch(const Stream& stream) const {
  stream.launched("a graph");
  stream.take_overlap();  // a graph starts when everything before it has ended
  device_.check(device_.driver().call().graph_launch(executable_, stream.handle()), "launching a graph");
}

void launch_raw(const Stream& stream, const Kernel& kernel, Grid grid, Overlap overlap, void** arguments) {
  stream.launched(kernel.name);
  jit::LaunchAttribute attribute = {};
  attribute.id = jit::kProgrammaticLaunch;
  attribute.value.flag = 1;
  // Architectures before sm_90 have no such launches, and their kernels no wait.
  const bool early = stream.take_overlap() && overlap == Overlap::kProgrammatic && stream.device().info().major >= 9;
  if (const Device::LaunchNote& note = stream.device().launch_note()) note(kernel, grid, early);
  if (stream.device().only_counts()) return;
  const jit::LaunchConfig config = {{grid.x, grid.y, grid.z}, {kernel.threads, 1, 1},       kernel.smem_bytes,
                                    stream.handle(),          early ? &attribute : nullptr, early ? 1u : 0u};
  const int result = stream.device().driver().call().launch_with(&config, kernel.function, arguments, nullptr);
  if (result != 0) {
    stream.device().check(result, fmt::format("launch of {}: grid {} x {} x {}, {} threads, {} bytes of shared memory",
                                              kernel.name, grid.x, grid.y, grid.z, kernel.threads, kernel.smem_bytes));
  }
}

}  // namespace fourfold::cuda
