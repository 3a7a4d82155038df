// Attention and Gated DeltaNet of the reference.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/reference.h"

namespace fourfold::cpu {

void ReferenceBackend::attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                                 const ops::Tensor& v, ops::KvCache& kv, int64_t layer, const ops::Tensor& out) {
  auto& cache = static_cast<HostKvCache&>(kv);
  prepare_attention(params, q, k, v, cache, layer);
  FF_ASSERT(out.rows == q.rows && out.cols == params.heads * params.head_dim);
  const int64_t dim = params.head_dim;
  const int64_t page_size = cache.shape().page_size;
  const int64_t group = params.heads / params.kv_heads;
  const int64_t q_stride = params.gated ? 2 * dim : dim;
  for (const ops::Sequence& sequence : batch().sequences) {
    const double cost = 0.5 * static_cast<double>((sequence.position + sequence.count) * dim);
    for_each(sequence.count * params.heads, cost, [&](int64_t begin, int64_t end) {
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
}

void delta_rule_recurrent(const DeltaRule& rule) {
  const int64_t dk = rule.key_dim;
  const int64_t dv = rule.value_dim;
  std::vector<double> change(static_cast<size_t>(dv));
  for (int64_t t = 0; t < rule.tokens; ++t) {
    const float* q = rule.q + t * dk;
    const float* k = rule.k + t * dk;
    const float* v = rule.v + t * dv;
    const auto decay = static_cast<float>(std::exp(static_cast<double>(rule.log_decay[t])));
    std::fill(change.begin(), change.end(), 0.0);
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) {
        rule.state[i * dv + j] *= decay;
        change[static_cast<size_t>(j)] += static_cast<double>(k[i]) * static_cast<double>(rule.state[i * dv + j]);
      }
    }
    for (int64_t j = 0; j < dv; ++j) {
      double& c = change[static_cast<size_t>(j)];
      c = static_cast<double>(rule.beta[t]) * (static_cast<double>(v[j]) - c);
    }
    std::vector<double> result(static_cast<size_t>(dv));
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) {
        float& s = rule.state[i * dv + j];
        s = static_cast<float>(static_cast<double>(s) + static_cast<double>(k[i]) * change[static_cast<size_t>(j)]);
        result[static_cast<size_t>(j)] += static_cast<double>(q[i]) * static_cast<double>(s);
      }
    }
    for (int64_t j = 0; j < dv; ++j) rule.out[t * dv + j] = static_cast<float>(result[static_cast<size_t>(j)]);
  }
}

void delta_rule_chunked(const DeltaRule& rule, int64_t chunk) {
  FF_ASSERT(chunk >= 1);
  const int64_t dk = rule.key_dim;
  const int64_t dv = rule.value_dim;
  for (int64_t first = 0; first < rule.tokens; first += chunk) {
    const int64_t n = std::min(chunk, rule.tokens - first);
    const float* q = rule.q + first * dk;
    const float* k = rule.k + first * dk;
    const float* v = rule.v + first * dv;
    const float* beta = rule.beta + first;
    std::vector<double> c(static_cast<size_t>(n));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) c[static_cast<size_t>(i)] = sum += static_cast<double>(rule.log_decay[first + i]);
    const auto dot = [dk](const float* a, const float* b) {
      double total = 0;
      for (int64_t i = 0; i < dk; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      return total;
    };
    // S0^T x for one vector x
    const auto project = [&](const float* x, int64_t column) {
      double total = 0;
      for (int64_t i = 0; i < dk; ++i)
        total += static_cast<double>(x[i]) * static_cast<double>(rule.state[i * dv + column]);
      return total;
    };
    std::vector<double> delta(static_cast<size_t>(n * dv));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t x = 0; x < dv; ++x) {
        delta[static_cast<size_t>(i * dv + x)] =
            static_cast<double>(beta[i]) *
            (static_cast<double>(v[i * dv + x]) - std::exp(c[static_cast<size_t>(i)]) * project(k + i * dk, x));
      }
      for (int64_t j = 0; j < i; ++j) {
        const double a = static_cast<double>(beta[i]) * dot(k + i * dk, k + j * dk) *
                         std::exp(c[static_cast<size_t>(i)] - c[static_cast<size_t>(j)]);
        for (int64_t x = 0; x < dv; ++x) {
          delta[static_cast<size_t>(i * dv + x)] -= a * delta[static_cast<size_t>(j * dv + x)];
        }
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      std::vector<double> o(static_cast<size_t>(dv));
      for (int64_t x = 0; x < dv; ++x)
        o[static_cast<size_t>(x)] = std::exp(c[static_cast<size_t>(i)]) * project(q + i * dk, x);
      for (int64_t j = 0; j <= i; ++j) {
        const double p = dot(q + i * dk, k + j * dk) * std::exp(c[static_cast<size_t>(i)] - c[static_cast<size_t>(j)]);
        for (int64_t x = 0; x < dv; ++x) o[static_cast<size_t>(x)] += p * delta[static_cast<size_t>(j * dv + x)];
      }
      for (int64_t x = 0; x < dv; ++x) rule.out[(first + i) * dv + x] = static_cast<float>(o[static_cast<size_t>(x)]);
    }
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t x = 0; x < dv; ++x) {
        double s = std::exp(sum) * static_cast<double>(rule.state[i * dv + x]);
        for (int64_t j = 0; j < n; ++j) {
          s += std::exp(sum - c[static_cast<size_t>(j)]) * static_cast<double>(k[j * dk + i]) *
               delta[static_cast<size_t>(j * dv + x)];
        }
        rule.state[i * dv + x] = static_cast<float>(s);
      }
    }
  }
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
  check_state_slots(states);
  const int64_t dk = params.key_dim;
  const int64_t dv = params.value_dim;
  const int64_t heads = params.value_heads;
  FF_ASSERT(qkv.rows == batch().size() && qkv.cols == states.shape().conv_channels());
  FF_ASSERT(z.cols == heads * dv && out.cols == heads * dv && a.cols == heads && b.cols == heads);
  for (const ops::Sequence& sequence : batch().sequences) {
    const bool fresh = sequence.position == 0;
    const ops::Tensor rows = qkv.slice_rows(sequence.first, sequence.first + sequence.count);
    for_each(qkv.cols, 30.0 * static_cast<double>(sequence.count), [&](int64_t begin, int64_t end) {
      convolve(params, rows, fresh ? nullptr : states.convolution(layer, sequence.state_in),
               states.convolution(layer, sequence.state_out), begin, end);
    });
    const int64_t n = sequence.count;
    for_each(heads, 3.0 * static_cast<double>(n * dk * dv), [&](int64_t begin, int64_t end) {
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
        delta_rule_recurrent(
            {n, dk, dv, q.data(), k.data(), v.data(), log_decay.data(), beta.data(), state.data(), o.data()});
        states.write_state(layer, sequence.state_out, h, state);
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
}

}  // namespace fourfold::cpu
