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
                       const float* history_in, float* const* histories, int64_t kept, int64_t history_stride,
                       bool normalize, float scale, float* scratch) {
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
      if (kept == 1 && t + 1 < tokens) continue;
      float* history = histories[kept == 1 ? 0 : t];
      int64_t ring = oldest;
      for (int64_t j = 0; j < past; ++j) {
        for (int64_t i = 0; i < channels; ++i) history[j * history_stride + i] = window[ring * channels + i];
        if (++ring == past) ring = 0;
      }
    }
  }

  // ---- recurrence

  // One row of kPanels panels of the state, which lie `apart` floats from each other.
  template <int kPanels>
  struct Row {
    static constexpr int kVecs = kPanels * kPanelVecs;
    Vec part[kVecs];
    static int64_t offset(int p, int64_t apart) { return p / kPanelVecs * apart + p % kPanelVecs * kLanes; }
    // Of a row without panels, from column i on; zero behind n.
    static Row load(const float* row, int64_t i, int64_t n) {
      Row x;
      for (int p = 0; p < kVecs; ++p) {
        x.part[p] = i + p * kLanes < n ? load_padded(row, i + p * kLanes, n) : Vec::zero();
      }
      return x;
    }
    void store(float* row, int64_t i, int64_t n) const {
      for (int p = 0; p < kVecs; ++p) {
        if (i + p * kLanes < n) store_padded(part[p], row, i + p * kLanes, n);
      }
    }
  };
  using Panel = Row<1>;

  static constexpr int kRows = 4;  // independent sums, to hide the latency of the multiply-add
  template <int kPanels>
  struct Sums {
    Row<kPanels> rows[kRows];
    Sums() {
      for (Row<kPanels>& row : rows) {
        for (Vec& part : row.part) part = Vec::zero();
      }
    }
    Row<kPanels> total() const {
      Row<kPanels> x;
      for (int p = 0; p < Row<kPanels>::kVecs; ++p) {
        x.part[p] = (rows[0].part[p] + rows[1].part[p]) + (rows[2].part[p] + rows[3].part[p]);
      }
      return x;
    }
  };

  // fn(row, the sum it belongs to) over the rows of a panel.
  template <typename F>
  static __attribute__((always_inline)) inline void for_panel_rows(int64_t key_dim, F fn) {
    int64_t i = 0;
    for (; i + kRows <= key_dim; i += kRows) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) fn(i + r, r);
    }
    for (; i < key_dim; ++i) fn(i, 0);
  }

  // sums += S^T x. `ahead`: panels to fetch meanwhile, or null; past the last one that touches nothing.
  template <int kPanels>
  static __attribute__((always_inline)) inline void weigh(int64_t key_dim, const float* panel, const float* x,
                                                          const float* ahead, Sums<kPanels>& sums) {
    const int64_t apart = key_dim * kPanelWidth;
    for_panel_rows(
        key_dim, [&](int64_t i, int r) __attribute__((always_inline)) {
          if (ahead != nullptr) {
            for (int n = 0; n < kPanels; ++n) __builtin_prefetch(ahead + n * apart + i * kPanelWidth, 0, 3);
          }
          const Vec factor = Vec::all(x[i]);
#pragma GCC unroll 4
          for (int p = 0; p < Row<kPanels>::kVecs; ++p) {
            const float* at = panel + i * kPanelWidth + Row<kPanels>::offset(p, apart);
            sums.rows[r].part[p] = fma(factor, Vec::load(at), sums.rows[r].part[p]);
          }
        });
  }

  // to = S x fade + key change^T, with `from` (null: zero) as S, kept where that is wanted; meanwhile out_sums +=
  // to^T query and, where asked for, next_sums += to^T next_key.
  template <bool kNext, bool kKeep, int kPanels>
  static __attribute__((always_inline)) inline void advance(int64_t key_dim, const float* from, Vec fade,
                                                            const float* key, const Row<kPanels>& change, float* to,
                                                            const float* query, Sums<kPanels>& out_sums,
                                                            const float* next_key, Sums<kPanels>& next_sums) {
    const int64_t apart = key_dim * kPanelWidth;
    for_panel_rows(
        key_dim, [&](int64_t i, int r) __attribute__((always_inline)) {
          const Vec by_key = Vec::all(key[i]), by_query = Vec::all(query[i]);
          const Vec by_next = kNext ? Vec::all(next_key[i]) : Vec::zero();
#pragma GCC unroll 4
          for (int p = 0; p < Row<kPanels>::kVecs; ++p) {
            const int64_t at = i * kPanelWidth + Row<kPanels>::offset(p, apart);
            const Vec old = from != nullptr ? Vec::load(from + at) * fade : Vec::zero();
            const Vec next = fma(by_key, change.part[p], old);
            if (kKeep) next.store(to + at);
            out_sums.rows[r].part[p] = fma(by_query, next, out_sums.rows[r].part[p]);
            if (kNext) next_sums.rows[r].part[p] = fma(by_next, next, next_sums.rows[r].part[p]);
          }
        });
  }

  // to = panels with kUpdates updates, `rows`, in one pass; where asked for, sums += to^T x meanwhile. `to` may be
  // `from`.
  template <int kUpdates, bool kWeigh, int kPanels>
  static __attribute__((always_inline)) inline void replay_some(int64_t key_dim, int64_t stride, const float* rows,
                                                                int64_t column, const float* from, float* to,
                                                                const float* x, const float* ahead,
                                                                Sums<kPanels>& sums) {
    const int64_t apart = key_dim * kPanelWidth;
    Row<kPanels> changes[kUpdates];
    Vec fades[kUpdates];
    for (int u = 0; u < kUpdates; ++u) {
      changes[u] = Row<kPanels>::load(rows + u * stride + key_dim, column, column + kPanels * kPanelWidth);
      fades[u] = Vec::all(rows[(u + 1) * stride - 1]);
    }
    for_panel_rows(
        key_dim, [&](int64_t i, int r) __attribute__((always_inline)) {
          if (ahead != nullptr) {
            for (int n = 0; n < kPanels; ++n) __builtin_prefetch(ahead + n * apart + i * kPanelWidth, 0, 3);
          }
#pragma GCC unroll 4
          for (int p = 0; p < Row<kPanels>::kVecs; ++p) {
            const int64_t at = i * kPanelWidth + Row<kPanels>::offset(p, apart);
            Vec state = Vec::load(from + at);
#pragma GCC unroll 4
            for (int u = 0; u < kUpdates; ++u) {
              state = fma(Vec::all(rows[u * stride + i]), changes[u].part[p], state * fades[u]);
            }
            state.store(to + at);
            if (kWeigh) sums.rows[r].part[p] = fma(Vec::all(x[i]), state, sums.rows[r].part[p]);
          }
        });
  }

  static constexpr int kReplayed = 3;  // updates in one pass
  template <bool kWeigh, int kPanels>
  static void replay_panels(int64_t updates, int64_t key_dim, int64_t value_dim, const float* rows, int64_t column,
                            const float* from, float* to, const float* x, const float* ahead, Sums<kPanels>& sums) {
    const int64_t stride = update_floats(key_dim, value_dim);
    for (; updates > kReplayed; updates -= kReplayed, rows += kReplayed * stride, from = to, ahead = nullptr) {
      replay_some<kReplayed, false>(key_dim, stride, rows, column, from, to, x, ahead, sums);
    }
    if (updates == 3) return replay_some<3, kWeigh>(key_dim, stride, rows, column, from, to, x, ahead, sums);
    if (updates == 2) return replay_some<2, kWeigh>(key_dim, stride, rows, column, from, to, x, ahead, sums);
    replay_some<1, kWeigh>(key_dim, stride, rows, column, from, to, x, ahead, sums);
  }

  static void replay(int64_t updates, int64_t key_dim, int64_t value_dim, const float* rows, const float* state_in,
                     float* state_out) {
    Sums<1> none;
    for (int64_t column = 0; updates > 0 && column < value_dim; column += kPanelWidth) {
      replay_panels<false>(updates, key_dim, value_dim, rows, column, state_in, state_out, nullptr, nullptr, none);
      state_in += key_dim * kPanelWidth;
      state_out += key_dim * kPanelWidth;
    }
  }

  // The panels from `column` on. One pass for m = S^T k of the first token (with the updates that S lacks), then for
  // each token one that decays and changes them, sums o = S^T q and, where registers allow, the next token's m. They
  // come from memory in the first pass and stay in L1 for the others, so the state moves once each way, however many
  // tokens there are.
  template <int kPanels>
  static void recur_panels(const DeltaRows& w, int64_t column) {
    // Sums for two products fit the registers where a panel is one vector.
    constexpr bool kBothSums = kPanelVecs == 1;
    constexpr int64_t kColumns = kPanels * kPanelWidth;
    const int64_t key_dim = w.key_dim;
    const int64_t update_stride = update_floats(key_dim, w.value_dim);
    const float* from = w.state_in != nullptr ? w.state_in + column * key_dim : nullptr;
    Sums<kPanels> seen;
    if (from != nullptr) {
      const float* ahead = from + kColumns * key_dim;
      if (w.updates > 0) {
        replay_panels<true>(w.updates, key_dim, w.value_dim, w.updates_in, column, from, w.scratch, w.k, ahead, seen);
        from = w.scratch;
      } else {
        weigh(key_dim, from, w.k, ahead, seen);
      }
    }
    for (int64_t t = 0; t < w.tokens; ++t) {
      const float* key = w.k + t * w.stride;
      const float* query = w.q + t * w.stride;
      const Vec fade = Vec::all(w.decay[t * w.gate_stride]);
      const Vec rate = Vec::all(w.beta[t * w.gate_stride]);
      const Row<kPanels> sum = seen.total();
      Row<kPanels> change = Row<kPanels>::load(w.v + t * w.stride, column, w.value_dim);
      for (int p = 0; p < Row<kPanels>::kVecs; ++p) {
        change.part[p] = rate * fnma(fade, sum.part[p], change.part[p]);
      }
      const bool put_off = w.updates_out != nullptr && t > 0;
      if (put_off) {
        change.store(w.updates_out + (t - 1) * update_stride + key_dim, column, column + kColumns);
      }
      float* to = put_off ? w.scratch : w.state_out + column * key_dim;
      Sums<kPanels> made;
      seen = Sums<kPanels>();
      if (t + 1 == w.tokens) {
        if (put_off) {
          advance<false, false>(key_dim, from, fade, key, change, to, query, made, nullptr, seen);
        } else {
          advance<false, true>(key_dim, from, fade, key, change, to, query, made, nullptr, seen);
        }
      } else if constexpr (kBothSums) {
        advance<true, true>(key_dim, from, fade, key, change, to, query, made, key + w.stride, seen);
      } else {
        advance<false, true>(key_dim, from, fade, key, change, to, query, made, nullptr, seen);
        weigh(key_dim, to, key + w.stride, nullptr, seen);
      }
      made.total().store(w.out + t * w.out_stride, column, w.value_dim);
      from = to;
    }
  }

  static void recur(const DeltaRows& w) {
    const int64_t key_dim = w.key_dim;
    const int64_t update_stride = update_floats(key_dim, w.value_dim);
    for (int64_t t = 1; w.updates_out != nullptr && t < w.tokens; ++t) {
      float* row = w.updates_out + (t - 1) * update_stride;
      for (int64_t i = 0; i < key_dim; ++i) row[i] = w.k[t * w.stride + i];
      row[update_stride - 1] = w.decay[t * w.gate_stride];
    }
    int64_t column = 0;
    // Two panels at once share what is read of keys and queries.
    if constexpr (kPanelVecs == 1) {
      for (; w.tokens > 2 && column + kPanelWidth < w.value_dim; column += 2 * kPanelWidth) recur_panels<2>(w, column);
    }
    for (; column < w.value_dim; column += kPanelWidth) recur_panels<1>(w, column);
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
        row.store(change + p * block_floats + i * kPanelWidth, 0, kPanelWidth);
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
          Panel row = Panel::load(d + i * kPanelWidth, 0, kPanelWidth);
          for (int64_t j = first; j < i; ++j) {
            const Vec a = Vec::all(solve[i * kChunk + j]);
            for (int s = 0; s < kPanelVecs; ++s) {
              row.part[s] = fma(a, Vec::load(d + j * kPanelWidth + s * kLanes), row.part[s]);
            }
          }
          row.store(d + i * kPanelWidth, 0, kPanelWidth);
        }
      }
    }

    for (int64_t p = 0; p < panels; ++p) {
      float* o = result + p * block_floats;
      product(tokens, tokens, true, scores, kChunk, change + p * block_floats, kPanelWidth,
              state_in != nullptr ? o : nullptr, 1.0f, o, kPanelWidth);
      for (int64_t i = 0; i < tokens; ++i) {
        Panel::load(o + i * kPanelWidth, 0, kPanelWidth).store(out + i * out_stride, p * kPanelWidth, value_dim);
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
    return {.convolve = convolve, .recur = recur, .chunk = chunk, .replay = replay, .gated_norm = gated_norm};
  }
};

}  // namespace
}  // namespace fourfold::cpu
