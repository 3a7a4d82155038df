// Arguments of the Gated DeltaNet kernels, and where they keep their state. Formulas: ops.h, DeltaNetParams.
// Read by host and device, includes nothing of CUDA.
//
// A slot holds for each layer
//   state    fp32 [value head][panel of 8 columns][key][8]: a panel is contiguous, and what one warp works on
//   history  the last three inputs of the convolution, elements of the rows' type,
//            [value head][3, oldest first][key_dim q | key_dim k | value_dim v]
// The channels of a key head are in the history of each of its value heads: a value head's CTA then reads and writes
// nothing that another one does, and a slot may be updated in place.
#pragma once

#include "kernels/sequences.h"

namespace fourfold::gdn {

inline constexpr int kTaps = 4;     // of the convolution
inline constexpr int kHistory = 3;  // inputs before the present one
inline constexpr int kPanel = 8;    // columns of the state in a panel
inline constexpr int kMostDim = 256;
// Rows of a sequence that the recurrent kernel takes; longer pieces take the chunked ones.
inline constexpr int kRecurrentRows = 16;

// Where a head's channels are in a row [all q | all k | all v | all z | b | a], and what the slots look like.
struct DeltaShape {
  int key_heads;
  int value_heads;
  int key_dim;
  int value_dim;

  FOURFOLD_MIXER_FN int ratio() const { return value_heads / key_heads; }
  FOURFOLD_MIXER_FN int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  FOURFOLD_MIXER_FN int q_column(int value_head) const { return value_head / ratio() * key_dim; }
  FOURFOLD_MIXER_FN int k_column(int value_head) const { return (key_heads + value_head / ratio()) * key_dim; }
  FOURFOLD_MIXER_FN int v_column(int value_head) const { return 2 * key_heads * key_dim + value_head * value_dim; }
  FOURFOLD_MIXER_FN int z_column(int value_head) const { return channels() + value_head * value_dim; }
  FOURFOLD_MIXER_FN int b_column(int value_head) const { return channels() + value_heads * value_dim + value_head; }
  FOURFOLD_MIXER_FN int a_column(int value_head) const { return b_column(value_head) + value_heads; }
  FOURFOLD_MIXER_FN int columns() const { return a_column(value_heads - 1) + 1; }
  FOURFOLD_MIXER_FN long long state_floats() const { return static_cast<long long>(value_heads) * key_dim * value_dim; }
  FOURFOLD_MIXER_FN int history_head() const { return kHistory * (2 * key_dim + value_dim); }
  FOURFOLD_MIXER_FN long long history_elements() const { return static_cast<long long>(value_heads) * history_head(); }
};

// Of one layer.
struct DeltaArgs {
  DeltaShape shape;
  const SequenceRows* sequences;
  const int* live;              // how many of them are there
  const StateUpdates* updates;  // of each place; read by tiles with updates only
  const int* state_out;      // recurrent: [sequence][state_out_stride], slot of the state after row i of the sequence,
                             // for every place of the bucket; chunked: entry 0, after the last row. -1: not kept. May
                             // be state_in.
  const void* rows;          // [rows][row_stride], bf16 or fp32 as the tile says; 16-byte aligned as is the stride
  float* states;             // of slot 0 in this layer
  void* history;             //
  const float* conv;         // [channels][4], the last tap multiplies the present input
  const float* a_log;        // [value_heads]
  const float* dt_bias;      // [value_heads]
  const float* norm;         // [value_dim]
  unsigned short* out;       // bf16 [rows][out_stride]: [value head][value_dim]
  long long row_stride;      // elements
  long long out_stride;      //
  long long state_stride;    // floats from one slot to the next
  long long history_stride;  // elements
  int state_out_stride;
  float norm_eps;
  int settled;  // tables and slots were written at least two launches ago: read before the wait for the one before
};

}  // namespace fourfold::gdn
