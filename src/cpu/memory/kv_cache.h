// Keys and values in pages.
#pragma once

#include <cstdint>

#include "cpu/memory/available.h"
#include "cpu/memory/host_buffer.h"
#include "ops/ops.h"

namespace fourfold::cpu {

// Keys and values: [layer][page][kv head][0: keys, 1: values][position in page][padded_dim], elements fp32 or f16.
// padded_dim is head_dim rounded up to 32; the padding is always zero.
class HostKvCache : public ops::KvCache {
 public:
  HostKvCache(const ops::KvCacheShape& shape, ops::DType type);
  const ops::KvCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return buffer_.bytes(); }
  void copy_page(int64_t from, int64_t to) override;

  ops::DType type() const { return type_; }
  int64_t padded_dim() const { return padded_dim_; }
  // Elements from the keys of a page to its values.
  int64_t values_offset() const { return shape_.page_size * padded_dim_; }
  // The first key of a page.
  template <typename T>
  T* keys(int64_t layer, int64_t page, int64_t kv_head) {
    return static_cast<T*>(buffer_.data()) +
           ((layer * shape_.pages + page) * shape_.kv_heads + kv_head) * 2 * values_offset();
  }
  // Where a key (part 0) or value (part 1) lies.
  void* at(int64_t layer, int64_t page, int64_t kv_head, int64_t part, int64_t offset) {
    const int64_t element = part * values_offset() + offset * padded_dim_;
    if (type_ == ops::DType::kF32) return keys<float>(layer, page, kv_head) + element;
    return keys<uint16_t>(layer, page, kv_head) + element;
  }

 private:
  ops::KvCacheShape shape_;
  ops::DType type_;
  int64_t padded_dim_;
  MemoryPromise promise_;
  HostBuffer buffer_;
};

}  // namespace fourfold::cpu
