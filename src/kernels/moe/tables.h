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

// The sum that runs beside down: columns whose rows have one flag, and flags at most.
inline constexpr int kSumColumns = 512;
inline constexpr int kMostSums = 256;

// Written by the routing kernel. A slot is one accepted (token, choice) pair; slots of one expert are contiguous and
// begin at a multiple of 8 (the rows in between belong to nobody and are never written).
struct RouteTable {
  int* counts;      // [2]: blocks, slots
  Block* blocks;    // [max_blocks(picks, experts, tile)]
  int* slot_token;  // [max_slots(picks, experts) + kSlotsBeyond]
  int* pick_slot;   // [picks] slot of (token, choice), -1 if its expert id is out of range
  int* totals;      // [1024 + 1] zeros: scratch of the two-kernel routing, which leaves it zero
  int* stored;      // [max_blocks(..)] gate-up's items of a block whose rows are stored: flags for down beside it
  int* finished;  // [kMostSums] down's items of kSumColumns columns whose rows are stored: flags for the sum beside it
};

// A wgmma kernel looks at as many slots' tokens as its tile has, from a block's first on. Those that are not the
// block's may be anything.
inline constexpr int kSlotsBeyond = 176;

// Blocks that `picks` choices can need, whatever the routing: the size of RouteTable::blocks.
FOURFOLD_MOE_HD constexpr int max_blocks(long long picks, int experts, int tile) {
  const long long full = picks / tile;
  return static_cast<int>(full + (picks < experts ? picks : experts));
}

// Rows of everything that is indexed by slot.
FOURFOLD_MOE_HD constexpr long long max_slots(long long picks, int experts) {
  return (picks + 7 * (picks < experts ? picks : experts) + 7) / 8 * 8;
}

// The streaming kernels' fp32 rows of down keep rows g and g + 8 of a row tile side by side, so that a lane stores both
// at once: the place of row 16 tile + g; row 16 tile + 8 + g follows it.
FOURFOLD_MOE_HD constexpr int partial_place(int tile, int g) { return tile * 16 + 2 * g; }

// Between the wgmma kernels rows are in slot order and in the form that shared memory has: [K / 64][slots][64] bf16,
// where 16-byte piece c of slot s lies at place c ^ (s % 8). A block's rows of 64 K are then one flat copy.
// Gate-up's out_stride and down's source_stride are from one 64 K to the next.
//
// Their down writes groups of four values with a common exponent: rows 32 w + g + {0, 8, 16, 24} of its weight matrix
// are group 8 w + g of a slot's row, 8 bytes, rows padded to a multiple of 128 values. Value i is
// (field - 8192) x 2^(e - 139), its field bits 14 (i % 2) .. of word i / 2; e is the exponent of the group's largest
// magnitude as float32 has it, its low half in bits 28..31 of word 0 and its high half in word 1's; 255: not finite.
// The error is at most 2^-14 of the group's largest magnitude. The FP4 kernels' down writes the same.
struct PackedGroup {
  unsigned words[2];
};
FOURFOLD_MOE_HD constexpr int packed_row_values(int rows) { return (rows + 127) / 128 * 128; }

// The router's answer. An id outside [0, experts) contributes nothing (padding rows, expert parallelism).
struct Routing {
  const int* ids;        // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  int tokens;
  int top_k;
  int experts;
};

// The routing and summing kernels (route_sm90.cuh): limits and launches.
inline constexpr int kMaxExperts = 1024;
inline constexpr int kRouteThreads = 1024;
inline constexpr int kRouteOwn = 8;                              // picks a thread keeps in registers
inline constexpr int kRouteOnePass = kRouteThreads * kRouteOwn;  // more picks than this take two kernels
inline constexpr int kRouteManyThreads = 256;
inline constexpr int kRouteManyPicks = kRouteManyThreads * kRouteOwn;  // of one CTA

inline constexpr int kPrepareThreads = 128;   // of what runs before the GEMMs (prepare.cuh)
inline constexpr int kQuantizeThreads = 128;  // one for each block of 16 (fp4_sm120.cuh)
inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineBesideThreads = 128;
inline constexpr int kCombinePackedThreads = 128;
inline constexpr int kCombineColumns = 1024;  // of one CTA, either kernel

// Some experts of one matrix, in device memory, as in a checkpoint. `first` and `second`: gate and up, or twice the
// same matrix. Strides in bytes; expert strides lie between the matrices of consecutive experts.
struct RepackArgs {
  SourceMatrix first;
  SourceMatrix second;
  long long code_expert_stride;
  long long scale_expert_stride;
  int experts;
  int first_expert;  // number of the first one, for `bad`
  int paired;        // 1: gate and up interleaved; 0: rows in order
  int row_tiles;     // of the stored matrix
  int k;             // columns, a multiple of 16; units beyond are filled with zero codes
  int units;         // ceil(k / 64)
  unsigned char* out;
  int* bad;  // [1] -1, or the greatest expert number with a NaN scale
};

// One and few tokens: gate-up hands its rows over in a buffer of two halves, [2][kExchangeRows][stride] bf16, stride as
// out_stride, of which consecutive layers use one each. A word that is all ones (two NaNs that no arithmetic makes) has
// not been written; down makes the half that it does not use all ones again. One token: row i is the i-th valid choice,
// with its elements 2l, 2l + 1, 2l + 8, 2l + 9 of each block of 16, l = 0 .. 3, in 8 bytes: one_place(). Few tokens:
// row i is choice i of [tokens, top_k] (of a token's choices of the same expert, the first), in its order.
struct OneTurn {
  int half;     // of the present layer
  int arrived;  // CTAs of down that ask no more; zero between layers
  int rows;     // of the other half that the layer before may have written
};
inline constexpr int kOnePicks = 16;  // most choices of a token of moe_one and moe_few
inline constexpr int kFewTokens = 8;  // most tokens of moe_few
inline constexpr int kExchangeRows = kFewTokens * kOnePicks;
FOURFOLD_MOE_HD constexpr int one_place(int i) { return i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2; }

// Softmax and top-k over a row's logits: the first `experts` of them. Choices go to ids and weights, `width` to a row:
// the top_k largest in descending order, ties to the lower expert; then the slices of the shared expert, all with the
// sigmoid of logit `gate` as weight. A row whose logits are NaN chooses -1, which is no expert.
struct ChoiceArgs {
  const float* logits;
  long long logits_stride;
  int tokens;
  int experts;
  int top_k;        // at most 32 with the slices
  int renormalize;  // 1: the weights of the chosen add up to 1
  int slices;       // experts first_slice .. of the shared expert; 0: none
  int first_slice;
  int gate;  // -1: the slices' weight is 1
  int width;
  int* ids;
  float* weights;
  // Where other ranks have the rest of the experts: the first one's number among all, and how many are here. Ids count
  // from there, and -1 is an expert that is elsewhere. 0: all are here.
  int first_here;
  int here;
};

struct GemmArgs {
  const unsigned char* weights;  // experts x packed_bytes(rows, k)
  unsigned long long expert_bytes;
  int row_tiles;                 // rows / 16
  int units;                     // k / 64
  const unsigned short* source;  // bf16 rows: hidden states, or the activation's output
  long long source_stride;       // elements
  const float* scales;           // gate-up: [experts][2] gate, up, or [experts] without a gate; down: [experts]
  const float* down_scales;      // one and few tokens, gate-up: [experts], folded into its output
  void* out;
  long long out_stride;  // elements
  float limit;           // SwiGLU clamp: gate at most limit, |up| at most limit; 0 = none
  int zero;              // 0; keeps constants out of the compiler's sight
  int ready;             // sorted, down: gate-up's items of a block, which its flag counts; 0: gate-up raises no flags
  int inner_blocks;      // one and few tokens: blocks of 16 K of down's that gate-up writes; the others are zero
  OneTurn* turn;         // one and few tokens
  Routing routing;
  RouteTable route;
};

// W4A4: what the GEMMs need beside GemmArgs. Activations are e2m1 codes and ue4m3 scales in the order of fp4_layout.h;
// rows of codes are 32 bytes per unit of 64 K, rows of scales 4 bytes. The value is code x scale x input scale.
// gemm.source points to codes and gemm.source_stride counts bytes; gate-up's gemm.out and gemm.out_stride likewise.
struct Fp4Args {
  GemmArgs gemm;
  const unsigned char* source_scales;
  long long source_scale_stride;  // bytes
  const float* input_scales;      // of the source: gate-up [1], down [experts]; positive and normal
  const float* output_scales;     // gate-up: [experts], what down will find in input_scales
  unsigned char* out_scales;      // gate-up
  long long out_scale_stride;     // bytes
};

}  // namespace fourfold::moe
