// A sum over the experts of each token that another kernel may take along. Host and device, freestanding.
#pragma once

#include "kernels/moe/tables.h"

namespace fourfold::moe {

// out[token] = sum over its choices, in order, of router weight times down's row, rounded to bf16: what moe_combine
// does with fp32 rows (places as in partial_place()), and moe_combine_packed with rows of groups.
struct RowSum {
  const float* partial;       // fp32 rows; null: groups
  const PackedGroup* groups;  // with `partial` null: without either there is no sum
  long long stride;           // of a row: floats, or groups
  const int* pick_slot;       // [tokens][top_k], -1: none
  const float* weights;       // [tokens][top_k]
  int top_k;                  // at most 32
  int columns;                // a multiple of 16
  unsigned short* out;        // bf16
  long long out_stride;
  int keep;  // fp32 rows, 1: they stay readable; 0: they hold anything afterwards
  // Groups: [tokens][top_k], and the tensor scales of down by expert; null: rows have theirs already.
  const int* ids;
  const float* scales;

  FOURFOLD_MOE_HD constexpr bool there() const { return partial != nullptr || groups != nullptr; }
  // The same from a token on; `out` is left.
  FOURFOLD_MOE_HD constexpr RowSum from(long long token) const {
    RowSum rest = *this;
    rest.pick_slot += token * top_k;
    rest.weights += token * top_k;
    if (ids != nullptr) rest.ids += token * top_k;
    return rest;
  }
};

}  // namespace fourfold::moe
