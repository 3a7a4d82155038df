// A sum over the experts of each token that another kernel may take along. Host and device, freestanding.
#pragma once

namespace fourfold::moe {

// out[token] = sum over its choices, in order, of router weight times down's fp32 row (places as in partial_place()),
// rounded to bf16: what moe_combine does.
struct RowSum {
  const float* partial;  // [slots][columns]
  long long stride;      // elements
  const int* pick_slot;  // [tokens][top_k], -1: none
  const float* weights;  // [tokens][top_k]
  int top_k;
  int columns;          // a multiple of 16
  unsigned short* out;  // bf16
  long long out_stride;
  int keep;  // 1: the rows stay readable; 0: they hold anything afterwards
};

}  // namespace fourfold::moe
