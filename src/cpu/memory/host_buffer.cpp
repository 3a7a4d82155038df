#include "cpu/memory/host_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::cpu {

namespace {
constexpr int64_t kLarge = int64_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
}  // namespace

HostBuffer::HostBuffer(int64_t bytes) : bytes_(bytes) {
  FF_ASSERT(bytes >= 0);
  if (bytes == 0) return;
  if (bytes < kLarge) {
    const auto size = static_cast<size_t>(round_up(bytes, 64));
    data_ = std::aligned_alloc(64, size);
    if (data_ == nullptr) fail("out of memory: {} bytes", bytes);
    std::memset(data_, 0, size);
    return;
  }
  mapped_bytes_ = static_cast<size_t>(checked_add(static_cast<uint64_t>(bytes), 2 * kHugePage, "buffer"));
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));  // 4, 16 or 64 KiB
  mapped_bytes_ = mapped_bytes_ / page * page;
  mapping_ = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    fail("out of memory: {:.1f} MiB", static_cast<double>(bytes) / 1048576.0);
  }
  const auto address = (reinterpret_cast<uintptr_t>(mapping_) + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<void*>(address);
  // Only a wish: the system may have huge pages switched off. A large buffer may waste the rest of its last one.
  const auto wanted = static_cast<size_t>(
      bytes < 16 * static_cast<int64_t>(kHugePage) ? bytes : round_up(bytes, static_cast<int64_t>(kHugePage)));
  ::madvise(data_, wanted, MADV_HUGEPAGE);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  }
  return *this;
}

HostBuffer::~HostBuffer() { release(); }

void HostBuffer::release() {
  if (mapping_ != nullptr) {
    ::munmap(mapping_, mapped_bytes_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  mapping_ = nullptr;
  bytes_ = 0;
}

int64_t checked_bytes(const char* what, std::initializer_list<int64_t> factors) {
  uint64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor < 0) fail("{}: a size of {}, wanted 0 or more", what, factor);
    product = checked_mul(product, static_cast<uint64_t>(factor), what);
  }
  if (product > uint64_t{1} << 60) fail("{}: {} bytes are more than any machine has", what, product);
  return static_cast<int64_t>(product);
}

}  // namespace fourfold::cpu
