// Arguments of the kernels that fill what is left between products and mixers (rows.cuh). Host and device,
// freestanding.
#pragma once

#include "kernels/sequences.h"

namespace fourfold::step {

inline constexpr int kRowsThreads = 256;

// Strides in elements. Grid of all but round_rows: rows, then CTAs of kRowsThreads threads with kRowsPiece columns
// each.
inline constexpr int kRowsPiece = 8;
constexpr int rows_ctas(int columns) { return (columns + kRowsThreads * kRowsPiece - 1) / (kRowsThreads * kRowsPiece); }

// out = x, rounded. One CTA a row.
struct RoundArgs {
  const float* x;
  long long x_stride;
  unsigned short* out;
  long long out_stride;
  int columns;
};

// x += delta.
struct AddArgs {
  float* x;
  long long x_stride;
  const unsigned short* delta;
  long long delta_stride;
  int columns;
  int pieces;  // not zero: addresses, strides and columns are of whole pieces of 16 bytes
};

// out = silu(gate) x up, x: [gate | up].
struct GateArgs {
  const unsigned short* x;
  long long x_stride;
  unsigned short* out;
  long long out_stride;
  int columns;  // of out
  int pieces;   // as above
};

// out += sigmoid(logit) x x; logits null: out += x.
struct SharedArgs {
  const unsigned short* x;
  long long x_stride;
  const float* logits;  // one a row
  long long logits_stride;
  unsigned short* out;
  long long out_stride;
  int columns;
  int pieces;  // as above
};

// Tokens that a row's lane chose in the step before, put where this step looks for them: tokens[row] = chosen[choice].
// Where that is no token, or one that ends the lane, the sequence at `place` has no rows.
struct CarriedToken {
  int row;
  int choice;
  int place;
  int stop_first, stop_count;  // of `stops`
};
struct CarryArgs {
  const CarriedToken* rows;
  int count;
  const int* stops;
  const int* chosen;
  int* tokens;
  SequenceRows* sequences;
};

// Small tables on their way to the device, from page-locked memory of the host: multiples of 16 bytes.
struct TableCopy {
  const void* from;
  void* to;
  long long bytes;
};
inline constexpr int kMostTables = 4;
// All of them, then the tokens carried, by one CTA of kTablesThreads.
struct TablesArgs {
  TableCopy tables[kMostTables];
  int count;
  CarryArgs carry;
};
inline constexpr int kTablesThreads = 512;

}  // namespace fourfold::step
