// The flat batch: one step of the model over tokens of several sequences. Prefill chunks, decode steps and draft
// verification are all the same batch; they differ only in how many tokens a sequence contributes.
#pragma once

#include <cstdint>
#include <span>

namespace fourfold::ops {

// A state that was put off: that in slot `base` with the first `count` of the updates in slot `from`.
struct StateUpdates {
  int32_t base = -1, from = -1;
  int32_t count = 0;  // 0: it was not
};

struct Sequence {
  int32_t first = 0;     // row of its first token in the batch
  int32_t count = 0;     // tokens it contributes, at least 1, on consecutive rows and at consecutive positions
  int32_t position = 0;  // position of its first token = number of its tokens already in the caches
  // Recurrent state is read from slot state_in. At position 0 the initial state is zero, whatever the slot holds.
  int32_t state_in = 0;
  // Slots that the state is written to: one, for the state after the last token (none: state_in itself), or `count`,
  // for the state after each of them (verification of drafts: whichever token is accepted last, its state is there).
  // state_in may be among them; it is read before it is written.
  std::span<const int32_t> state_out;
  // The sequence's pages of the key/value cache, in order; page p holds positions [p * page_size, (p + 1) * page_size).
  std::span<const int32_t> pages;

  // Of a backend that puts states off (cpu::HostStepParts::put_off_rows). What state_in holds, and whether the `count`
  // slots that are named get states, or only the first, and the second what each row behind the first adds to it.
  StateUpdates updates = {};
  bool puts_off = false;

  std::span<const int32_t> written_slots() const {
    return state_out.empty() ? std::span<const int32_t>(&state_in, 1) : state_out;
  }
};

struct Batch {
  std::span<const int32_t> tokens;      // [rows]
  std::span<const Sequence> sequences;  // cover the first rows, in order, each row once
  std::span<const int32_t> logit_rows;  // rows whose logits are wanted, ascending
  int32_t draft_list = 0;               // of a drafting pass: StepPlan::draft_list

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  // Rows of sequences. Those behind them, up to size(), are padding: embedded as token 0, whatever `tokens` has, finite
  // afterwards, and without a trace in the caches.
  int64_t rows() const { return sequences.empty() ? 0 : sequences.back().first + sequences.back().count; }
};

// Consecutive rows of logits that are of one sequence, and how many of that sequence's a step has in all.
struct LogitRows {
  int64_t rows = 0, of = 0;
};

}  // namespace fourfold::ops
