// Gated DeltaNet of the fast instruction sets: the convolution head by head, then each value head on its own.
#include <algorithm>
#include <cmath>

#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"

namespace fourfold::cpu {
namespace {

// From this many tokens on the chunked form is faster. Below, and for what is left of a prompt after whole chunks, the
// recurrent form runs: decode and the verification of drafts then do the same arithmetic.
constexpr int64_t kChunkFrom = 16;

}  // namespace

void CpuBackend::delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z,
                           const ops::Tensor& b, const ops::Tensor& a, ops::StateCache& cache, int64_t layer,
                           const ops::Tensor& out) {
  auto& states = static_cast<HostStateCache&>(cache);
  const ops::StateCacheShape& shape = states.shape();
  const int64_t dk = params.key_dim;
  const int64_t dv = params.value_dim;
  const int64_t key_heads = params.key_heads;
  const int64_t heads = params.value_heads;
  FF_ASSERT(kernels_ != nullptr && layer >= 0 && layer < shape.layers);
  FF_ASSERT(shape.key_heads == key_heads && shape.value_heads == heads && shape.key_dim == dk &&
            shape.value_dim == dv && shape.conv_taps == params.conv_taps && params.conv_taps >= 1);
  FF_ASSERT(key_heads > 0 && heads % key_heads == 0);
  FF_ASSERT(qkv.rows == batch_.size() && qkv.cols == shape.conv_channels());
  FF_ASSERT(z.cols == heads * dv && out.cols == heads * dv && a.cols == heads && b.cols == heads);
  FF_ASSERT(params.conv->count == qkv.cols * params.conv_taps && params.a_log->count == heads &&
            params.dt_bias->count == heads && params.norm->count == dv);
  check_state_slots(states);

  const Kernels& kernels = *kernels_;
  const int64_t tokens = qkv.rows;
  const auto sequences = static_cast<int64_t>(batch_.sequences.size());
  const int64_t threads = pool_.size();
  const int64_t conv_floats = 2 * params.conv_taps * std::max(dk, dv);
  const int64_t scratch_floats = std::max(conv_floats, chunk_scratch_floats(dk, dv));
  // Gates [tokens][heads]: log decay, decay, beta.
  float* memory = delta_work_.get<float>(3 * tokens * heads + threads * scratch_floats);
  float* log_decay = memory;
  float* decay = log_decay + tokens * heads;
  float* beta = decay + tokens * heads;
  float* scratch = beta + tokens * heads;

  // Items of the first region: the gates of each token, then heads of the convolution of each sequence.
  const int64_t conv_heads = 2 * key_heads + heads;
  const int64_t items = tokens + sequences * conv_heads;
  struct ConvHead {
    const ops::Sequence& sequence;
    bool is_value;
    bool is_query;
    int64_t first;  // channel
    int64_t channels;
    const float* history;
  };
  const auto conv_head = [&](int64_t item) {
    const ops::Sequence& sequence = batch_.sequences[static_cast<size_t>(item / conv_heads)];
    const int64_t head = item % conv_heads;
    const bool is_value = head >= 2 * key_heads;
    const int64_t first = is_value ? 2 * key_heads * dk + (head - 2 * key_heads) * dv : head * dk;
    const float* history = sequence.position == 0 ? nullptr : states.convolution(layer, sequence.state_in) + first;
    return ConvHead{sequence, is_value, head < key_heads, first, is_value ? dv : dk, history};
  };
  const auto prepare = [&](int thread, int64_t item) {
    if (item < tokens) {
      const int64_t t = item;
      for (int64_t h = 0; h < heads; ++h) {
        const float x = a.f32(t)[h] + params.dt_bias->data()[h];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        const float g = -std::exp(params.a_log->data()[h]) * softplus;
        log_decay[t * heads + h] = g;
        decay[t * heads + h] = std::exp(g);
        beta[t * heads + h] = 1.0f / (1.0f + std::exp(-b.f32(t)[h]));
      }
      return;
    }
    const ConvHead head = conv_head(item - tokens);
    if (item + 1 < items) {  // a head is too short for the processor to foresee the next one's lines
      const ConvHead next = conv_head(item + 1 - tokens);
      const float* weights = params.conv->data() + next.first * params.conv_taps;
      for (int64_t i = 0; i < next.channels * params.conv_taps; i += 16) __builtin_prefetch(weights + i);
      for (int64_t j = 0; next.history != nullptr && j + 1 < params.conv_taps; ++j) {
        for (int64_t i = 0; i < next.channels; i += 16) __builtin_prefetch(next.history + j * qkv.cols + i);
      }
    }
    kernels.convolve(qkv.f32(head.sequence.first) + head.first, head.sequence.count, qkv.stride, head.channels,
                     params.conv_taps, params.conv->data() + head.first * params.conv_taps, head.history,
                     states.convolution(layer, head.sequence.state_out) + head.first, qkv.cols, !head.is_value,
                     head.is_query ? 1.0f / std::sqrt(static_cast<float>(dk)) : 1.0f,
                     scratch + thread * scratch_floats);
  };

  // Items of the second region: value heads of each sequence.
  const auto run_head = [&](int thread, int64_t item) {
    const ops::Sequence& sequence = batch_.sequences[static_cast<size_t>(item / heads)];
    const int64_t h = item % heads;
    const int64_t key_head = h / (heads / key_heads);
    const float* state = sequence.position == 0 ? nullptr : states.state(layer, sequence.state_in, h);
    float* state_out = states.state(layer, sequence.state_out, h);
    for (int64_t t = 0; t < sequence.count;) {
      const int64_t left = sequence.count - t;
      const int64_t n = left >= kChunkFrom ? std::min(left, kChunk) : left;
      const int64_t row = sequence.first + t;
      const float* q = qkv.f32(row) + key_head * dk;
      const float* k = q + key_heads * dk;
      const float* v = qkv.f32(row) + 2 * key_heads * dk + h * dv;
      float* y = out.f32(row) + h * dv;
      const int64_t gate = row * heads + h;
      if (n >= kChunkFrom) {
        kernels.chunk(n, dk, dv, q, k, v, qkv.stride, log_decay + gate, beta + gate, heads, state, state_out, y,
                      out.stride, scratch + thread * scratch_floats);
      } else {
        kernels.recur(n, dk, dv, q, k, v, qkv.stride, decay + gate, beta + gate, heads, state, state_out, y,
                      out.stride);
      }
      for (int64_t i = 0; i < n; ++i) {
        kernels.gated_norm(y + i * out.stride, z.f32(row + i) + h * dv, params.norm->data(), params.norm_eps, dv);
      }
      state = state_out;
      t += n;
    }
  };

  for_ranges(items, prepare);
  for_ranges(sequences * heads, run_head);
}

}  // namespace fourfold::cpu
