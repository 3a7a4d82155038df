#include "cuda/device/pinned.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fourfold::cuda {

PinnedBuffer::PinnedBuffer(const Device& device, uint64_t bytes, std::string_view what, unsigned flags)
    : device_(&device), bytes_(bytes) {
  const LoadWatch watch(device.load_times().page_locking);
  const int result = device.driver().call().host_allocate(&data_, std::max<uint64_t>(bytes, 1), flags);
  if (result != 0) device_ = nullptr;
  device.check(result, fmt::format("{}: {} bytes of page-locked memory", what, bytes));
}

PinnedBuffer::~PinnedBuffer() {
  if (device_ != nullptr && !device_->lost()) device_->driver().call().host_free(data_);
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace fourfold::cuda
