// What the driver says of each device, and what its memory and links do: short copies, timed and compared.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "doctor/collect.h"
#include "jit/driver.h"
#include "jit/library.h"

namespace fourfold::doctor {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kBuffer = size_t{256} << 20;  // beyond every card's L2
constexpr size_t kPeerBytes = size_t{16} << 20;
constexpr int kCopies = 8;

class DeviceMemory {
 public:
  DeviceMemory(const jit::Driver& driver, size_t bytes) : driver_(driver) {
    driver_.check(driver_.call().memory_allocate(&address_, bytes), "memory for a probe");
  }
  ~DeviceMemory() { driver_.call().memory_free(address_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  jit::DeviceAddress address() const { return address_; }

 private:
  const jit::Driver& driver_;
  jit::DeviceAddress address_ = 0;
};

class HostMemory {
 public:
  HostMemory(const jit::Driver& driver, size_t bytes) : driver_(driver) {
    driver_.check(driver_.call().host_allocate(&memory_, bytes, 0), "pinned memory for a probe");
  }
  ~HostMemory() { driver_.call().host_free(memory_); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  void* get() const { return memory_; }

 private:
  const jit::Driver& driver_;
  void* memory_ = nullptr;
};

// Until the device has nothing to do. It spins, for the sake of the clock: who waits for ever is killed from outside.
void wait(const jit::Driver& driver, const char* what) {
  int result = 0;
  while ((result = driver.call().stream_query(nullptr)) == jit::kNotReady) {
  }
  driver.check(result, what);
}

// Gigabytes a second of `copy`, the best of several after one that does not count.
template <typename F>
double rate(const jit::Driver& driver, size_t bytes, F&& copy) {
  double best = 0;
  for (int i = 0; i <= kCopies; ++i) {
    const auto begin = Clock::now();
    copy();
    wait(driver, "a copy of a probe");
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (i > 0) best = std::max(best, static_cast<double>(bytes) / seconds / 1e9);
  }
  return best;
}

Json device_facts(const jit::Driver& driver, int index) {
  const jit::DeviceInfo info = driver.device(index);
  Json out = {{"name", info.name},
              {"arch", info.arch()},
              {"sms", info.sms},
              {"smem_per_block", info.smem_per_block},
              {"smem_per_sm", info.smem_per_sm},
              {"datasheet_gb_per_s", 1e3 * info.memory_tbs},
              {"host_memory", jit::host_memory_name(info.host_memory)}};
  driver.use(index);
  size_t free = 0, total = 0;
  driver.check(driver.call().memory_info(&free, &total), "the memory of a device");
  out["memory_free"] = free;
  out["memory_total"] = total;
  if (free < 3 * kBuffer) return out;
  const DeviceMemory a(driver, kBuffer), b(driver, kBuffer);
  driver.check(driver.call().fill_bytes(a.address(), 1, kBuffer, nullptr), "filling memory");
  // Each byte is read and written.
  out["copy_gb_per_s"] =
      2 * rate(driver, kBuffer, [&] {
        driver.check(driver.call().copy_on_device(b.address(), a.address(), kBuffer, nullptr), "a copy on the device");
      });
  const HostMemory host(driver, kBuffer);
  std::memset(host.get(), 1, kBuffer);
  out["host_to_device_gb_per_s"] = rate(driver, kBuffer, [&] {
    driver.check(driver.call().copy_to_device(a.address(), host.get(), kBuffer, nullptr), "a copy to the device");
  });
  return out;
}

// The driver's entry points for two devices, which nothing else here needs.
struct PeerFunctions {
  int (*can_access)(int* can, int device, int peer);
  int (*enable)(void* context, unsigned flags);
  int (*copy)(jit::DeviceAddress to, void* to_context, jit::DeviceAddress from, void* from_context, size_t bytes);
};

// From `from` to `to` and compared byte by byte: what an IOMMU that translates does to such copies shows in them, not
// in a table of links.
Json peer_facts(const jit::Driver& driver, const PeerFunctions& peer, int from, int to) {
  int devices[2], can = 0;
  void* contexts[2];
  for (const auto& [slot, index] : {std::pair(0, from), std::pair(1, to)}) {
    driver.check(driver.call().device_get(&devices[slot], index), "a device");
    driver.check(driver.call().primary_context(&contexts[slot], devices[slot]), "a context");
  }
  driver.check(peer.can_access(&can, devices[1], devices[0]), "peer access");
  Json out = {{"from", from}, {"to", to}, {"direct", can != 0}};
  std::string sent(kPeerBytes, '\0'), received(kPeerBytes, '\0');
  Random random(17);
  for (size_t i = 0; i < kPeerBytes; i += 8) {
    const uint64_t word = random.next();
    std::memcpy(sent.data() + i, &word, 8);
  }
  driver.use(from);
  const DeviceMemory source(driver, kPeerBytes);
  driver.check(driver.call().copy_to_device(source.address(), sent.data(), kPeerBytes, nullptr), "a copy to a device");
  wait(driver, "a copy to a device");
  driver.use(to);
  const DeviceMemory target(driver, kPeerBytes);
  if (can != 0) peer.enable(contexts[0], 0);  // an error where it was enabled before, which is as good
  out["gb_per_s"] = rate(driver, kPeerBytes, [&] {
    driver.check(peer.copy(target.address(), contexts[1], source.address(), contexts[0], kPeerBytes), "a peer copy");
  });
  driver.check(driver.call().copy_to_host(received.data(), target.address(), kPeerBytes, nullptr),
               "a copy to the host");
  wait(driver, "a copy to the host");
  size_t wrong = 0;
  for (size_t i = 0; i < kPeerBytes; ++i) wrong += sent[i] != received[i] ? 1 : 0;
  out["wrong_bytes"] = wrong;
  return out;
}

}  // namespace

Json gpu_probe() {
  std::string why;
  const jit::Driver* driver = jit::Driver::find(&why);
  if (driver == nullptr) return {{"none", why}};
  Json out = {{"driver_cuda", driver->version()}, {"devices", Json::array()}, {"peers", Json::array()}};
  for (int i = 0; i < driver->device_count(); ++i) out["devices"].push_back(device_facts(*driver, i));
  if (driver->device_count() < 2) return out;
  std::string tried;
  const auto library = jit::SharedLibrary::open({"libcuda.so.1", "libcuda.so"}, &tried);
  if (!library) return out;
  PeerFunctions peer{};
  library->load("cuDeviceCanAccessPeer", &peer.can_access);
  library->load("cuCtxEnablePeerAccess", &peer.enable);
  library->load("cuMemcpyPeer", &peer.copy);
  // A ring meets every device as a source and as a target.
  for (int i = 0; i < driver->device_count(); ++i) {
    out["peers"].push_back(peer_facts(*driver, peer, i, (i + 1) % driver->device_count()));
  }
  return out;
}

}  // namespace fourfold::doctor
