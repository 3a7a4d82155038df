#include "cpu/memory/available.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "base/check.h"

namespace fourfold::cpu {
namespace {

// The number that a line "NAME: 123 kB" or "NAME 123" of a file has.
std::optional<int64_t> field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t number = 0;
    if (words >> word && (word == name || word == name + ":") && words >> number) return number;
  }
  return std::nullopt;
}

// A file with one number; "max" and what is no number: nothing.
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

void lower(AvailableMemory& found, int64_t bytes, const std::string& limit) {
  bytes = std::max<int64_t>(bytes, 0);
  if (found.bytes >= 0 && found.bytes <= bytes) return;
  found = {bytes, limit};
}

// A group and those around it, up to the mount point.
void lower_by_groups(AvailableMemory& found, const std::string& mount, std::string group, const char* limit_name,
                     const char* usage_name, const char* reclaimable_name) {
  for (;;) {
    const std::string folder = mount + (group == "/" ? "" : group);
    const auto limit = number_in(folder + "/" + limit_name);
    const auto usage = number_in(folder + "/" + usage_name);
    // Version 1 says "none" with a number close to 2^63.
    if (limit && usage && *limit < int64_t{1} << 60) {
      const int64_t reclaimable = field(folder + "/memory.stat", reclaimable_name).value_or(0);
      lower(found, *limit - *usage + reclaimable, "control group " + group);
    }
    if (group.empty() || group == "/") return;
    group.resize(group.rfind('/'));
    if (group.empty()) group.push_back('/');
  }
}

std::atomic<int64_t> promised_bytes{0};

}  // namespace

AvailableMemory available_memory(const std::string& root) {
  AvailableMemory found;
  if (const auto kib = field(root + "proc/meminfo", "MemAvailable")) lower(found, *kib * 1024, "the machine");
  std::ifstream groups(root + "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:memory:/path" of version 1
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers.empty()) {
      lower_by_groups(found, root + "sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file");
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      lower_by_groups(found, root + "sys/fs/cgroup/memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                      "total_inactive_file");
    }
  }
  return found;
}

void check_available(const std::string& what, int64_t bytes, int64_t promised, const AvailableMemory& available) {
  if (available.bytes < 0 || bytes <= available.bytes - promised) return;
  const auto gib = [](int64_t n) { return static_cast<double>(n) / static_cast<double>(int64_t{1} << 30); };
  std::string others;
  if (promised > 0) others = fmt::format(", {:.2f} GiB of them promised to other caches", gib(promised));
  fail("{}: {:.2f} GiB wanted, {:.2f} GiB are available ({}{})", what, gib(bytes), gib(available.bytes),
       available.limit, others);
}

MemoryPromise::MemoryPromise(const std::string& what, int64_t bytes) {
  check_available(what, bytes, promised_bytes.load(), available_memory());
  promised_bytes += bytes;
  bytes_ = bytes;
}

MemoryPromise::MemoryPromise(MemoryPromise&& other) noexcept : bytes_(std::exchange(other.bytes_, 0)) {}

MemoryPromise& MemoryPromise::operator=(MemoryPromise&& other) noexcept {
  if (this != &other) {
    promised_bytes -= bytes_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

MemoryPromise::~MemoryPromise() { promised_bytes -= bytes_; }

}  // namespace fourfold::cpu
