// What the kernels of an expert layer hand to each other, and their arguments. Host and device, freestanding.
#pragma once

#include "kernels/moe/layout.h"

namespace fourfold::moe {

// A block is up to `tile` tokens of one expert: the N side of one weight tile's multiplication.
struct Block {
  int expert;
  int first;  // first slot
  int count;  // slots, 1 .. tile
  int unused;
};

// Written by the routing kernel. A slot is one accepted (token, choice) pair; slots of one expert are contiguous.
struct RouteTable {
  int* counts;      // [2]: blocks, slots
  Block* blocks;    // [max_blocks(picks, experts, tile)]
  int* slot_token;  // [picks]
  int* pick_slot;   // [picks] slot of (token, choice), -1 if its expert id is out of range
  int* totals;      // [1024 + 1] zeros: scratch of the two-kernel routing, which leaves it zero
};

// Blocks that `picks` choices can need, whatever the routing: the size of RouteTable::blocks.
FOURFOLD_MOE_HD constexpr int max_blocks(long long picks, int experts, int tile) {
  const long long full = picks / tile;
  return static_cast<int>(full + (picks < experts ? picks : experts));
}

// Down's fp32 rows keep rows g and g + 8 of a row tile side by side, so that a lane stores both at once: the place of
// row 16 tile + g; row 16 tile + 8 + g follows it.
FOURFOLD_MOE_HD constexpr int partial_place(int tile, int g) { return tile * 16 + 2 * g; }

// The router's answer. An id outside [0, experts) contributes nothing (padding rows, expert parallelism).
struct Routing {
  const int* ids;        // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  int tokens;
  int top_k;
  int experts;
};

enum class Activation : int { kSwiGlu = 0 };

struct GemmArgs {
  const unsigned char* weights;  // experts x packed_bytes(rows, k)
  unsigned long long expert_bytes;
  int row_tiles;                 // rows / 16
  int units;                     // k / 64
  const unsigned short* source;  // bf16 rows: hidden states, or the activation's output
  long long source_stride;       // elements
  const float* scales;           // gate-up: [experts][2] gate, up; down: [experts]
  const float* down_scales;      // few-token gate-up only: [experts], folded into its output
  void* out;
  long long out_stride;  // elements
  float limit;           // SwiGLU clamp: gate at most limit, |up| at most limit; 0 = none
  int zero;              // 0; keeps constants out of the compiler's sight
  Routing routing;
  RouteTable route;
};

}  // namespace fourfold::moe
