// How much memory this process can still have.
#pragma once

#include <cstdint>
#include <string>

namespace fourfold::cpu {

struct AvailableMemory {
  int64_t bytes = -1;  // -1: unknown
  std::string limit;   // what sets it: "the machine" or a control group
};

// The least of what the machine has free or can free (MemAvailable) and of what the limits of this process's control
// groups leave. `root`: where proc/ and sys/ are, for tests.
AvailableMemory available_memory(const std::string& root = "/");

// Memory of caches is taken from the system as it is written, so a cache that does not fit would end the process later.
// An Error that names `what`, with what was found and wanted, when `bytes` beside `promised` bytes, promised before and
// perhaps not yet taken, are more than there is.
void check_available(const std::string& what, int64_t bytes, int64_t promised, const AvailableMemory& available);

// Bytes of a cache, checked when it is made and given back with it.
class MemoryPromise {
 public:
  MemoryPromise() = default;
  MemoryPromise(const std::string& what, int64_t bytes);
  MemoryPromise(MemoryPromise&& other) noexcept;
  MemoryPromise& operator=(MemoryPromise&& other) noexcept;
  ~MemoryPromise();

 private:
  int64_t bytes_ = 0;
};

}  // namespace fourfold::cpu
