// The inner loops of Gated DeltaNet, one version for each instruction set (kernels/kernels.h). Plain pointers and sizes
// only. Padding of value_dim to 16 is zero.
#pragma once

#include <cstdint>

namespace fourfold::cpu {

struct DeltaKernels {
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

}  // namespace fourfold::cpu
