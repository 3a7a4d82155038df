// The flat batch: one step of the model over tokens of several sequences. Prefill chunks, decode steps and draft
// verification are all the same batch; they differ only in how many tokens a sequence contributes.
#pragma once

#include <cstdint>
#include <span>

namespace fourfold::ops {

struct Sequence {
  int32_t first = 0;     // row of its first token in the batch
  int32_t count = 0;     // tokens it contributes, at least 1, on consecutive rows and at consecutive positions
  int32_t position = 0;  // position of its first token = number of its tokens already in the caches
  // Recurrent state is read from slot state_in and, after the last token, written to slot state_out (they may be
  // equal). At position 0 the initial state is zero, whatever the slot holds.
  int32_t state_in = 0;
  int32_t state_out = 0;
  // The sequence's pages of the key/value cache, in order; page p holds positions [p * page_size, (p + 1) * page_size).
  std::span<const int32_t> pages;
};

struct Batch {
  std::span<const int32_t> tokens;      // [tokens]
  std::span<const Sequence> sequences;  // cover all rows, in order, each row once
  std::span<const int32_t> logit_rows;  // rows whose logits are wanted, ascending

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

}  // namespace fourfold::ops
