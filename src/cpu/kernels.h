// The inner loops that every fast instruction set has its own version of: one source (kernels_*.inc over simd_*.inc)
// compiled once per instruction set, chosen at run time through a table of function pointers. Plain pointers and sizes
// only: a source with special compile flags must not share inline functions with others.
//
// Contracts that hold for every version:
//   - a row of a result depends only on that row's inputs, never on how many rows or tokens are handled together;
//   - padding of operands (head_dim to 32, value_dim to 16) is zero.
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

struct Kernels {
  // out = x / rms(x) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*add)(float* x, const float* delta, int64_t n);
  // Round to nearest even; beyond the range of f16 the largest finite number.
  void (*to_f16)(const float* x, int64_t n, uint16_t* out);

  // ---- attention
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

  // ---- Gated DeltaNet
  // One head of the convolution: `tokens` rows of x, `stride` apart, `channels` wide, in place, with SiLU.
  // history: [taps - 1] rows, history_stride apart: the inputs before the first token (null: zero), and on return those
  // before the token that comes next.
  // weights: [channels][taps]. normalize: then x *= scale / sqrt(sum of squares + 1e-6).
  // scratch: 2 x taps x channels floats. history_in and history_out may be the same.
  void (*convolve)(float* x, int64_t tokens, int64_t stride, int64_t channels, int64_t taps, const float* weights,
                   const float* history_in, float* history_out, int64_t history_stride, bool normalize, float scale,
                   float* scratch);
  // The recurrence of one value head. k, q, v: rows of `stride` floats; decay = exp(g) and beta: [tokens] with stride
  // gate_stride. state_in null: zero state. out: rows of out_stride. Panels as in HostStateCache.
  void (*recur)(int64_t tokens, int64_t key_dim, int64_t value_dim, const float* q, const float* k, const float* v,
                int64_t stride, const float* decay, const float* beta, int64_t gate_stride, const float* state_in,
                float* state_out, float* out, int64_t out_stride);
  // The same for up to kChunk tokens at once; log_decay = g. scratch: chunk_scratch_floats(key_dim, value_dim).
  void (*chunk)(int64_t tokens, int64_t key_dim, int64_t value_dim, const float* q, const float* k, const float* v,
                int64_t stride, const float* log_decay, const float* beta, int64_t gate_stride, const float* state_in,
                float* state_out, float* out, int64_t out_stride, float* scratch);
  // x = x / rms(x) * weight * silu(z), one head.
  void (*gated_norm)(float* x, const float* z, const float* weight, float eps, int64_t n);
};

inline constexpr int64_t kChunk = 64;
constexpr int64_t chunk_scratch_floats(int64_t key_dim, int64_t value_dim) {
  return 3 * kChunk * key_dim + 2 * kChunk * kChunk + 2 * kChunk * ((value_dim + 15) / 16 * 16) + kChunk;
}

const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace fourfold::cpu
