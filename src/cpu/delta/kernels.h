// The inner loops of Gated DeltaNet, one version for each instruction set (kernels/kernels.h). Plain pointers and sizes
// only. Padding of value_dim to 16 is zero.
#pragma once

#include <cstdint>

namespace fourfold::cpu {

// The recurrence of one value head. Panels as in HostStateCache.
//
// Where what follows may still be rolled back, only the state after the first token is written; each later token leaves
// its update (a row of update_floats(): k, v as it is added, decay), from which whoever reads the state makes it again,
// with the same operations in the same order.
struct DeltaRows {
  int64_t tokens = 0, key_dim = 0, value_dim = 0;
  const float *q = nullptr, *k = nullptr, *v = nullptr;  // rows of `stride` floats
  int64_t stride = 0;
  const float *decay = nullptr, *beta = nullptr;  // exp(g) and beta: [tokens] with stride gate_stride
  int64_t gate_stride = 0;
  const float* state_in = nullptr;    // null: zero state
  const float* updates_in = nullptr;  // [updates]: what state_in lacks
  int64_t updates = 0;
  float* state_out = nullptr;    // may be state_in
  float* updates_out = nullptr;  // [tokens - 1]; null: state_out gets the state after the last token
  float* out = nullptr;          // rows of out_stride floats
  int64_t out_stride = 0;
  float* scratch = nullptr;  // recur_scratch_floats(key_dim)
};

struct DeltaKernels {
  // One head of the convolution: `tokens` rows of x, `stride` apart, `channels` wide, in place, with SiLU.
  // history_in: [taps - 1] rows, history_stride apart: the inputs before the first token (null: zero). histories: the
  // same before the token that comes next, and where `kept` is not 1 but `tokens`, before that after each token.
  // weights: [channels][taps]. normalize: then x *= scale / sqrt(sum of squares + 1e-6).
  // scratch: 2 x taps x channels floats. history_in may be among the histories.
  void (*convolve)(float* x, int64_t tokens, int64_t stride, int64_t channels, int64_t taps, const float* weights,
                   const float* history_in, float* const* histories, int64_t kept, int64_t history_stride,
                   bool normalize, float scale, float* scratch);
  void (*recur)(const DeltaRows& rows);
  // The same for up to kChunk tokens at once; log_decay = g. scratch: chunk_scratch_floats(key_dim, value_dim).
  void (*chunk)(int64_t tokens, int64_t key_dim, int64_t value_dim, const float* q, const float* k, const float* v,
                int64_t stride, const float* log_decay, const float* beta, int64_t gate_stride, const float* state_in,
                float* state_out, float* out, int64_t out_stride, float* scratch);
  // state_out = state_in with `updates` rows of updates; they may be the same.
  void (*replay)(int64_t updates, int64_t key_dim, int64_t value_dim, const float* rows, const float* state_in,
                 float* state_out);
  // x = x / rms(x) * weight * silu(z), one head.
  void (*gated_norm)(float* x, const float* z, const float* weight, float eps, int64_t n);
};

// A row of updates: k [key_dim], what is added of v [value_dim rounded up to panels of 16], the decay.
constexpr int64_t update_floats(int64_t key_dim, int64_t value_dim) {
  return (key_dim + (value_dim + 15) / 16 * 16 + 1 + 15) / 16 * 16;
}
constexpr int64_t recur_scratch_floats(int64_t key_dim) { return 2 * 16 * key_dim; }
inline constexpr int64_t kChunk = 64;
constexpr int64_t chunk_scratch_floats(int64_t key_dim, int64_t value_dim) {
  return 3 * kChunk * key_dim + 2 * kChunk * kChunk + 2 * kChunk * ((value_dim + 15) / 16 * 16) + kChunk;
}

}  // namespace fourfold::cpu
