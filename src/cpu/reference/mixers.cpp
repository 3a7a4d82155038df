// Attention and Gated DeltaNet of the reference.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "cpu/host/parallel.h"
#include "cpu/reference/delta_rule.h"
#include "cpu/reference/reference.h"

namespace fourfold::cpu {

void ReferenceBackend::attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                                 const ops::Tensor& v, ops::KvCache& kv, int64_t layer, const ops::Tensor& out) {
  auto& cache = static_cast<HostKvCache&>(kv);
  attention_input().prepare(batch(), params, q, k, v, cache, layer);
  FF_ASSERT(out.rows == q.rows && out.cols == params.heads * params.head_dim);
  const int64_t dim = params.head_dim;
  const int64_t page_size = cache.shape().page_size;
  const int64_t group = params.heads / params.kv_heads;
  const int64_t q_stride = params.gated ? 2 * dim : dim;
  for (const ops::Sequence& sequence : batch().sequences) {
    const double cost = 0.5 * static_cast<double>((sequence.position + sequence.count) * dim);
    for_each(pool(), sequence.count * params.heads, cost, [&](int64_t begin, int64_t end) {
      std::vector<double> scores;
      std::vector<double> sums(static_cast<size_t>(dim));
      for (int64_t item = begin; item < end; ++item) {
        const int64_t t = item / params.heads;
        const int64_t head = item % params.heads;
        const float* query = q.f32(sequence.first + t) + head * q_stride;
        const int64_t keys = sequence.position + t + 1;
        const auto key_at = [&](int64_t position) {
          const int64_t page = sequence.pages[static_cast<size_t>(position / page_size)];
          return cache.keys<float>(layer, page, head / group) + position % page_size * cache.padded_dim();
        };
        scores.assign(static_cast<size_t>(keys), 0.0);
        double largest = -INFINITY;
        for (int64_t j = 0; j < keys; ++j) {
          const float* key = key_at(j);
          double sum = 0;
          for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(query[i]) * static_cast<double>(key[i]);
          scores[static_cast<size_t>(j)] = sum * static_cast<double>(params.scale);
          largest = std::max(largest, scores[static_cast<size_t>(j)]);
        }
        double total = 0;
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t j = 0; j < keys; ++j) {
          const double weight = std::exp(scores[static_cast<size_t>(j)] - largest);
          total += weight;
          const float* value = key_at(j) + cache.values_offset();
          for (int64_t i = 0; i < dim; ++i) sums[static_cast<size_t>(i)] += weight * static_cast<double>(value[i]);
        }
        float* result = out.f32(sequence.first + t) + head * dim;
        for (int64_t i = 0; i < dim; ++i) {
          double y = sums[static_cast<size_t>(i)] / total;
          if (params.gated) y /= 1.0 + std::exp(-static_cast<double>(query[dim + i]));
          result[i] = static_cast<float>(y);
        }
      }
    });
  }
  clear_padding(out);
}

namespace {

// Depthwise causal convolution over one sequence, then SiLU, in place; `rows` are its tokens.
void convolve(const ops::DeltaNetParams& params, const ops::Tensor& rows, const float* history_in, float* history_out,
              int64_t begin, int64_t end) {
  const int64_t taps = params.conv_taps;
  const int64_t channels = rows.cols;
  std::vector<float> inputs(static_cast<size_t>(taps - 1 + rows.rows));
  for (int64_t c = begin; c < end; ++c) {
    for (int64_t i = 0; i < taps - 1; ++i) {
      inputs[static_cast<size_t>(i)] = history_in != nullptr ? history_in[i * channels + c] : 0.0f;
    }
    for (int64_t t = 0; t < rows.rows; ++t) inputs[static_cast<size_t>(taps - 1 + t)] = rows.f32(t)[c];
    for (int64_t t = 0; t < rows.rows; ++t) {
      double sum = 0;
      for (int64_t j = 0; j < taps; ++j) {
        sum += static_cast<double>(params.conv->data()[c * taps + j]) *
               static_cast<double>(inputs[static_cast<size_t>(t + j)]);
      }
      rows.f32(t)[c] = static_cast<float>(sum / (1.0 + std::exp(-sum)));
    }
    for (int64_t i = 0; i < taps - 1; ++i) history_out[i * channels + c] = inputs[static_cast<size_t>(rows.rows + i)];
  }
}

// out = x * scale / sqrt(sum of squares + 1e-6)
void l2_normalize(const float* x, int64_t n, double scale, float* out) {
  double sum = 1e-6;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<double>(x[i]) * scale / std::sqrt(sum));
}

}  // namespace

void ReferenceBackend::delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z,
                                 const ops::Tensor& b, const ops::Tensor& a, ops::StateCache& cache, int64_t layer,
                                 const ops::Tensor& out) {
  auto& states = static_cast<HostStateCache&>(cache);
  begin_states(states, 0);
  const int64_t dk = params.key_dim;
  const int64_t dv = params.value_dim;
  const int64_t heads = params.value_heads;
  FF_ASSERT(qkv.rows == batch().size() && qkv.cols == states.shape().conv_channels());
  FF_ASSERT(z.cols == heads * dv && out.cols == heads * dv && a.cols == heads && b.cols == heads);
  for (const ops::Sequence& sequence : batch().sequences) {
    const bool fresh = sequence.position == 0;
    const ops::Tensor rows = qkv.slice_rows(sequence.first, sequence.first + sequence.count);
    const std::span<const int32_t> written = sequence.written_slots();
    const auto slots = static_cast<int64_t>(written.size());
    const int64_t slot_rows = sequence.count / slots;  // rows from one written state to the next
    for_each(pool(), qkv.cols, 30.0 * static_cast<double>(sequence.count), [&](int64_t begin, int64_t end) {
      const float* history = fresh ? nullptr : states.convolution(layer, sequence.state_in);
      for (int64_t i = 0; i < slots; ++i) {
        float* next = states.convolution(layer, written[static_cast<size_t>(i)]);
        convolve(params, rows.slice_rows(i * slot_rows, (i + 1) * slot_rows), history, next, begin, end);
        history = next;
      }
    });
    const int64_t n = sequence.count;
    for_each(pool(), heads, 3.0 * static_cast<double>(n * dk * dv), [&](int64_t begin, int64_t end) {
      std::vector<float> q(static_cast<size_t>(n * dk)), k(q), v(static_cast<size_t>(n * dv)), o(v);
      std::vector<float> log_decay(static_cast<size_t>(n)), beta(log_decay);
      std::vector<float> state(static_cast<size_t>(dk * dv));
      for (int64_t h = begin; h < end; ++h) {
        const int64_t key_head = h / (heads / params.key_heads);
        for (int64_t t = 0; t < n; ++t) {
          const float* row = rows.f32(t);
          l2_normalize(row + key_head * dk, dk, 1.0 / std::sqrt(static_cast<double>(dk)), q.data() + t * dk);
          l2_normalize(row + (params.key_heads + key_head) * dk, dk, 1.0, k.data() + t * dk);
          std::copy_n(row + 2 * params.key_heads * dk + h * dv, dv, v.data() + t * dv);
          const double x =
              static_cast<double>(a.f32(sequence.first + t)[h]) + static_cast<double>(params.dt_bias->data()[h]);
          const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
          log_decay[static_cast<size_t>(t)] =
              static_cast<float>(-std::exp(static_cast<double>(params.a_log->data()[h])) * softplus);
          beta[static_cast<size_t>(t)] =
              static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(b.f32(sequence.first + t)[h]))));
        }
        if (fresh) {
          std::fill(state.begin(), state.end(), 0.0f);
        } else {
          states.read_state(layer, sequence.state_in, h, state);
        }
        for (int64_t i = 0; i < slots; ++i) {
          const int64_t t = i * slot_rows;
          delta_rule_recurrent({slot_rows, dk, dv, q.data() + t * dk, k.data() + t * dk, v.data() + t * dv,
                                log_decay.data() + t, beta.data() + t, state.data(), o.data() + t * dv});
          states.write_state(layer, written[static_cast<size_t>(i)], h, state);
        }
        for (int64_t t = 0; t < n; ++t) {
          const float* y = o.data() + t * dv;
          double square = 0;
          for (int64_t i = 0; i < dv; ++i) square += static_cast<double>(y[i]) * static_cast<double>(y[i]);
          const double factor =
              1.0 / std::sqrt(square / static_cast<double>(dv) + static_cast<double>(params.norm_eps));
          for (int64_t i = 0; i < dv; ++i) {
            const auto gate = static_cast<double>(z.f32(sequence.first + t)[h * dv + i]);
            out.f32(sequence.first + t)[h * dv + i] =
                static_cast<float>(static_cast<double>(y[i]) * factor * static_cast<double>(params.norm->data()[i]) *
                                   gate / (1.0 + std::exp(-gate)));
          }
        }
      }
    });
  }
  clear_padding(out);
}

}  // namespace fourfold::cpu
