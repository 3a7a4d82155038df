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

namespace fourfold::doctor {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kBuffer = size_t{256} << 20;  // beyond every card's L2
constexpr size_t kPeerBytes = size_t{32} << 20;
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

// Of the device that is in use.
class Stream {
 public:
  explicit Stream(const jit::Driver& driver) : driver_(driver) {
    constexpr unsigned kNonBlocking = 1;
    driver_.check(driver_.call().stream_create(&handle_, kNonBlocking), "a stream for a probe");
  }
  ~Stream() { driver_.call().stream_destroy(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* handle() const { return handle_; }

 private:
  const jit::Driver& driver_;
  void* handle_ = nullptr;
};

// Until the stream has nothing to do. It spins, for the sake of the clock: who waits for ever is killed from outside.
void wait(const jit::Driver& driver, const Stream& stream, const char* what) {
  int result = 0;
  while ((result = driver.call().stream_query(stream.handle())) == jit::kNotReady) {
  }
  driver.check(result, what);
}

// Gigabytes a second of `copy`, the best of several after one that does not count.
template <typename F>
double rate(const jit::Driver& driver, const Stream& stream, size_t bytes, F&& copy) {
  double best = 0;
  for (int i = 0; i <= kCopies; ++i) {
    const auto begin = Clock::now();
    copy();
    wait(driver, stream, "a copy of a probe");
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
  const Stream stream(driver);
  const DeviceMemory a(driver, kBuffer), b(driver, kBuffer);
  driver.check(driver.call().fill_bytes(a.address(), 1, kBuffer, stream.handle()), "filling memory");
  // Each byte is read and written.
  out["copy_gb_per_s"] =
      2 * rate(driver, stream, kBuffer, [&] {
        driver.check(driver.call().copy_on_device(b.address(), a.address(), kBuffer, stream.handle()),
                     "a copy on the device");
      });
  const HostMemory host(driver, kBuffer);
  std::memset(host.get(), 1, kBuffer);
  out["host_to_device_gb_per_s"] = rate(driver, stream, kBuffer, [&] {
    driver.check(driver.call().copy_to_device(a.address(), host.get(), kBuffer, stream.handle()),
                 "a copy to the device");
  });
  return out;
}

// CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: over NVLink, and over no PCIe.
constexpr int kPeerAtomics = 3;

// From `from` to `to`, `sent` compared byte by byte: what an IOMMU that translates does to such copies shows in them,
// not in a table of links. Where there is no access between the two, by way of the host's memory.
Json peer_facts(const jit::Driver& driver, int from, int to, const std::string& sent) {
  int devices[2], can = 0, atomics = 0;
  driver.check(driver.call().device_get(&devices[0], from), "a device");
  driver.check(driver.call().device_get(&devices[1], to), "a device");
  driver.check(driver.call().can_access_peer(&can, devices[0], devices[1]), "peer access");
  std::string why;
  const bool direct = can != 0 && driver.enable_peer(from, to, &why);
  Json out = {{"from", from}, {"to", to}, {"direct", direct}};
  if (direct && driver.call().peer_attribute(&atomics, kPeerAtomics, devices[0], devices[1]) == 0) {
    out["link"] = atomics != 0 ? "NVLink" : "PCIe";
  }
  const size_t bytes = sent.size();
  driver.use(from);
  const Stream sends(driver);
  const DeviceMemory source(driver, bytes);
  const HostMemory between(driver, bytes);
  driver.check(driver.call().copy_to_device(source.address(), sent.data(), bytes, sends.handle()),
               "a copy to a device");
  wait(driver, sends, "a copy to a device");
  driver.use(to);
  const Stream takes(driver);
  const DeviceMemory target(driver, bytes);
  driver.use(from);
  out["gb_per_s"] = rate(driver, sends, bytes, [&] {
    if (direct) {
      driver.check(driver.call().copy_on_device(target.address(), source.address(), bytes, sends.handle()),
                   "a peer copy");
      return;
    }
    driver.check(driver.call().copy_to_host(between.get(), source.address(), bytes, sends.handle()),
                 "a copy to the host");
    wait(driver, sends, "a copy to the host");
    driver.use(to);
    driver.check(driver.call().copy_to_device(target.address(), between.get(), bytes, takes.handle()),
                 "a copy to a device");
    wait(driver, takes, "a copy to a device");
    driver.use(from);
  });
  driver.use(to);
  std::string received(bytes, '\0');
  driver.check(driver.call().copy_to_host(received.data(), target.address(), bytes, takes.handle()),
               "a copy to the host");
  wait(driver, takes, "a copy to the host");
  size_t wrong = 0;
  for (size_t i = 0; i < bytes; ++i) wrong += sent[i] != received[i] ? 1 : 0;
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
  std::string sent(kPeerBytes, '\0');
  Random random(17);
  for (size_t i = 0; i < kPeerBytes; i += 8) {
    const uint64_t word = random.next();
    std::memcpy(sent.data() + i, &word, 8);
  }
  // Each pair both ways: links differ by pair, and what is wrong one way may be right the other.
  for (int from = 0; from < driver->device_count(); ++from) {
    for (int to = 0; to < driver->device_count(); ++to) {
      if (from != to) out["peers"].push_back(peer_facts(*driver, from, to, sent));
    }
  }
  return out;
}

}  // namespace fourfold::doctor
