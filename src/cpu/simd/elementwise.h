// Elementwise kernels and small matrix products over a vocabulary V; simd/avx2.h says why all of it is unnamed.
#pragma once

#include <cstdint>

#include "cpu/host/row_kernels.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"

namespace fourfold::cpu {
namespace {

template <class V>
struct Elementwise {
  using Vec = Vector<V>;
  static constexpr int64_t kLanes = V::kLanes;

  static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  static inline float exp_one(float x) {
    float lanes[kLanes];
    exp(Vec::all(x)).store(lanes);
    return lanes[0];
  }

  // fn(i, vec) for whole vectors of [0, n), then once more on a zero-padded copy of the rest. `fn` returns what is
  // stored.
  template <typename F>
  static inline void transform(float* x, int64_t n, F fn) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) fn(i, Vec::load(x + i)).store(x + i);
    if (i < n) {
      float rest[kLanes] = {};
      for (int64_t j = i; j < n; ++j) rest[j - i] = x[j];
      fn(i, Vec::load(rest)).store(rest);
      for (int64_t j = i; j < n; ++j) x[j] = rest[j - i];
    }
  }

  // kLanes values of p from i on, zero beyond n.
  static inline Vec load_padded(const float* p, int64_t i, int64_t n) {
    if (i + kLanes <= n) return Vec::load(p + i);
    float rest[kLanes] = {};
    for (int64_t j = i; j < n; ++j) rest[j - i] = p[j];
    return Vec::load(rest);
  }

  static inline void store_padded(Vec x, float* p, int64_t i, int64_t n) {
    if (i + kLanes <= n) {
      x.store(p + i);
      return;
    }
    float rest[kLanes];
    x.store(rest);
    for (int64_t j = i; j < n; ++j) p[j] = rest[j - i];
  }

  // Four running sums: a row of 2048 has 16 to 64 additions in each lane.
  static inline float sum_of_squares(const float* x, int64_t n) {
    Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
      for (int64_t j = 0; j < 4; ++j) {
        const Vec y = Vec::load(x + i + j * kLanes);
        sums[j] = fma(y, y, sums[j]);
      }
    }
    for (; i < n; i += kLanes) {
      const Vec y = load_padded(x, i, n);
      sums[0] = fma(y, y, sums[0]);
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
  }

  static inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

  static void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    const Vec factor = Vec::all(inverse_root(sum_of_squares(x, n) / static_cast<float>(n) + eps));
    for (int64_t i = 0; i < n; i += kLanes) {
      store_padded(load_padded(x, i, n) * factor * load_padded(weight, i, n), out, i, n);
    }
  }

  static void add(float* x, const float* delta, int64_t n) {
    transform(x, n, [&](int64_t i, Vec y) { return y + load_padded(delta, i, n); });
  }

  static void keep_f16(const float* x, int64_t n, void* to) {
    auto* out = static_cast<uint16_t*>(to);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Vec::load(x + i).store_f16(out + i);
    if (i < n) {
      uint16_t rest[kLanes];
      load_padded(x, i, n).store_f16(rest);
      for (int64_t j = i; j < n; ++j) out[j] = rest[j - i];
    }
  }

  static void apply_gate(float* x, const float* gate, int64_t n) {
    transform(x, n,
              [&](int64_t i, Vec y) { return y / (Vec::all(1.0f) + exp(Vec::zero() - load_padded(gate, i, n))); });
  }

  // ---- small matrix products on panels of 16 columns

  static constexpr int64_t kPanelWidth = 16;
  static constexpr int kPanelVecs = static_cast<int>(kPanelWidth / kLanes);

  // c[r][0..16) = scale c_in[r][0..16) (or zero) + sum_i a[r][i] b[i][0..16) for kRows rows. A function of its own, so
  // that nothing but the tile competes for registers.
  template <int kRows>
  static __attribute__((noinline)) void product_tile(int64_t depth, const float* a, int64_t lda, const float* b,
                                                     int64_t ldb, const float* c_in, float scale, float* c,
                                                     int64_t ldc) {
    Vec sums[kRows][kPanelVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanelVecs; ++p) {
        sums[r][p] = c_in != nullptr ? Vec::load(c_in + r * ldc + p * kLanes) * Vec::all(scale) : Vec::zero();
      }
    }
    for (int64_t i = 0; i < depth; ++i) {
      Vec part[kPanelVecs];
      for (int p = 0; p < kPanelVecs; ++p) part[p] = Vec::load(b + i * ldb + p * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec factor = Vec::all(a[r * lda + i]);
        for (int p = 0; p < kPanelVecs; ++p) sums[r][p] = fma(factor, part[p], sums[r][p]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanelVecs; ++p) sums[r][p].store(c + r * ldc + p * kLanes);
    }
  }

  // `rows` rows; `triangular`: row r of a is zero from column r + 1 on, so the depth ends there.
  static inline void product(int64_t rows, int64_t depth, bool triangular, const float* a, int64_t lda, const float* b,
                             int64_t ldb, const float* c_in, float scale, float* c, int64_t ldc) {
    constexpr int kRows = kLanes == 16 ? 12 : 6;  // sums of a tile: 12 vectors
    int64_t r = 0;
    const auto step = [&](auto tile, int count) {
      const int64_t to = triangular ? least(depth, r + count) : depth;
      tile(to, a + r * lda, lda, b, ldb, c_in != nullptr ? c_in + r * ldc : nullptr, scale, c + r * ldc, ldc);
      r += count;
    };
    while (r < rows) {
      const int64_t left = rows - r;
      // A rest of one or two rows would wait for its multiply-adds; two tiles of four do not.
      if (left >= kRows && left != kRows + 1 && left != kRows + 2) {
        step(product_tile<kRows>, kRows);
      } else if (kRows > 8 && left >= 8) {
        step(product_tile<8>, 8);
      } else if (left >= 4) {
        step(product_tile<4>, 4);
      } else if (left == 3) {
        step(product_tile<3>, 3);
      } else if (left == 2) {
        step(product_tile<2>, 2);
      } else {
        step(product_tile<1>, 1);
      }
    }
  }

  static constexpr RowKernels row_kernels() { return {.rms_norm = rms_norm, .add = add, .keep = keep_f16}; }
};

}  // namespace
}  // namespace fourfold::cpu
