#include "kernels/mixer_problems.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "nvfp4/number.h"

namespace fourfold::mixers {
namespace {

using nvfp4::bf16_to_float;
using nvfp4::float_to_bf16;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double load(const std::vector<unsigned char>& bytes, long long i, bool float32) {
  if (float32) {
    float x;
    std::memcpy(&x, bytes.data() + i * 4, 4);
    return x;
  }
  unsigned short x;
  std::memcpy(&x, bytes.data() + i * 2, 2);
  return static_cast<double>(bf16_to_float(x));
}
void store(std::vector<unsigned char>& bytes, long long i, float value, bool float32) {
  if (float32) {
    std::memcpy(bytes.data() + i * 4, &value, 4);
  } else {
    const unsigned short x = float_to_bf16(value);
    std::memcpy(bytes.data() + i * 2, &x, 2);
  }
}
double silu(double x) { return x / (1.0 + std::exp(-x)); }
double through_bf16(double x) { return static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(x)))); }

// Rows of the sequences one after the other, with a row that belongs to nobody between them.
int place_rows(const std::vector<SequencePlan>& plan, std::vector<SequenceRows>* sequences) {
  int rows = 1;
  for (const SequencePlan& s : plan) {
    sequences->push_back({s.count > 0 ? rows : -1, s.count, s.position, s.state_in});
    if (s.count > 0) rows += s.count + 1;
  }
  return rows;
}

template <typename... Values>
std::string text(const char* format, Values... values) {
  char line[256];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

}  // namespace

gdn::DeltaArgs DeltaProblem::args() const {
  gdn::DeltaArgs a{};
  a.shape = shape;
  a.row_stride = row_stride;
  a.out_stride = out_stride;
  a.state_stride = state_stride;
  a.history_stride = history_stride;
  a.state_out_stride = state_out_stride;
  a.norm_eps = norm_eps;
  a.settled = 1;
  return a;
}

DeltaProblem make_delta(const gdn::DeltaShape& shape, bool float32, const std::vector<SequencePlan>& plan, int slots,
                        unsigned seed, bool bf16_keys) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  DeltaProblem p;
  p.shape = shape;
  p.float32 = float32;
  p.rows = place_rows(plan, &p.sequences);
  p.live = static_cast<int>(plan.size());
  for (int i = 0; i < 2; ++i) p.sequences.push_back({0, 3, 5, 0});  // behind the live ones: must not be taken
  p.row_stride = (shape.columns() + 7) / 8 * 8 + 8;
  p.out_stride = shape.value_heads * shape.value_dim + 8;
  p.state_stride = shape.state_floats() + 32;
  p.history_stride = shape.history_elements() + 8;
  for (const SequencePlan& s : plan)
    p.state_out_stride = std::max(p.state_out_stride, static_cast<int>(s.state_out.size()));
  for (const SequencePlan& s : plan)
    for (int i = 0; i < p.state_out_stride; ++i)
      p.state_out.push_back(i < static_cast<int>(s.state_out.size()) ? s.state_out[static_cast<size_t>(i)] : -1);
  p.state_out.resize(p.sequences.size() * static_cast<size_t>(p.state_out_stride), 0);
  const auto fill = [&](auto& v, size_t n, float mean, float deviation) {
    v.resize(n);
    for (auto& x : v) x = mean + deviation * normal(rng);
  };
  const int channels = shape.channels();
  fill(p.conv, static_cast<size_t>(channels) * 4, 0.0f, 0.5f);
  fill(p.a_log, static_cast<size_t>(shape.value_heads), 0.0f, 1.0f);
  fill(p.dt_bias, static_cast<size_t>(shape.value_heads), -2.0f, 1.0f);
  fill(p.norm, static_cast<size_t>(shape.value_dim), 1.0f, 0.2f);
  const size_t element = float32 ? 4 : 2;
  p.row_bytes.assign(static_cast<size_t>(p.rows) * static_cast<size_t>(p.row_stride) * element, 0xff);
  p.history_bytes.assign(static_cast<size_t>(slots) * static_cast<size_t>(p.history_stride) * element, 0xff);
  p.states.assign(static_cast<size_t>(slots) * static_cast<size_t>(p.state_stride),
                  std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 0; i < plan.size(); ++i) {
    const SequenceRows& s = p.sequences[i];
    for (int r = 0; r < s.count; ++r)
      for (int c = 0; c < shape.columns(); ++c)
        store(p.row_bytes, static_cast<long long>(s.first + r) * p.row_stride + c, normal(rng), float32);
    if (s.count == 0 || s.position == 0) continue;
    for (long long j = 0; j < shape.state_floats(); ++j)
      p.states[static_cast<size_t>(s.state_in * p.state_stride + j)] = 0.3f * normal(rng);
    // The same key head's channels are the same in each of its value heads.
    for (int h = 0; h < shape.value_heads; ++h)
      for (int t = 0; t < gdn::kHistory; ++t)
        for (int c = 0; c < 2 * shape.key_dim + shape.value_dim; ++c) {
          std::mt19937 own(seed + static_cast<unsigned>(s.state_in * 7919 + t * 131 +
                                                        (c < 2 * shape.key_dim ? h / shape.ratio() : 64 + h) * 65537 +
                                                        c * 17));
          store(
              p.history_bytes,
              s.state_in * p.history_stride + h * shape.history_head() + t * (2 * shape.key_dim + shape.value_dim) + c,
              normal(own), float32);
        }
  }
  p.out.assign(static_cast<size_t>(p.rows) * static_cast<size_t>(shape.value_heads * shape.value_dim), kNan);
  p.states_after.assign(p.states.begin(), p.states.end());
  p.history_after = p.history_bytes;
  const int dk = shape.key_dim;
  const int dv = shape.value_dim;
  const int own = 2 * dk + dv;
  for (size_t i = 0; i < plan.size(); ++i) {
    const SequenceRows& s = p.sequences[i];
    for (int h = 0; s.count > 0 && h < shape.value_heads; ++h) {
      const auto state_place = [&](int slot, int key, int column) {
        return static_cast<size_t>(slot * p.state_stride + static_cast<long long>(h) * dk * dv + column / 8 * (dk * 8) +
                                   key * 8 + column % 8);
      };
      const auto history_place = [&](int slot, int t, int c) {
        return slot * p.history_stride + h * shape.history_head() + t * own + c;
      };
      const auto column_of = [&](int c) {
        return c < dk       ? shape.q_column(h) + c
               : c < 2 * dk ? shape.k_column(h) + c - dk
                            : shape.v_column(h) + c - 2 * dk;
      };
      std::vector<double> state(static_cast<size_t>(dk * dv));
      std::vector<double> inputs(static_cast<size_t>((3 + s.count) * own));
      for (int k = 0; k < dk; ++k)
        for (int c = 0; c < dv; ++c)
          state[static_cast<size_t>(k * dv + c)] =
              s.position == 0 ? 0.0 : static_cast<double>(p.states[state_place(s.state_in, k, c)]);
      for (int t = 0; t < 3 + s.count; ++t)
        for (int c = 0; c < own; ++c) {
          double& x = inputs[static_cast<size_t>(t * own + c)];
          if (t >= 3) {
            x = load(p.row_bytes, static_cast<long long>(s.first + t - 3) * p.row_stride + column_of(c), float32);
          } else {
            x = s.position == 0 ? 0.0 : load(p.history_bytes, history_place(s.state_in, t, c), float32);
          }
        }
      for (int r = 0; r < s.count; ++r) {
        std::vector<double> x(static_cast<size_t>(own));
        double squares[2] = {1e-6, 1e-6};
        for (int c = 0; c < own; ++c) {
          double sum = 0;
          for (int t = 0; t < 4; ++t)
            sum += static_cast<double>(p.conv[static_cast<size_t>(column_of(c) * 4 + t)]) *
                   inputs[static_cast<size_t>((r + t) * own + c)];
          x[static_cast<size_t>(c)] = silu(sum);
          if (c < 2 * dk) squares[c / dk] += x[static_cast<size_t>(c)] * x[static_cast<size_t>(c)];
        }
        for (int c = 0; c < 2 * dk; ++c) {
          double& v = x[static_cast<size_t>(c)];
          v /= std::sqrt(squares[c / dk]);
          if (bf16_keys) v = through_bf16(v);
          if (c < dk) v /= std::sqrt(static_cast<double>(dk));
        }
        const long long row = static_cast<long long>(s.first + r) * p.row_stride;
        const double y = load(p.row_bytes, row + shape.a_column(h), float32) +
                         static_cast<double>(p.dt_bias[static_cast<size_t>(h)]);
        const double decay = std::exp(-std::exp(static_cast<double>(p.a_log[static_cast<size_t>(h)])) *
                                      (y > 20.0 ? y : std::log1p(std::exp(y))));
        const double beta = 1.0 / (1.0 + std::exp(-load(p.row_bytes, row + shape.b_column(h), float32)));
        std::vector<double> o(static_cast<size_t>(dv));
        for (int c = 0; c < dv; ++c) {
          double m = 0;
          for (int k = 0; k < dk; ++k) {
            double& v = state[static_cast<size_t>(k * dv + c)];
            v *= decay;
            m += x[static_cast<size_t>(dk + k)] * v;
          }
          const double d = beta * (x[static_cast<size_t>(2 * dk + c)] - m);
          double sum = 0;
          for (int k = 0; k < dk; ++k) {
            double& v = state[static_cast<size_t>(k * dv + c)];
            v += x[static_cast<size_t>(dk + k)] * d;
            sum += x[static_cast<size_t>(k)] * v;
          }
          o[static_cast<size_t>(c)] = sum;
        }
        double square = 0;
        for (const double v : o) square += v * v;
        const double factor = 1.0 / std::sqrt(square / dv + static_cast<double>(p.norm_eps));
        for (int c = 0; c < dv; ++c)
          p.out[static_cast<size_t>((s.first + r) * shape.value_heads * dv + h * dv + c)] =
              o[static_cast<size_t>(c)] * factor * static_cast<double>(p.norm[static_cast<size_t>(c)]) *
              silu(load(p.row_bytes, row + shape.z_column(h) + c, float32));
        const bool chunked = plan[i].state_out.size() == 1 && s.count > 1;
        const size_t entry = chunked ? 0 : static_cast<size_t>(r);
        if ((chunked && r != s.count - 1) || entry >= plan[i].state_out.size() || plan[i].state_out[entry] < 0)
          continue;
        const int slot = plan[i].state_out[entry];
        for (int k = 0; k < dk; ++k)
          for (int c = 0; c < dv; ++c) p.states_after[state_place(slot, k, c)] = state[static_cast<size_t>(k * dv + c)];
        for (int t = 0; t < 3; ++t)
          for (int c = 0; c < own; ++c)
            store(p.history_after, history_place(slot, t, c),
                  static_cast<float>(inputs[static_cast<size_t>((r + 1 + t) * own + c)]), float32);
      }
    }
  }
  return p;
}

std::string compare_delta(const DeltaProblem& p, const unsigned short* out, const float* states,
                          const unsigned char* history, double tolerance, double state_tolerance, double* error,
                          double* state_error) {
  const int width = p.shape.value_heads * p.shape.value_dim;
  double difference = 0;
  double norm = 0;
  for (int r = 0; r < p.rows; ++r) {
    for (int c = 0; c < p.out_stride; ++c) {
      const unsigned short bits =
          out[static_cast<size_t>(r) * static_cast<size_t>(p.out_stride) + static_cast<size_t>(c)];
      const double want = c < width ? p.out[static_cast<size_t>(r * width + c)] : kNan;
      if (std::isnan(want)) {
        if (bits != 0xffff) return text("row %d, column %d is written and belongs to nobody", r, c);
        continue;
      }
      const double got = static_cast<double>(bf16_to_float(bits));
      if (!std::isfinite(got)) return text("row %d, column %d is %g, wanted %g", r, c, got, want);
      difference += (got - want) * (got - want);
      norm += want * want;
    }
  }
  const double relative = std::sqrt(difference / std::max(norm, 1e-300));
  if (error != nullptr) *error = relative;
  if (!(relative <= tolerance)) return text("outputs differ by %.3g of their norm, %.3g allowed", relative, tolerance);
  difference = norm = 0;
  for (size_t i = 0; i < p.states_after.size(); ++i) {
    const double want = p.states_after[i];
    if (std::isnan(want)) {
      if (!std::isnan(states[i])) return text("state float %zu is written and belongs to nobody", i);
      continue;
    }
    const double got = static_cast<double>(states[i]);
    if (!std::isfinite(got)) return text("state float %zu is %g, wanted %g", i, got, want);
    difference += (got - want) * (got - want);
    norm += want * want;
  }
  const double relative_state = std::sqrt(difference / std::max(norm, 1e-300));
  if (state_error != nullptr) *state_error = relative_state;
  if (!(relative_state <= state_tolerance)) {
    return text("states differ by %.3g of their norm, %.3g allowed", relative_state, state_tolerance);
  }
  for (size_t i = 0; i < p.history_after.size(); ++i) {
    if (history[i] != p.history_after[i]) {
      return text("byte %zu of the convolution's history is %d, wanted %d", i, history[i], p.history_after[i]);
    }
  }
  return "";
}

// ---- attention
// -----------------------------------------------------------------------------------------------------------

attn::AttentionArgs AttentionProblem::args() const {
  attn::AttentionArgs a{};
  a.shape = shape;
  a.row_stride = row_stride;
  a.out_stride = out_stride;
  a.page_bytes = page_bytes;
  while (1 << a.page_shift < page_size) ++a.page_shift;
  a.page_table_stride = page_table_stride;
  a.splits = attn::most_splits(longest);
  a.most_rows = most_rows;
  a.scale = scale;
  a.norm_eps = norm_eps;
  a.settled = 1;
  return a;
}

AttentionProblem make_attention(const attn::AttentionShape& shape, int rotary_dim, int page_size, bool fp8,
                                const std::vector<SequencePlan>& plan, unsigned seed, bool norms) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  AttentionProblem p;
  p.shape = shape;
  p.rotary_dim = rotary_dim;
  p.page_size = page_size;
  p.fp8 = fp8;
  p.rows = place_rows(plan, &p.sequences);
  p.live = static_cast<int>(plan.size());
  for (int i = 0; i < 2; ++i) p.sequences.push_back({0, 3, 5, 0});
  const int dim = shape.head_dim;
  const int group = shape.group();
  p.row_stride = shape.columns() + 8;
  p.out_stride = shape.heads * dim + 8;
  p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  if (fp8) {
    p.cache_scales[0] = 0.02f;
    p.cache_scales[1] = 0.013f;
  }
  for (const SequenceRows& s : p.sequences) {
    p.most_rows = std::max(p.most_rows, s.count);
    p.longest = std::max(p.longest, s.position + s.count);
    p.page_table_stride = std::max(p.page_table_stride, (s.position + s.count + page_size - 1) / page_size);
  }
  const int element = fp8 ? 1 : 2;
  p.page_bytes = static_cast<long long>(shape.kv_heads) * 2 * page_size * dim * element;
  // Pages in any order, one of them nobody's.
  std::vector<int> numbers;
  for (int i = 0; i < p.live; ++i) {
    const SequenceRows& s = p.sequences[static_cast<size_t>(i)];
    p.page_count += s.count > 0 ? (s.position + s.count + page_size - 1) / page_size : 0;
  }
  ++p.page_count;
  for (int i = 0; i < p.page_count; ++i) numbers.push_back(i);
  std::shuffle(numbers.begin(), numbers.end(), rng);
  p.pages.assign(static_cast<size_t>(p.live * p.page_table_stride), -1);
  size_t next = 0;
  for (int i = 0; i < p.live; ++i) {
    const SequenceRows& s = p.sequences[static_cast<size_t>(i)];
    for (int j = 0; s.count > 0 && j * page_size < s.position + s.count; ++j)
      p.pages[static_cast<size_t>(i * p.page_table_stride + j)] = numbers[next++];
  }
  const auto fill = [&](auto& v, size_t n, float mean, float deviation) {
    v.resize(n);
    for (auto& x : v) x = mean + deviation * normal(rng);
  };
  if (norms) {
    fill(p.q_norm, static_cast<size_t>(dim), 1.0f, 0.2f);
    fill(p.k_norm, static_cast<size_t>(dim), 1.0f, 0.2f);
  }
  for (int i = 0; i < rotary_dim / 2; ++i)
    p.frequencies.push_back(static_cast<float>(std::pow(1e7, -2.0 * i / rotary_dim)));
  p.row_values.assign(static_cast<size_t>(p.rows) * static_cast<size_t>(p.row_stride), 0xffff);
  p.cache.assign(static_cast<size_t>(p.page_count) * static_cast<size_t>(p.page_bytes), 0xff);
  p.cache_after.assign(p.cache.size() / static_cast<size_t>(element), kNan);
  p.out.assign(static_cast<size_t>(p.rows * shape.heads * dim), kNan);
  for (int i = 0; i < p.live; ++i) {
    const SequenceRows& s = p.sequences[static_cast<size_t>(i)];
    if (s.count == 0) continue;
    for (int r = 0; r < s.count; ++r)
      for (int c = 0; c < shape.columns(); ++c)
        p.row_values[static_cast<size_t>((s.first + r) * p.row_stride + c)] = float_to_bf16(normal(rng));
    const int keys = s.position + s.count;
    const auto place = [&](int position, int kv_head, bool value) {
      const int page = p.pages[static_cast<size_t>(i * p.page_table_stride + position / page_size)];
      return static_cast<size_t>(page * (p.page_bytes / element) + (kv_head * 2 + (value ? 1 : 0)) * page_size * dim);
    };
    const auto row_value = [&](int r, int c) {
      return static_cast<double>(bf16_to_float(p.row_values[static_cast<size_t>((s.first + r) * p.row_stride + c)]));
    };
    const auto prepare = [&](int r, int column, const std::vector<float>& norm) {
      std::vector<double> x(static_cast<size_t>(dim));
      double square = 0;
      for (int d = 0; d < dim; ++d) {
        x[static_cast<size_t>(d)] = row_value(r, column + d);
        square += x[static_cast<size_t>(d)] * x[static_cast<size_t>(d)];
      }
      const double factor = 1.0 / std::sqrt(square / dim + static_cast<double>(p.norm_eps));
      for (int d = 0; !norm.empty() && d < dim; ++d)
        x[static_cast<size_t>(d)] *= factor * static_cast<double>(norm[static_cast<size_t>(d)]);
      for (int d = 0; d < rotary_dim / 2; ++d) {
        const double angle =
            static_cast<double>(static_cast<float>(s.position + r) * p.frequencies[static_cast<size_t>(d)]);
        double& a = x[static_cast<size_t>(d)];
        double& b = x[static_cast<size_t>(d + rotary_dim / 2)];
        const double turned = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + a * std::sin(angle);
        a = turned;
      }
      return x;
    };
    for (int kv = 0; kv < shape.kv_heads; ++kv) {
      std::vector<double> cached[2];
      for (int kind = 0; kind < 2; ++kind) {
        for (int position = 0; position < keys; ++position) {
          std::vector<double> x;
          if (position >= s.position && kind == 0) {
            x = prepare(position - s.position, shape.k_column(kv), p.k_norm);
          } else if (position >= s.position) {
            for (int d = 0; d < dim; ++d) x.push_back(row_value(position - s.position, shape.v_column(kv) + d));
          }
          const double scale = static_cast<double>(p.cache_scales[kind]);
          for (int d = 0; d < dim; ++d) {
            const int chunk_elements = 16 / element;
            const size_t at =
                place(position, kv, kind == 1) +
                static_cast<size_t>(
                    attn::cache_place(dim * element, page_size, position % page_size, d / chunk_elements) / element +
                    d % chunk_elements);
            if (position < s.position) {
              if (fp8) {
                const unsigned char code = nvfp4::float_to_e4m3(normal(rng) / static_cast<float>(scale));
                p.cache[at] = code;
                x.push_back(static_cast<double>(nvfp4::e4m3_to_float(code)) * scale);
              } else {
                const unsigned short bits = float_to_bf16(normal(rng));
                std::memcpy(p.cache.data() + at * 2, &bits, 2);
                x.push_back(static_cast<double>(bf16_to_float(bits)));
              }
            }
            p.cache_after[at] = x[static_cast<size_t>(d)];
          }
          // What the cache keeps of a new one is used, too.
          for (double& v : x) {
            if (position >= s.position) {
              v = fp8 ? static_cast<double>(nvfp4::e4m3_to_float(nvfp4::float_to_e4m3(static_cast<float>(v / scale)))) *
                            scale
                      : through_bf16(v);
            }
          }
          cached[kind].insert(cached[kind].end(), x.begin(), x.end());
        }
      }
      for (int r = 0; r < s.count; ++r)
        for (int h = kv * group; h < (kv + 1) * group; ++h) {
          const std::vector<double> q = prepare(r, shape.q_column(h), p.q_norm);
          std::vector<double> weights(static_cast<size_t>(s.position + r + 1));
          double most = -1e300;
          for (size_t j = 0; j < weights.size(); ++j) {
            double sum = 0;
            for (size_t d = 0; d < static_cast<size_t>(dim); ++d)
              sum += q[d] * cached[0][j * static_cast<size_t>(dim) + d];
            weights[j] = sum * static_cast<double>(p.scale);
            most = std::max(most, weights[j]);
          }
          double total = 0;
          for (double& w : weights) total += w = std::exp(w - most);
          for (int d = 0; d < dim; ++d) {
            double sum = 0;
            for (size_t j = 0; j < weights.size(); ++j)
              sum += weights[j] * cached[1][j * static_cast<size_t>(dim) + static_cast<size_t>(d)];
            double y = sum / total;
            if (shape.gated) y /= 1.0 + std::exp(-row_value(r, shape.gate_column(h) + d));
            p.out[static_cast<size_t>((s.first + r) * shape.heads * dim + h * dim + d)] = y;
          }
        }
    }
  }
  return p;
}

std::string compare_attention(const AttentionProblem& p, const unsigned short* out, const unsigned char* cache,
                              double tolerance, double* error) {
  const int width = p.shape.heads * p.shape.head_dim;
  double difference = 0;
  double norm = 0;
  for (int r = 0; r < p.rows; ++r)
    for (int c = 0; c < p.out_stride; ++c) {
      const unsigned short bits =
          out[static_cast<size_t>(r) * static_cast<size_t>(p.out_stride) + static_cast<size_t>(c)];
      const double want = c < width ? p.out[static_cast<size_t>(r * width + c)] : kNan;
      if (std::isnan(want)) {
        if (bits != 0xffff) return text("row %d, column %d is written and belongs to nobody", r, c);
        continue;
      }
      const double got = static_cast<double>(bf16_to_float(bits));
      if (!std::isfinite(got)) return text("row %d, column %d is %g, wanted %g", r, c, got, want);
      difference += (got - want) * (got - want);
      norm += want * want;
    }
  const double relative = std::sqrt(difference / std::max(norm, 1e-300));
  if (error != nullptr) *error = relative;
  if (!(relative <= tolerance)) return text("outputs differ by %.3g of their norm, %.3g allowed", relative, tolerance);
  for (size_t i = 0; i < p.cache_after.size(); ++i) {
    const double want = p.cache_after[i];
    const size_t row = i / static_cast<size_t>(p.shape.head_dim);
    if (p.fp8) {
      if (std::isnan(want)) {
        if (cache[i] != p.cache[i]) return text("cache row %zu is written and belongs to nobody", row);
        continue;
      }
      const double scale = static_cast<double>(p.cache_scales[row / static_cast<size_t>(p.page_size) % 2]);
      const double got = static_cast<double>(nvfp4::e4m3_to_float(cache[i])) * scale;
      if (!(std::fabs(got - want) <= std::fabs(want) / 15.9 + scale / 1000.0)) {
        return text("cache row %zu: %g, wanted %g", row, got, want);
      }
    } else {
      unsigned short bits, before;
      std::memcpy(&bits, cache + i * 2, 2);
      std::memcpy(&before, p.cache.data() + i * 2, 2);
      if (std::isnan(want)) {
        if (bits != before) return text("cache row %zu is written and belongs to nobody", row);
        continue;
      }
      const double got = static_cast<double>(bf16_to_float(bits));
      if (!(std::fabs(got - want) <= std::fabs(want) / 250.0 + 1e-5)) {
        return text("cache row %zu: %g, wanted %g", row, got, want);
      }
    }
  }
  return "";
}

}  // namespace fourfold::mixers
