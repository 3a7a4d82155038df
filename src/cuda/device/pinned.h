// Page-locked memory of the host, which a device copies from and to by itself and which kernels reach by the same
// address (unified addressing, on all architectures that plan/arch.h lists).
#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/device/device.h"

namespace fourfold::cuda {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  // `flags`: of the driver (jit::kHostMapped).
  PinnedBuffer(const Device& device, uint64_t bytes, std::string_view what, unsigned flags = 0);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  uint64_t bytes() const { return bytes_; }

 private:
  const Device* device_ = nullptr;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace fourfold::cuda
