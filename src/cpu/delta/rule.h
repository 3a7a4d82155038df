// The inner loops of Gated DeltaNet over a vocabulary V; simd/avx2.h says why all of it is unnamed.
#pragma once

#include <cstdint>

#include "cpu/delta/kernels.h"
#include "cpu/simd/elementwise.h"

namespace fourfold::cpu {
namespace {

template <class V>
struct DeltaLoops : Elementwise<V> {
  using Base = Elementwise<V>;
  using Base::exp_one;
  using Base::inverse_root;
  using Base::kLanes;
  using Base::kPanelVecs;
  using Base::kPanelWidth;
  using Base::least;
  using Base::load_padded;
  using Base::product;
  using Base::store_padded;
  using Base::sum_of_squares;
  using Base::transform;
  using typename Base::Vec;

  // ---- convolution

  // weights [channels][taps] to [taps][channels]
  static inline void transpose_taps(const float* weights, int64_t channels, int64_t taps, float* out) {
    int64_t c = 0;
    if (taps == 4) {
      for (; c + 4 <= channels; c += 4) {
        V::transpose4(weights + 4 * c, out + c, out + channels + c, out + 2 * channels + c, out + 3 * channels + c);
      }
    }
    for (; c < channels; ++c) {
      for (int64_t j = 0; j < taps; ++j) out[j * channels + c] = weights[c * taps + j];
    }
  }

  static void convolve(float* x, int64_t tokens, int64_t stride, int64_t channels, int64_t taps, const float* weights,
                       const float* history_in, float* history_out, int64_t history_stride, bool normalize, float scale,
                       float* scratch) {
    const int64_t past = taps - 1;
    float* by_tap = scratch;                    // [taps][channels]
    float* window = scratch + taps * channels;  // [past][channels], a ring: token t replaces row t mod past
    transpose_taps(weights, channels, taps, by_tap);
    for (int64_t j = 0; j < past; ++j) {
      for (int64_t c = 0; c < channels; ++c) {
        window[j * channels + c] = history_in != nullptr ? history_in[j * history_stride + c] : 0.0f;
      }
    }
    int64_t oldest = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      float* row = x + t * stride;
      int64_t c = 0;
      if (past == 3) {
        const float* w0 = window + oldest * channels;
        const float* w1 = window + (oldest + 1) % 3 * channels;
        const float* w2 = window + (oldest + 2) % 3 * channels;
        for (; c + kLanes <= channels; c += kLanes) {
          const Vec now = Vec::load(row + c);
          Vec sum = now * Vec::load(by_tap + 3 * channels + c);
          sum = fma(Vec::load(w0 + c), Vec::load(by_tap + c), sum);
          sum = fma(Vec::load(w1 + c), Vec::load(by_tap + channels + c), sum);
          sum = fma(Vec::load(w2 + c), Vec::load(by_tap + 2 * channels + c), sum);
          now.store(window + oldest * channels + c);
          silu(sum).store(row + c);
        }
      }
      for (; c < channels; c += kLanes) {
        const Vec now = load_padded(row, c, channels);
        Vec sum = now * load_padded(by_tap + past * channels, c, channels);
        int64_t ring = oldest;
        for (int64_t j = 0; j < past; ++j) {
          sum = fma(load_padded(window + ring * channels, c, channels), load_padded(by_tap + j * channels, c, channels),
                    sum);
          if (++ring == past) ring = 0;
        }
        if (past > 0) store_padded(now, window + oldest * channels, c, channels);
        store_padded(silu(sum), row, c, channels);
      }
      if (++oldest >= past) oldest = 0;
      if (normalize) {
        const Vec factor = Vec::all(scale * inverse_root(sum_of_squares(row, channels) + 1e-6f));
        transform(row, channels, [&](int64_t, Vec y) { return y * factor; });
      }
    }
    for (int64_t j = 0; j < past; ++j) {
      for (int64_t c = 0; c < channels; ++c) history_out[j * history_stride + c] = window[oldest * channels + c];
      if (++oldest == past) oldest = 0;
    }
  }

  // ---- recurrence

  struct Panel {
    Vec part[kPanelVecs];
    static Panel load(const float* p) {
      Panel x;
      for (int i = 0; i < kPanelVecs; ++i) x.part[i] = Vec::load(p + i * kLanes);
      return x;
    }
    static Panel load(const float* p, int64_t i, int64_t n) {
      Panel x;
      for (int j = 0; j < kPanelVecs; ++j) {
        x.part[j] = i + j * kLanes < n ? load_padded(p, i + j * kLanes, n) : Vec::zero();
      }
      return x;
    }
    void store(float* p) const {
      for (int i = 0; i < kPanelVecs; ++i) part[i].store(p + i * kLanes);
    }
    void store(float* p, int64_t i, int64_t n) const {
      for (int j = 0; j < kPanelVecs; ++j) {
        if (i + j * kLanes < n) store_padded(part[j], p, i + j * kLanes, n);
      }
    }
  };

  // Per token and panel: one pass over the panel for m = S^T k, one that decays and writes it and sums o = S^T q. The
  // panel comes from memory in the first pass and stays in L1 for the others, so the state moves once each way.
  static void recur(int64_t tokens, int64_t key_dim, int64_t value_dim, const float* q, const float* k, const float* v,
                    int64_t stride, const float* decay, const float* beta, int64_t gate_stride, const float* state_in,
                    float* state_out, float* out, int64_t out_stride) {
    constexpr int kRows = 4;  // independent sums, to hide the latency of the multiply-add
    const int64_t panel_floats = key_dim * kPanelWidth;
    for (int64_t column = 0; column < value_dim; column += kPanelWidth) {
      const float* from = state_in;
      if (state_in != nullptr) state_in += panel_floats;
      for (int64_t t = 0; t < tokens; ++t) {
        const float* key = k + t * stride;
        const float* query = q + t * stride;
        const Vec fade = Vec::all(decay[t * gate_stride]);
        const Vec rate = Vec::all(beta[t * gate_stride]);
        Panel sums[kRows] = {};
        for (Panel& sum : sums) {
          for (Vec& part : sum.part) part = Vec::zero();
        }
        if (from != nullptr) {
          int64_t i = 0;
          for (; i + kRows <= key_dim; i += kRows) {
            // the same rows of the next panel; past the last one this touches nothing
            if (t == 0) {
              const char* next = reinterpret_cast<const char*>(from + panel_floats + i * kPanelWidth);
              for (int r = 0; r < kRows; ++r) __builtin_prefetch(next + 64 * r, 0, 3);
            }
            for (int r = 0; r < kRows; ++r) {
              const Vec factor = Vec::all(key[i + r]);
              for (int p = 0; p < kPanelVecs; ++p) {
                sums[r].part[p] = fma(factor, Vec::load(from + (i + r) * kPanelWidth + p * kLanes), sums[r].part[p]);
              }
            }
          }
          for (; i < key_dim; ++i) {
            const Vec factor = Vec::all(key[i]);
            for (int p = 0; p < kPanelVecs; ++p) {
              sums[0].part[p] = fma(factor, Vec::load(from + i * kPanelWidth + p * kLanes), sums[0].part[p]);
            }
          }
        }
        Panel change = Panel::load(v + t * stride, column, value_dim);
        for (int p = 0; p < kPanelVecs; ++p) {
          const Vec seen = (sums[0].part[p] + sums[1].part[p]) + (sums[2].part[p] + sums[3].part[p]);
          change.part[p] = rate * fnma(fade, seen, change.part[p]);
        }
        for (Panel& sum : sums) {
          for (Vec& part : sum.part) part = Vec::zero();
        }
        int64_t i = 0;
        for (; i + kRows <= key_dim; i += kRows) {
          for (int r = 0; r < kRows; ++r) {
            const int64_t at = (i + r) * kPanelWidth;
            const Vec key_part = Vec::all(key[i + r]);
            const Vec query_part = Vec::all(query[i + r]);
            for (int p = 0; p < kPanelVecs; ++p) {
              const Vec old = from != nullptr ? Vec::load(from + at + p * kLanes) * fade : Vec::zero();
              const Vec next = fma(key_part, change.part[p], old);
              next.store(state_out + at + p * kLanes);
              sums[r].part[p] = fma(query_part, next, sums[r].part[p]);
            }
          }
        }
        for (; i < key_dim; ++i) {
          for (int p = 0; p < kPanelVecs; ++p) {
            const int64_t at = i * kPanelWidth + p * kLanes;
            const Vec old = from != nullptr ? Vec::load(from + at) * fade : Vec::zero();
            const Vec next = fma(Vec::all(key[i]), change.part[p], old);
            next.store(state_out + at);
            sums[0].part[p] = fma(Vec::all(query[i]), next, sums[0].part[p]);
          }
        }
        Panel result;
        for (int p = 0; p < kPanelVecs; ++p) {
          result.part[p] = (sums[0].part[p] + sums[1].part[p]) + (sums[2].part[p] + sums[3].part[p]);
        }
        result.store(out + t * out_stride, column, value_dim);
        from = state_out;
      }
      state_out += panel_floats;
    }
  }

  // ---- chunked form

  // Formulas as at delta_rule_chunked() in reference/delta_rule.h. Scratch, in this order, C = kChunk, P panels of
  // value_dim:
  //   keys, queries [C][key_dim]; keys transposed [key_dim][C]; solve, scores [C][C]; change, result [P][C][16]; c [C]
  // e^x for a decay x <= 0; 0 where less than 4e-31 is left: products with what is left would be denormals, which cost
  // a hundred times as much. Strongly decaying heads come there within a few tokens.
  static constexpr float kForgotten = 4e-31f;  // e^-70
  static inline Vec fade(Vec x) { return max(Vec::zero(), exp(x) - Vec::all(kForgotten)); }
  static inline float fade_one(float x) {
    const float left = exp_one(x);
    return left < kForgotten ? 0.0f : left;
  }

  static void chunk(int64_t tokens, int64_t key_dim, int64_t value_dim, const float* q, const float* k, const float* v,
                    int64_t stride, const float* log_decay, const float* beta, int64_t gate_stride,
                    const float* state_in, float* state_out, float* out, int64_t out_stride, float* scratch) {
    const int64_t panels = (value_dim + kPanelWidth - 1) / kPanelWidth;
    const int64_t panel_floats = key_dim * kPanelWidth;
    const int64_t block_floats = kChunk * kPanelWidth;
    float* keys = scratch;
    float* queries = keys + kChunk * key_dim;
    float* transposed = queries + kChunk * key_dim;
    float* solve = transposed + key_dim * kChunk;
    float* scores = solve + kChunk * kChunk;
    float* change = scores + kChunk * kChunk;
    float* result = change + panels * block_floats;
    float* c = result + panels * block_floats;

    float sum = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      if (i < tokens) sum += log_decay[i * gate_stride];
      c[i] = sum;
    }
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t d = 0; d < key_dim; d += kLanes) {
        store_padded(load_padded(k + i * stride, d, key_dim), keys + i * key_dim, d, key_dim);
        store_padded(load_padded(q + i * stride, d, key_dim), queries + i * key_dim, d, key_dim);
      }
    }
    for (int64_t d = 0; d < key_dim; ++d) {
      for (int64_t i = 0; i < tokens; ++i) transposed[d * kChunk + i] = keys[i * key_dim + d];
      for (int64_t i = tokens; i < kChunk; ++i) transposed[d * kChunk + i] = 0.0f;
    }

    // K K^T and Q K^T where j <= i, sixteen columns j at a time
    for (int64_t j = 0; j < tokens; j += kPanelWidth) {
      product(tokens - j, key_dim, false, keys + j * key_dim, key_dim, transposed + j, kChunk, nullptr, 1.0f,
              solve + j * kChunk + j, kChunk);
      product(tokens - j, key_dim, false, queries + j * key_dim, key_dim, transposed + j, kChunk, nullptr, 1.0f,
              scores + j * kChunk + j, kChunk);
    }
    // -A and the decayed scores; the exponent is masked first, above the diagonal it would overflow
    for (int64_t i = 0; i < tokens; ++i) {
      float* a = solve + i * kChunk;
      float* p = scores + i * kChunk;
      const Vec rate = Vec::all(-beta[i * gate_stride]);
      for (int64_t j = 0; j <= i; j += kLanes) {
        const Vec left = fade(min(Vec::zero(), Vec::all(c[i]) - Vec::load(c + j)));
        (Vec::load(a + j) * left * rate).store(a + j);
        (Vec::load(p + j) * left).store(p + j);
      }
      for (int64_t j = i; j < kChunk; ++j) {
        a[j] = 0.0f;
        if (j > i) p[j] = 0.0f;
      }
    }

    // Right-hand side beta (v - e^c S0^T k), and e^c S0^T q
    for (int64_t i = 0; i < tokens; ++i) {
      const float left = fade_one(c[i]);
      const Vec rate = Vec::all(beta[i * gate_stride]);
      const Vec key_factor = Vec::all(-beta[i * gate_stride] * left);
      const Vec query_factor = Vec::all(left);
      transform(keys + i * key_dim, key_dim, [&](int64_t, Vec x) { return x * key_factor; });
      transform(queries + i * key_dim, key_dim, [&](int64_t, Vec x) { return x * query_factor; });
      for (int64_t p = 0; p < panels; ++p) {
        Panel row = Panel::load(v + i * stride, p * kPanelWidth, value_dim);
        for (Vec& part : row.part) part = part * rate;
        row.store(change + p * block_floats + i * kPanelWidth);
      }
    }
    if (state_in != nullptr) {
      for (int64_t p = 0; p < panels; ++p) {
        const float* state = state_in + p * panel_floats;
        float* d = change + p * block_floats;
        product(tokens, key_dim, false, keys, key_dim, state, kPanelWidth, d, 1.0f, d, kPanelWidth);
        product(tokens, key_dim, false, queries, key_dim, state, kPanelWidth, nullptr, 1.0f, result + p * block_floats,
                kPanelWidth);
      }
    }

    // Forward substitution in blocks: what earlier blocks contribute is a product, the rest goes row by row.
    constexpr int64_t kBlock = 8;
    for (int64_t first = 0; first < tokens; first += kBlock) {
      const int64_t end = least(tokens, first + kBlock);
      for (int64_t p = 0; p < panels; ++p) {
        float* d = change + p * block_floats;
        if (first > 0) {
          product(end - first, first, false, solve + first * kChunk, kChunk, d, kPanelWidth, d + first * kPanelWidth,
                  1.0f, d + first * kPanelWidth, kPanelWidth);
        }
        for (int64_t i = first + 1; i < end; ++i) {
          Panel row = Panel::load(d + i * kPanelWidth);
          for (int64_t j = first; j < i; ++j) {
            const Vec a = Vec::all(solve[i * kChunk + j]);
            for (int s = 0; s < kPanelVecs; ++s) {
              row.part[s] = fma(a, Vec::load(d + j * kPanelWidth + s * kLanes), row.part[s]);
            }
          }
          row.store(d + i * kPanelWidth);
        }
      }
    }

    for (int64_t p = 0; p < panels; ++p) {
      float* o = result + p * block_floats;
      product(tokens, tokens, true, scores, kChunk, change + p * block_floats, kPanelWidth,
              state_in != nullptr ? o : nullptr, 1.0f, o, kPanelWidth);
      for (int64_t i = 0; i < tokens; ++i) {
        Panel::load(o + i * kPanelWidth).store(out + i * out_stride, p * kPanelWidth, value_dim);
      }
    }

    // S = e^c_last S0 + (e^(c_last - c_j) k_j)^T D
    float fades[kChunk];
    for (int64_t j = 0; j < kChunk; j += kLanes) fade(Vec::all(sum) - Vec::load(c + j)).store(fades + j);
    for (int64_t d = 0; d < key_dim; ++d) {
      transform(transposed + d * kChunk, kChunk, [&](int64_t j, Vec x) { return x * Vec::load(fades + j); });
    }
    const float left = fade_one(sum);
    for (int64_t p = 0; p < panels; ++p) {
      product(key_dim, tokens, false, transposed, kChunk, change + p * block_floats, kPanelWidth,
              state_in != nullptr ? state_in + p * panel_floats : nullptr, left, state_out + p * panel_floats,
              kPanelWidth);
    }
  }

  static void gated_norm(float* x, const float* z, const float* weight, float eps, int64_t n) {
    const Vec factor = Vec::all(inverse_root(sum_of_squares(x, n) / static_cast<float>(n) + eps));
    transform(x, n,
              [&](int64_t i, Vec y) { return y * factor * load_padded(weight, i, n) * silu(load_padded(z, i, n)); });
  }

  static constexpr DeltaKernels delta_kernels() {
    return {.convolve = convolve, .recur = recur, .chunk = chunk, .gated_norm = gated_norm};
  }
};

}  // namespace
}  // namespace fourfold::cpu
