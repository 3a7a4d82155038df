#include "cpu/memory/state_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::cpu {

HostStateCache::HostStateCache(const ops::StateCacheShape& shape, ThreadPool& pool) : shape_(shape), pool_(pool) {
  head_floats_ = checked_bytes("state cache", {round_up(shape.value_dim, kPanel), shape.key_dim});
  const int64_t convolution = checked_bytes("state cache", {shape.conv_taps - 1, shape.conv_channels()});
  // Whole cache lines, so that slots and layers stay aligned.
  layer_floats_ = round_up(checked_bytes("state cache", {shape.value_heads, head_floats_}) + convolution, 16);
  const int64_t bytes = checked_bytes("state cache", {shape.slots, shape.layers, layer_floats_, 4});
  promise_ = MemoryPromise(fmt::format("state cache of {} slots", shape.slots), bytes);
  buffer_ = HostBuffer(bytes);
  writers_.resize(static_cast<size_t>(shape.slots));
}

void HostStateCache::copy(int64_t from, int64_t to) {
  FF_ASSERT(from >= 0 && from < shape_.slots && to >= 0 && to < shape_.slots);
  if (from == to || shape_.layers == 0) return;
  const int64_t bytes = shape_.layers * layer_floats_ * 4;
  char* base = static_cast<char*>(buffer_.data());
  pool_.parallel_for(bytes, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    std::memcpy(base + to * bytes + begin, base + from * bytes + begin, static_cast<size_t>(end - begin));
  });
}

void HostStateCache::read_state(int64_t layer, int64_t slot, int64_t value_head, std::span<float> out) {
  FF_ASSERT(static_cast<int64_t>(out.size()) == shape_.key_dim * shape_.value_dim);
  const float* head = state(layer, slot, value_head);
  for (int64_t i = 0; i < shape_.key_dim; ++i) {
    for (int64_t j = 0; j < shape_.value_dim; ++j) {
      out[static_cast<size_t>(i * shape_.value_dim + j)] =
          head[(j / kPanel * shape_.key_dim + i) * kPanel + j % kPanel];
    }
  }
}

void HostStateCache::write_state(int64_t layer, int64_t slot, int64_t value_head, std::span<const float> values) {
  FF_ASSERT(static_cast<int64_t>(values.size()) == shape_.key_dim * shape_.value_dim);
  float* head = state(layer, slot, value_head);
  for (int64_t i = 0; i < shape_.key_dim; ++i) {
    for (int64_t j = 0; j < shape_.value_dim; ++j) {
      head[(j / kPanel * shape_.key_dim + i) * kPanel + j % kPanel] =
          values[static_cast<size_t>(i * shape_.value_dim + j)];
    }
  }
}

void HostStateCache::check_slots(const ops::Batch& batch) {
  ++checks_;
  const auto sequences = static_cast<int64_t>(batch.sequences.size());
  for (int64_t s = 0; s < sequences; ++s) {
    const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(s)];
    const std::span<const int32_t> slots = sequence.written_slots();
    FF_ASSERT(slots.size() == 1 || slots.size() == static_cast<size_t>(sequence.count));
    for (const int32_t slot : slots) {
      FF_ASSERT(slot >= 0 && slot < shape_.slots);
      Writer& writer = writers_[static_cast<size_t>(slot)];
      FF_ASSERT(writer.check != checks_);
      writer = {checks_, s};
    }
  }
  for (int64_t s = 0; s < sequences; ++s) {
    const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(s)];
    if (sequence.position == 0) continue;
    FF_ASSERT(sequence.state_in >= 0 && sequence.state_in < shape_.slots);
    const Writer& writer = writers_[static_cast<size_t>(sequence.state_in)];
    FF_ASSERT(writer.check != checks_ || writer.sequence == s);
  }
}

}  // namespace fourfold::cpu
