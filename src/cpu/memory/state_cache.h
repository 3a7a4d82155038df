// Recurrent state in slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/threads.h"
#include "cpu/memory/available.h"
#include "cpu/memory/host_buffer.h"
#include "ops/batch.h"
#include "ops/ops.h"

namespace fourfold::cpu {

// Recurrent state, all fp32: [slot][layer][state, then convolution].
//   state: [value head][panel of 16 values][key_dim][16]; value_dim is rounded up to whole panels, padding zero. A
//   panel is what one pass of the recurrence holds in L1 (8 KiB for 128 keys) and a packed operand of the chunked form.
//   convolution: [conv_taps - 1][conv_channels], oldest first.
class HostStateCache : public ops::StateCache {
 public:
  static constexpr int64_t kPanel = 16;

  HostStateCache(const ops::StateCacheShape& shape, ThreadPool& pool);
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return buffer_.bytes(); }
  void copy(int64_t from, int64_t to) override;

  int64_t head_floats() const { return head_floats_; }  // of one value head's state
  float* state(int64_t layer, int64_t slot, int64_t value_head) {
    return layer_data(layer, slot) + value_head * head_floats_;
  }
  float* convolution(int64_t layer, int64_t slot) {
    return layer_data(layer, slot) + shape_.value_heads * head_floats_;
  }
  // The state of one head as [key_dim, value_dim] without gaps, for tests and tools.
  void read_state(int64_t layer, int64_t slot, int64_t value_head, std::span<float> out);
  void write_state(int64_t layer, int64_t slot, int64_t value_head, std::span<const float> values);

  // A slot that one sequence of a batch writes is touched by no other, and is written once; every sequence names one
  // slot or one for each of its rows. Otherwise our own mistake.
  void check_slots(const ops::Batch& batch);

 private:
  float* layer_data(int64_t layer, int64_t slot) {
    return static_cast<float*>(buffer_.data()) + (slot * shape_.layers + layer) * layer_floats_;
  }
  ops::StateCacheShape shape_;
  ThreadPool& pool_;
  int64_t head_floats_;
  int64_t layer_floats_;
  MemoryPromise promise_;
  HostBuffer buffer_;
  // The sequence that writes each slot in the batch of check `checks_`.
  struct Writer {
    int64_t check = 0;
    int64_t sequence = 0;
  };
  std::vector<Writer> writers_;
  int64_t checks_ = 0;
};

}  // namespace fourfold::cpu
