// Memory of the CPU backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "ops/ops.h"

namespace fourfold::cpu {

// Host memory, zeroed. From 1 MiB on it is mapped on its own, aligned to 2 MiB and marked for transparent huge pages;
// smaller blocks are aligned to 64 bytes. An Error when the system has no memory.
class HostBuffer : public ops::Buffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(int64_t bytes);
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  ~HostBuffer() override;

  void* data() override { return data_; }
  const void* data() const { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void release();
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  void* mapping_ = nullptr;  // of large blocks
  size_t mapped_bytes_ = 0;
};

// The product of sizes, in bytes; an Error that names `what` where one is negative or no machine has so much.
int64_t checked_bytes(const char* what, std::initializer_list<int64_t> factors);

}  // namespace fourfold::cpu
