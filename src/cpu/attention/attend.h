// The inner loops of attention over a vocabulary V; simd/avx2.h says why all of it is unnamed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/attention/kernels.h"
#include "cpu/simd/elementwise.h"

namespace fourfold::cpu {
namespace {

template <class V>
struct AttentionLoops : Elementwise<V> {
  using Base = Elementwise<V>;
  using Base::exp_one;
  using Base::kLanes;
  using Base::least;
  using Base::product;
  using typename Base::Vec;

  static void scale(const float* x, int64_t n, float factor, float* out) {
    for (int64_t i = 0; i < n; i += kLanes) (Vec::load(x + i) * Vec::all(factor)).store(out + i);
  }

  static constexpr int64_t kLineHalves = 32;  // f16 values in a line of the cache

  // The next block comes into L2: it is too large for L1, and lines on their way there would take the place of those
  // that are in use.
  static inline void fetch_line(const uint16_t* line) { __builtin_prefetch(line, 0, 2); }

  // Scores of kRows queries and kKeys keys. One vector of partial sums for each, the same order of additions whatever
  // the tile. `ahead`: kKeys rows to fetch meanwhile.
  template <int kRows, int kKeys, bool kAhead>
  static __attribute__((noinline)) void score_tile(const float* queries, int64_t padded_dim,
                                                   const uint16_t* const* keys, const uint16_t* const* ahead,
                                                   float* scores) {
    constexpr int kSteps = kLineHalves / kLanes;  // of a line
    Vec sums[kRows][kKeys];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; ++j) sums[r][j] = Vec::zero();
    }
    for (int64_t line = 0; line < padded_dim; line += kLineHalves) {
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        const int64_t g = line + step * kLanes;
        Vec key[kKeys];
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) {
          key[j] = Vec::load_f16(keys[j] + g);
          if (kAhead && j * kSteps / kKeys == step) fetch_line(ahead[j] + line);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec query = Vec::load(queries + g + r * padded_dim);
#pragma GCC unroll 8
          for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(query, key[j], sums[r][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; r += 4) {
        const auto row = [&](int i) { return r + i < kRows ? sums[r + i < kRows ? r + i : 0][j] : Vec::zero(); };
        float four[4];
        Vec::store_sums(four, row(0), row(1), row(2), row(3));
        constexpr int kMost = kRows < 4 ? kRows : 4;
        for (int i = 0; i < kMost; ++i) scores[(r + i) * kKeyBlock + j] = four[i];
      }
    }
  }

  // `ahead`: rows to fetch meanwhile, as many as there are keys at most.
  template <int kRows>
  static inline void score_rows(const float* queries, int64_t padded_dim, int64_t count, const uint16_t* const* keys,
                                int64_t ahead_count, const uint16_t* const* ahead, float* scores) {
    // Sums, keys and a query fit the registers, sixteen or thirty-two.
    constexpr int kKeys = kLanes == 16 ? (kRows == 1   ? 8
                                          : kRows == 2 ? 6
                                          : kRows <= 4 ? 4
                                                       : 2)
                                       : (kRows == 1   ? 4
                                          : kRows == 2 ? 3
                                                       : 2);
    int64_t j = 0;
    for (; j + kKeys <= least(count, ahead_count); j += kKeys) {
      score_tile<kRows, kKeys, true>(queries, padded_dim, keys + j, ahead + j, scores + j);
    }
    for (; j + kKeys <= count; j += kKeys) {
      score_tile<kRows, kKeys, false>(queries, padded_dim, keys + j, nullptr, scores + j);
    }
    for (; j < count; ++j) score_tile<kRows, 1, false>(queries, padded_dim, keys + j, nullptr, scores + j);
  }

  // Scores of one row to weights e^(score - maximum), zero from `visible` to `count`; updates maximum and sum and
  // returns the factor for what was summed before.
  static inline float softmax_row(float* scores, int64_t visible, int64_t count, float& maximum, float& sum) {
    constexpr float kLowest = -__builtin_inff();
    const int64_t end = (visible + kLanes - 1) / kLanes * kLanes;  // at most kKeyBlock
    for (int64_t j = visible; j < end; ++j) scores[j] = kLowest;
    Vec largest = Vec::all(kLowest);
    for (int64_t j = 0; j < end; j += kLanes) largest = max(Vec::load(scores + j), largest);
    const float block = largest.largest();
    const float next = block > maximum ? block : maximum;
    // Without a finite score yet, nothing is there to rescale.
    const float factor = maximum == kLowest ? 0.0f : maximum == next ? 1.0f : exp_one(maximum - next);
    Vec total = Vec::zero();
    const Vec shift = Vec::all(next);
    for (int64_t j = 0; j < end; j += kLanes) {
      exp(Vec::load(scores + j) - shift).store(scores + j);
      if (j + kLanes > visible) {
        for (int64_t i = visible; i < end; ++i) scores[i] = 0.0f;
      }
      total = total + Vec::load(scores + j);
    }
    for (int64_t j = end; j < count; ++j) scores[j] = 0.0f;
    sum = sum * factor + total.sum();
    maximum = next;
    return factor;
  }

  // Scores, then weights, of kRows rows; what was summed before is scaled down where a larger score appears. The first
  // rows of a block (fetch) bring the next one's keys into cache.
  template <int kRows>
  static inline void weigh_rows(const AttendRows& rows, int64_t r, int64_t first, const KeyBlock& block,
                                const KeyBlock& next, float* scores) {
    const int64_t count = block.count;
    int64_t longest = 0;
    for (int i = 0; i < kRows; ++i) {
      const int64_t visible = rows.last_key[r + i] - first + 1;
      if (visible > longest) longest = visible;
    }
    longest = least(longest, count);
    scores += r * kKeyBlock;
    score_rows<kRows>(rows.queries + r * rows.padded_dim, rows.padded_dim, longest, block.keys, r == 0 ? next.count : 0,
                      next.keys, scores);
    for (int i = 0; i < kRows; ++i) {
      float* row = scores + i * kKeyBlock;
      const int64_t visible = least(count, rows.last_key[r + i] - first + 1);
      if (visible <= 0) {
        for (int64_t j = 0; j < count; ++j) row[j] = 0.0f;
        continue;
      }
      const float factor = softmax_row(row, visible, count, rows.maximum[r + i], rows.sum[r + i]);
      if (factor != 1.0f) {
        float* output = rows.output + (r + i) * rows.padded_dim;
        for (int64_t d = 0; d < rows.padded_dim; d += kLanes)
          (Vec::load(output + d) * Vec::all(factor)).store(output + d);
      }
    }
  }

  // Lines of the next block's values, one after the other.
  struct ValueLines {
    const KeyBlock& block;
    int64_t padded_dim;
    int64_t row = 0;
    int64_t at = 0;
    void fetch_one() {
      if (row >= block.count) return;
      fetch_line(block.values[row] + at);
      at += kLineHalves;
      if (at == padded_dim) {
        at = 0;
        ++row;
      }
    }
  };

  static constexpr int kFewRows = kLanes == 16 ? 8 : 4;  // whose sums of 32 or 16 dimensions fit the registers

  // Adds weights times values to kRows rows. The values are read from the cache for each tile of rows: with few of them
  // that is less work than making panels.
  template <int kRows>
  static inline void add_values(const AttendRows& rows, int64_t r, const KeyBlock& block, ValueLines& next,
                                const float* scores) {
    constexpr int64_t kWidth = 2 * kLanes;
    const float* weights = scores + r * kKeyBlock;
    for (int64_t g = 0; g < rows.padded_dim; g += kWidth) {
      float* output = rows.output + r * rows.padded_dim + g;
      Vec sums[kRows][2];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        sums[i][0] = Vec::load(output + i * rows.padded_dim);
        sums[i][1] = Vec::load(output + i * rows.padded_dim + kLanes);
      }
      for (int64_t j = 0; j < block.count; ++j) {
        const uint16_t* value = block.values[j] + g;
        const Vec low = Vec::load_f16(value), high = Vec::load_f16(value + kLanes);
        if (r == 0 && (g & (kLineHalves - 1)) == 0) next.fetch_one();
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const Vec weight = Vec::all(weights[i * kKeyBlock + j]);
          sums[i][0] = fma(weight, low, sums[i][0]);
          sums[i][1] = fma(weight, high, sums[i][1]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        sums[i][0].store(output + i * rows.padded_dim);
        sums[i][1].store(output + i * rows.padded_dim + kLanes);
      }
    }
  }

  // fn(integral constant of the rows of a tile, its first row), from the largest tiles on.
  template <typename F>
  static inline void for_row_tiles(int64_t rows, F fn) {
    int64_t r = 0;
    for (; r + kFewRows <= rows; r += kFewRows) fn(std::integral_constant<int, kFewRows>{}, r);
    if (kFewRows > 4 && r + 4 <= rows) {
      fn(std::integral_constant<int, 4>{}, r);
      r += 4;
    }
    if (rows - r == 3) fn(std::integral_constant<int, 3>{}, r);
    if (rows - r == 2) fn(std::integral_constant<int, 2>{}, r);
    if (rows - r == 1) fn(std::integral_constant<int, 1>{}, r);
  }

  static void attend_block(const AttendRows& rows, int64_t first, const KeyBlock& block, const KeyBlock& next,
                           float* scores) {
    for_row_tiles(rows.rows, [&](auto tile, int64_t r) {
      weigh_rows<decltype(tile)::value>(rows, r, first, block, next, scores);
    });

    ValueLines lines{next, rows.padded_dim};
    if (rows.rows <= 8) {
      for_row_tiles(rows.rows,
                    [&](auto tile, int64_t r) { add_values<decltype(tile)::value>(rows, r, block, lines, scores); });
      return;
    }
    // Weights times values, 32 dimensions at a time: the values become two fp32 panels of 16 in L1.
    float panels[kKeyBlock * 32];
    for (int64_t g = 0; g < rows.padded_dim; g += 32) {
      for (int64_t j = 0; j < block.count; ++j) {
        lines.fetch_one();
        for (int64_t h = 0; h < 32; h += kLanes) {
          Vec::load_f16(block.values[j] + g + h).store(panels + (h / 16 * kKeyBlock + j) * 16 + h % 16);
        }
      }
      for (int64_t half = 0; half < 2; ++half) {
        float* output = rows.output + g + 16 * half;
        product(rows.rows, block.count, false, scores, kKeyBlock, panels + half * kKeyBlock * 16, 16, output, 1.0f,
                output, rows.padded_dim);
      }
    }
  }

  static void merge_row(int64_t padded_dim, const float* output, float maximum, float sum, float* into_output,
                        float* into_maximum, float* into_sum) {
    constexpr float kLowest = -__builtin_inff();
    if (maximum == kLowest && sum == 0.0f) return;  // saw no key
    const float next = maximum > *into_maximum ? maximum : *into_maximum;
    const float old_factor = *into_maximum == kLowest ? 0.0f
                             : *into_maximum == next  ? 1.0f
                                                      : exp_one(*into_maximum - next);
    const float new_factor = maximum == next ? 1.0f : exp_one(maximum - next);
    const Vec a = Vec::all(old_factor);
    const Vec b = Vec::all(new_factor);
    for (int64_t i = 0; i < padded_dim; i += kLanes) {
      fma(Vec::load(output + i), b, Vec::load(into_output + i) * a).store(into_output + i);
    }
    *into_sum = *into_sum * old_factor + sum * new_factor;
    *into_maximum = next;
  }

  static constexpr AttentionKernels attention_kernels() {
    return {.scale = scale, .attend_block = attend_block, .merge_row = merge_row, .gate = Base::apply_gate};
  }
};

}  // namespace
}  // namespace fourfold::cpu
