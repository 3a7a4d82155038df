#include "cpu/memory/kv_cache.h"

#include <cstring>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::cpu {

HostKvCache::HostKvCache(const ops::KvCacheShape& shape, ops::DType type)
    : shape_(shape), type_(type), padded_dim_(round_up(shape.head_dim, 32)) {
  if (shape.page_size < 1) fail("key/value cache: pages of {} positions, wanted at least 1", shape.page_size);
  const int64_t bytes = checked_bytes("key/value cache", {shape.layers, shape.pages, shape.kv_heads, 2, shape.page_size,
                                                          padded_dim_, type == ops::DType::kF32 ? 4 : 2});
  promise_ =
      MemoryPromise(fmt::format("key/value cache of {} pages of {} positions", shape.pages, shape.page_size), bytes);
  buffer_ = HostBuffer(bytes);
}

void HostKvCache::copy_page(int64_t from, int64_t to) {
  FF_ASSERT(from >= 0 && from < shape_.pages && to >= 0 && to < shape_.pages);
  const int64_t bytes = shape_.kv_heads * 2 * values_offset() * (type_ == ops::DType::kF32 ? 4 : 2);
  char* base = static_cast<char*>(buffer_.data());
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    std::memmove(base + (layer * shape_.pages + to) * bytes, base + (layer * shape_.pages + from) * bytes,
                 static_cast<size_t>(bytes));
  }
}

}  // namespace fourfold::cpu
