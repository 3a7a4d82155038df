// Gated DeltaNet of the fast instruction sets: the convolution head by head, then each value head on its own.
#include "cpu/delta/delta_net.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cpu/host/parallel.h"
#include "cpu/host/step_rows.h"

namespace fourfold::cpu {
namespace {

// From this many tokens on the chunked form runs. Below, and for what is left of a prompt after whole chunks, it is the
// recurrent form: decode and the verification of drafts do the same arithmetic.
constexpr int64_t kChunkFrom = kFewRows + 1;

// fn(t, n, slot): rows [t, t + n) of a sequence come before what is written to `slot`. All of them, or one by one where
// each row has a slot of its own.
template <typename F>
void for_slots(const ops::Sequence& sequence, F&& fn) {
  const std::span<const int32_t> slots = sequence.written_slots();
  const auto count = static_cast<int64_t>(slots.size());
  const int64_t rows = sequence.count / count;
  for (int64_t i = 0; i < count; ++i) fn(i * rows, rows, slots[static_cast<size_t>(i)]);
}

int64_t thread_floats(const ops::StateCacheShape& shape) {
  const int64_t convolution = 2 * shape.conv_taps * std::max(shape.key_dim, shape.value_dim);
  return std::max(
      {convolution, chunk_scratch_floats(shape.key_dim, shape.value_dim), recur_scratch_floats(shape.key_dim)});
}

}  // namespace

std::unique_ptr<HostStateCache> DeltaNet::make_states(const ops::StateCacheShape& shape) {
  return std::make_unique<HostStateCache>(shape, pool_, kernels_.replay, update_floats(shape.key_dim, shape.value_dim));
}

void DeltaNet::reserve(int64_t rows, const ops::StateCacheShape& shape) {
  work_.reserve<float>(3 * rows * shape.value_heads + pool_.size() * thread_floats(shape));
}

void DeltaNet::run(const ops::Batch& batch, const ops::DeltaNetParams& params, const ops::Tensor& qkv,
                   const ops::Tensor& z, const ops::Tensor& b, const ops::Tensor& a, HostStateCache& states,
                   int64_t layer, const ops::Tensor& out) {
  const ops::StateCacheShape& shape = states.shape();
  const int64_t dk = params.key_dim;
  const int64_t dv = params.value_dim;
  const int64_t key_heads = params.key_heads;
  const int64_t heads = params.value_heads;
  FF_ASSERT(layer >= 0 && layer < shape.layers);
  FF_ASSERT(shape.key_heads == key_heads && shape.value_heads == heads && shape.key_dim == dk &&
            shape.value_dim == dv && shape.conv_taps == params.conv_taps && params.conv_taps >= 1);
  FF_ASSERT(key_heads > 0 && heads % key_heads == 0);
  FF_ASSERT(qkv.rows == batch.size() && qkv.cols == shape.conv_channels());
  FF_ASSERT(z.cols == heads * dv && out.cols == heads * dv && a.cols == heads && b.cols == heads);
  FF_ASSERT(params.conv->count == qkv.cols * params.conv_taps && params.a_log->count == heads &&
            params.dt_bias->count == heads && params.norm->count == dv);

  const DeltaKernels& kernels = kernels_;
  const int64_t tokens = batch.rows();
  const auto sequences = static_cast<int64_t>(batch.sequences.size());
  const int64_t threads = pool_.size();
  const int64_t scratch_floats = thread_floats(shape);
  // Gates [tokens][heads]: log decay, decay, beta.
  float* memory = work_.get<float>(3 * tokens * heads + threads * scratch_floats);
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
    const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(item / conv_heads)];
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
    const ops::Sequence& sequence = head.sequence;
    const float scale = head.is_query ? 1.0f / std::sqrt(static_cast<float>(dk)) : 1.0f;
    float* histories[kFewRows];
    const float* histories_end = nullptr;
    const std::span<const int32_t> slots = sequence.written_slots();
    for (size_t first = 0; first < slots.size(); first += kFewRows) {
      const size_t count = std::min<size_t>(kFewRows, slots.size() - first);
      for (size_t i = 0; i < count; ++i) {
        histories[i] = states.convolution(layer, slots[first + i]) + head.first;
      }
      const int64_t n = slots.size() == 1 ? sequence.count : static_cast<int64_t>(count);
      kernels.convolve(qkv.f32(sequence.first + static_cast<int64_t>(first)) + head.first, n, qkv.stride, head.channels,
                       params.conv_taps, params.conv->data() + head.first * params.conv_taps,
                       first == 0 ? head.history : histories_end, histories, static_cast<int64_t>(count), qkv.cols,
                       !head.is_value, scale, scratch + thread * scratch_floats);
      histories_end = histories[count - 1];
    }
  };

  // Items of the second region: value heads of each sequence.
  const auto run_head = [&](int thread, int64_t item) {
    const ops::Sequence& sequence = batch.sequences[static_cast<size_t>(item / heads)];
    const int64_t h = item % heads;
    const int64_t key_head = h / (heads / key_heads);
    const HostStateCache::Access& access = states.access(static_cast<size_t>(item / heads));
    const float* state = access.base < 0 ? nullptr : states.state(layer, access.base, h);
    DeltaRows rows{.key_dim = dk,
                   .value_dim = dv,
                   .stride = qkv.stride,
                   .gate_stride = heads,
                   .out_stride = out.stride,
                   .scratch = scratch + thread * scratch_floats};
    rows.updates = access.updates;
    if (access.updates > 0) rows.updates_in = states.updates(layer, sequence.state_in, access.half_in, h);
    // Rows [t, t + n), whose state goes to a slot.
    const auto run_rows = [&](int64_t t, int64_t n, float* state_out) {
      const int64_t row = sequence.first + t;
      const float* q = qkv.f32(row) + key_head * dk;
      const float* k = q + key_heads * dk;
      const float* v = qkv.f32(row) + 2 * key_heads * dk + h * dv;
      float* y = out.f32(row) + h * dv;
      const int64_t gate = row * heads + h;
      if (n >= kChunkFrom) {
        kernels.chunk(n, dk, dv, q, k, v, qkv.stride, log_decay + gate, beta + gate, heads, state, state_out, y,
                      out.stride, rows.scratch);
      } else {
        rows.tokens = n;
        rows.q = q;
        rows.k = k;
        rows.v = v;
        rows.decay = decay + gate;
        rows.beta = beta + gate;
        rows.state_in = state;
        rows.state_out = state_out;
        rows.out = y;
        kernels.recur(rows);
        rows.updates = 0;
      }
      for (int64_t i = 0; i < n; ++i) {
        kernels.gated_norm(y + i * out.stride, z.f32(row + i) + h * dv, params.norm->data(), params.norm_eps, dv);
      }
      state = state_out;
    };
    if (access.puts_off) {
      const std::span<const int32_t> slots = sequence.written_slots();
      const int64_t last = sequence.count - 1;
      const auto updates_of = [&](int64_t i) {
        return states.updates(layer, slots[static_cast<size_t>(i)], access.half_out, h);
      };
      rows.updates_out = updates_of(last);
      run_rows(0, sequence.count, states.state(layer, slots[0], h));
      for (int64_t i = 1; i < last; ++i) std::copy_n(rows.updates_out, i * update_floats(dk, dv), updates_of(i));
      return;
    }
    for_slots(sequence, [&](int64_t begin, int64_t count, int64_t slot) {
      float* state_out = states.state(layer, slot, h);
      for (int64_t t = begin; t < begin + count;) {
        const int64_t left = begin + count - t;
        const int64_t n = left >= kChunkFrom ? std::min(left, kChunk) : left;
        run_rows(t, n, state_out);
        t += n;
      }
    });
  };

  for_ranges(pool_, items, prepare);
  for_ranges(pool_, sequences * heads, run_head);
}

}  // namespace fourfold::cpu
