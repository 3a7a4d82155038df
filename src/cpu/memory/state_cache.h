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
//
// Writing the state after each of several rows takes as long as all else that the rows do. So a sequence that names a
// slot for each row may put off all but the first: their slots hold *updates* (delta/kernels.h), and the state is that
// of the first row's slot, the base, with these. begin_step() sees to it that nobody notices: a base is not overwritten
// while there are updates of it that are not, and what does not know updates finds states.
class HostStateCache : public ops::StateCache {
 public:
  static constexpr int64_t kPanel = 16;
  // DeltaKernels::replay
  using Replay = void (*)(int64_t updates, int64_t key_dim, int64_t value_dim, const float* rows, const float* state_in,
                          float* state_out);

  // `replay`: of those who put off; update_floats: of a row of updates, for one head.
  HostStateCache(const ops::StateCacheShape& shape, ThreadPool& pool, Replay replay = nullptr,
                 int64_t update_floats = 0);
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return buffer_.bytes(); }
  void copy(int64_t from, int64_t to) override;

  int64_t head_floats() const { return head_floats_; }  // of one value head's state
  // As it was written: without its updates.
  float* state(int64_t layer, int64_t slot, int64_t value_head) {
    return layer_data(layer, slot) + value_head * head_floats_;
  }
  float* convolution(int64_t layer, int64_t slot) {
    return layer_data(layer, slot) + shape_.value_heads * head_floats_;
  }
  // The state of one head as [key_dim, value_dim] without gaps, for tests and tools.
  void read_state(int64_t layer, int64_t slot, int64_t value_head, std::span<float> out);
  void write_state(int64_t layer, int64_t slot, int64_t value_head, std::span<const float> values);

  // Once for all layers of a step. A slot that one sequence of a batch writes is touched by no other, and is written
  // once; every sequence names one slot or one for each of its rows. Otherwise our own mistake.
  // `put_off_rows`: sequences of up to so many rows read updates, and put off where they can; 0: none does.
  void begin_step(const ops::Batch& batch, int64_t put_off_rows);

  // What a sequence of the step does.
  struct Access {
    int32_t base = -1;      // the slot whose state it reads; -1: it begins with zero
    int32_t updates = 0;    // of state_in, to be added to it
    int32_t half_in = 0;    // where they are: updates(..., state_in, half_in, ...)
    bool puts_off = false;  // the rows behind the first leave updates, row i of them in slot i the first i
    int32_t half_out = 0;   // there
  };
  const Access& access(size_t sequence) const { return accesses_[sequence]; }
  // Updates lie in the place of a head's state, in one of its halves: the other one may be read meanwhile.
  float* updates(int64_t layer, int64_t slot, int32_t half, int64_t value_head) {
    return state(layer, slot, value_head) + half * (head_floats_ / 2);
  }

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
  // Who writes and who reads each slot in step `steps_`.
  struct Use {
    int64_t written = 0, read = 0;   // the last step that did
    int32_t writer = 0, reader = 0;  // the sequence
    bool first = false;              // it is the writer's first slot
    bool shared = false;             // there are more readers
  };
  // A slot that holds updates.
  struct Updates {
    int32_t base = -1;  // none: it holds a state
    int32_t count = 0, half = 0;
  };
  void check_slots(const ops::Batch& batch);
  bool puts_off(const ops::Sequence& sequence, int64_t put_off_rows) const;
  bool keeps_updates(int32_t slot, const ops::Batch& batch, int64_t put_off_rows) const;
  void make_state(int32_t slot);    // of a slot with updates
  void release_base(int32_t slot);  // makes the states of all slots whose base it is
  std::vector<Use> uses_;
  std::vector<Updates> updates_;
  std::vector<int32_t> with_updates_;  // those slots
  std::vector<Access> accesses_;
  std::vector<float> kept_;  // updates of a head, for each thread
  Replay replay_;
  int64_t update_floats_;
  int64_t most_updates_ = 0;
  int64_t steps_ = 0;
};

}  // namespace fourfold::cpu
