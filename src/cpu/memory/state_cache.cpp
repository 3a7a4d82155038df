#include "cpu/memory/state_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::cpu {

HostStateCache::HostStateCache(const ops::StateCacheShape& shape, ThreadPool& pool, Replay replay,
                               int64_t update_floats)
    : shape_(shape), pool_(pool), replay_(replay), update_floats_(update_floats) {
  head_floats_ = checked_bytes("state cache", {round_up(shape.value_dim, kPanel), shape.key_dim});
  const int64_t convolution = checked_bytes("state cache", {shape.conv_taps - 1, shape.conv_channels()});
  // Whole cache lines, so that slots and layers stay aligned.
  layer_floats_ = round_up(checked_bytes("state cache", {shape.value_heads, head_floats_}) + convolution, 16);
  const int64_t bytes = checked_bytes("state cache", {shape.slots, shape.layers, layer_floats_, 4});
  promise_ = MemoryPromise(fmt::format("state cache of {} slots", shape.slots), bytes);
  buffer_ = HostBuffer(bytes);
  uses_.resize(static_cast<size_t>(shape.slots));
  updates_.resize(static_cast<size_t>(shape.slots));
  with_updates_.reserve(static_cast<size_t>(shape.slots));
  accesses_.reserve(static_cast<size_t>(shape.slots));
  if (replay == nullptr) return;
  most_updates_ = head_floats_ / 2 / update_floats;
  kept_.resize(static_cast<size_t>(pool.size() * most_updates_ * update_floats));
}

void HostStateCache::copy(int64_t from, int64_t to) {
  FF_ASSERT(from >= 0 && from < shape_.slots && to >= 0 && to < shape_.slots);
  if (from == to || shape_.layers == 0) return;
  make_state(static_cast<int32_t>(from));
  make_state(static_cast<int32_t>(to));
  release_base(static_cast<int32_t>(to));
  const int64_t bytes = shape_.layers * layer_floats_ * 4;
  char* base = static_cast<char*>(buffer_.data());
  pool_.parallel_for(bytes, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    std::memcpy(base + to * bytes + begin, base + from * bytes + begin, static_cast<size_t>(end - begin));
  });
}

void HostStateCache::read_state(int64_t layer, int64_t slot, int64_t value_head, std::span<float> out) {
  FF_ASSERT(static_cast<int64_t>(out.size()) == shape_.key_dim * shape_.value_dim);
  make_state(static_cast<int32_t>(slot));
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
  make_state(static_cast<int32_t>(slot));
  release_base(static_cast<int32_t>(slot));
  float* head = state(layer, slot, value_head);
  for (int64_t i = 0; i < shape_.key_dim; ++i) {
    for (int64_t j = 0; j < shape_.value_dim; ++j) {
      head[(j / kPanel * shape_.key_dim + i) * kPanel + j % kPanel] =
          values[static_cast<size_t>(i * shape_.value_dim + j)];
    }
  }
}

void HostStateCache::check_slots(const ops::Batch& batch) {
  ++steps_;
  const auto sequences = static_cast<int32_t>(batch.sequences.size());
  for (int32_t s = 0; s < sequences; ++s) {
    const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(s)];
    const std::span<const int32_t> slots = sequence.written_slots();
    FF_ASSERT(slots.size() == 1 || slots.size() == static_cast<size_t>(sequence.count));
    for (size_t i = 0; i < slots.size(); ++i) {
      FF_ASSERT(slots[i] >= 0 && slots[i] < shape_.slots);
      Use& use = uses_[static_cast<size_t>(slots[i])];
      FF_ASSERT(use.written != steps_);
      use.written = steps_;
      use.writer = s;
      use.first = i == 0;
    }
  }
  for (int32_t s = 0; s < sequences; ++s) {
    const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(s)];
    if (sequence.position == 0) continue;
    FF_ASSERT(sequence.state_in >= 0 && sequence.state_in < shape_.slots);
    Use& use = uses_[static_cast<size_t>(sequence.state_in)];
    FF_ASSERT(use.written != steps_ || use.writer == s);
    use.shared = use.read == steps_;
    use.read = steps_;
    use.reader = s;
  }
}

bool HostStateCache::puts_off(const ops::Sequence& sequence, int64_t put_off_rows) const {
  const auto slots = static_cast<int64_t>(sequence.written_slots().size());
  return slots > 1 && slots <= put_off_rows && slots - 1 <= most_updates_;
}

// Whether a slot with updates can stay as it is for this step.
bool HostStateCache::keeps_updates(int32_t slot, const ops::Batch& batch, int64_t put_off_rows) const {
  const Use& use = uses_[static_cast<size_t>(slot)];
  const Use& base = uses_[static_cast<size_t>(updates_[static_cast<size_t>(slot)].base)];
  const bool read = use.read == steps_, written = use.written == steps_, base_written = base.written == steps_;
  if (!read) return written || !base_written;
  const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(use.reader)];
  if (sequence.count > put_off_rows) return false;
  // A head reads base and updates while it writes: the base panel by panel in place, updates to another half.
  if (written && (use.first || !puts_off(sequence, put_off_rows))) return false;
  if (!base_written) return true;
  return written && !use.shared && base.writer == use.reader && base.first;
}

void HostStateCache::begin_step(const ops::Batch& batch, int64_t put_off_rows) {
  check_slots(batch);
  for (size_t i = 0; i < with_updates_.size();) {
    if (keeps_updates(with_updates_[i], batch, put_off_rows)) {
      ++i;
    } else {
      make_state(with_updates_[i]);  // which takes it from the list
    }
  }
  accesses_.clear();
  for (const ops::Sequence& sequence : batch.sequences) {
    Access access;
    if (sequence.position > 0) {
      const Updates& updates = updates_[static_cast<size_t>(sequence.state_in)];
      const bool state = updates.base < 0;
      access = {state ? sequence.state_in : updates.base, updates.count, updates.half};
    }
    // Updates must not be written over the base.
    const bool over = access.base >= 0 && uses_[static_cast<size_t>(access.base)].written == steps_ &&
                      !uses_[static_cast<size_t>(access.base)].first;
    access.puts_off = !over && puts_off(sequence, put_off_rows);
    access.half_out = access.updates > 0 ? 1 - access.half_in : 0;
    accesses_.push_back(access);
  }
  // What the slots hold afterwards.
  for (size_t s = 0; s < accesses_.size(); ++s) {
    const std::span<const int32_t> slots = batch.sequences[s].written_slots();
    for (size_t i = 0; i < slots.size(); ++i) {
      Updates& updates = updates_[static_cast<size_t>(slots[i])];
      const bool before = updates.base >= 0;
      updates = {};
      if (accesses_[s].puts_off && i > 0) updates = {slots[0], static_cast<int32_t>(i), accesses_[s].half_out};
      if (updates.base >= 0 && !before) with_updates_.push_back(slots[i]);
    }
  }
  std::erase_if(with_updates_, [&](int32_t slot) { return updates_[static_cast<size_t>(slot)].base < 0; });
}

void HostStateCache::make_state(int32_t slot) {
  Updates& updates = updates_[static_cast<size_t>(slot)];
  if (updates.base < 0) return;
  const int64_t heads = shape_.value_heads;
  const int64_t floats = updates.count * update_floats_;
  pool_.parallel_ranges(shape_.layers * heads, 4, [&](int thread, int64_t begin, int64_t end) {
    float* kept = kept_.data() + thread * most_updates_ * update_floats_;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t layer = i / heads, head = i % heads;
      // They lie where the state goes.
      std::copy_n(this->updates(layer, slot, updates.half, head), floats, kept);
      replay_(updates.count, shape_.key_dim, shape_.value_dim, kept, state(layer, updates.base, head),
              state(layer, slot, head));
    }
  });
  updates = {};
  std::erase(with_updates_, slot);
}

void HostStateCache::release_base(int32_t slot) {
  for (size_t i = 0; i < with_updates_.size();) {
    if (updates_[static_cast<size_t>(with_updates_[i])].base == slot) {
      make_state(with_updates_[i]);
    } else {
      ++i;
    }
  }
}

}  // namespace fourfold::cpu
