// The inner loops of attention, one version for each instruction set (kernels/kernels.h). Plain pointers and sizes
// only. A row of a result depends only on that row's inputs, never on how many rows are handled together; padding of
// operands (head_dim to 32) is zero.
#pragma once

#include <cstdint>

namespace fourfold::cpu {

// Keys of one block and of one split. Both are boundaries in absolute positions, so that the order of summation is the
// same however a sequence is cut into steps.
inline constexpr int64_t kKeyBlock = 64;
inline constexpr int64_t kKeySplit = 256;

// One row (query token and head) while attention runs: unnormalised output, running maximum and sum.
struct AttendRows {
  int64_t rows = 0;
  int64_t padded_dim = 0;
  const float* queries = nullptr;     // [rows][padded_dim], scaled
  const int64_t* last_key = nullptr;  // [rows] the last position a row attends to
  float* output = nullptr;            // [rows][padded_dim]
  float* maximum = nullptr;           // [rows]
  float* sum = nullptr;               // [rows]
};

// Up to kKeyBlock keys and their values, [padded_dim] f16 each.
struct KeyBlock {
  int64_t count = 0;
  const uint16_t* keys[kKeyBlock];
  const uint16_t* values[kKeyBlock];
};

struct AttentionKernels {
  // out = x * factor; n is a multiple of 16; out may be x.
  void (*scale)(const float* x, int64_t n, float factor, float* out);
  // Attends to the keys of a block from position `first` on, adding to the rows' running softmax. `next`, the block
  // that this thread comes to afterwards, is fetched into cache meanwhile. scores: scratch of rows x kKeyBlock floats.
  void (*attend_block)(const AttendRows& rows, int64_t first, const KeyBlock& block, const KeyBlock& next,
                       float* scores);
  // Folds a later split into `into` (one row).
  void (*merge_row)(int64_t padded_dim, const float* output, float maximum, float sum, float* into_output,
                    float* into_maximum, float* into_sum);
  // x *= sigmoid(gate)
  void (*gate)(float* x, const float* gate, int64_t n);
};

}  // namespace fourfold::cpu
