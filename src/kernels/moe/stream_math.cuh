// The multiplication of the streaming kernels: what one warp does with its units of one stage.
#pragma once

#include "kernels/moe/dequant.cuh"
#include "kernels/moe/stream_shape.h"

namespace fourfold::moe::stream_detail {

using namespace ptx;

inline constexpr u32 kUnwritten = 0xffffffffu;  // a word between overlapping kernels that is not there yet (OneTurn)

// acc += weights x token rows over units first, first + 1, ... of a stage, KU / WU of them but none from `left` on.
// `weights`: shared address of the warp's first row tile; `row`: of this lane's row for ldmatrix, lanes 0-7 at K 0..7
// of a block, 8-15 at 8..15, 16-31 the same of the next block. Where there are two sets of accumulators,
// multiplications alternate between them, so that they do not wait for each other. `Whole`: all units are there.
// The stage is given back by `release`, as soon as its words are in registers.
template <typename Tile, int NT, int Sets, bool Whole, typename Release>
__device__ __forceinline__ void multiply_units(float (&acc)[Sets][StreamShape<Tile>::mt][NT][4], u32 weights, u32 row,
                                               int first, int left, int lane, u32 scale_base, const Release& release) {
  using T = StreamShape<Tile>;
  constexpr u32 kRowStride = T::kRowStride;
#pragma unroll
  for (int uu = 0; uu < T::ku / T::wu; ++uu) {
    const int u = first + uu;
    if (!Whole && u >= left) break;
    u32 x[NT][2][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const u32 at = row + static_cast<u32>(n) * (8u * kRowStride) + static_cast<u32>(u) * (kUnitK * 2);
      load_matrix4(x[n][0], at);
      load_matrix4(x[n][1], at + 64u);
    }
    Vec4 codes[T::mt];
    Vec2 scales[T::mt];
    const auto load = [&](int m) {
      const u32 unit = weights + static_cast<u32>(m) * (T::ku * kUnitBytes) + static_cast<u32>(u) * kUnitBytes;
      codes[m] = load_shared4(unit + static_cast<u32>(lane) * 16u);
      scales[m] = load_shared2(unit + kUnitCodeBytes + static_cast<u32>(lane / 4) * 8u);
    };
    const bool last = Whole && uu == T::ku / T::wu - 1;
    if (last) {
#pragma unroll
      for (int m = 0; m < T::mt; ++m) load(m);
      release();
    }
#pragma unroll
    for (int m = 0; m < T::mt; ++m) {
      if (!last) load(m);
      const Vec2 scale = scales[m];
      const u32 words[4] = {codes[m].x, codes[m].y, codes[m].z, codes[m].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 a[4];
        dequantise(words[i], scale_pair(i < 2 ? scale.x : scale.y, i % 2 != 0, scale_base), a);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma_m16n8k16(acc[i % Sets][m][n], a, x[n][i / 2][(i % 2) * 2], x[n][i / 2][(i % 2) * 2 + 1]);
        }
      }
    }
  }
  if (!Whole) release();
}

// One token: the columns of the multiplication stand for the 16-element blocks of K instead, eight blocks to two units,
// so that codes are multiplied as they are and each block's sum by its scale afterwards: two instructions for each
// block of a row rather than four for each eight weights.
//
// x[p] is what this lane has of the row for units first + 2p and first + 2p + 1, in K block g = lane / 4 of these
// eight: elements 2l, 2l + 1 and 2l + 8, 2l + 9, where l = lane % 4; times 2^80. Even and odd blocks have accumulators
// of their own, so that column g may hold its row in the multiplication of block g ^ 1 too: what comes of it lands
// where nobody looks. masks[q]: all ones in lanes of blocks 2q and 2q + 1. sum[m][h] += this lane's columns of row g +
// 8 h, times 2^-20 x kOneTokenScale, for row tiles m < Tiles. `Whole`: all units are there; then nothing branches, and
// the compiler may load ahead of the multiplications.
template <typename Tile, bool Whole, int Tiles = StreamShape<Tile>::mt>
__device__ __forceinline__ void multiply_one(float (&sum)[StreamShape<Tile>::mt][2], u32 weights,
                                             const u32 (&x)[StreamShape<Tile>::pairs][2], const u32 (&masks)[4],
                                             int first, int left, int lane, u32 scale_base) {
  using T = StreamShape<Tile>;
  constexpr int kUnits = T::ku / T::wu;
  const int g = lane / 4;
  const int l = lane % 4;
#pragma unroll
  for (int uu = 0; uu < kUnits; uu += 2) {
    const int u = first + uu;
    if (!Whole && u >= left) break;
    const bool both = uu + 1 < kUnits && (Whole || u + 1 < left);
    float acc[2][Tiles][4] = {};  // even, odd blocks
#pragma unroll
    for (int h = 0; h < (kUnits > 1 ? 2 : 1); ++h) {
      if (h == 1 && !both) break;
      u32 b[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = x[uu / 2][i % 2] & masks[2 * h + i / 2];
#pragma unroll
      for (int m = 0; m < Tiles; ++m) {
        const Vec4 codes = load_shared4(weights + static_cast<u32>(m) * (T::ku * kUnitBytes) +
                                        static_cast<u32>(u + h) * kUnitBytes + static_cast<u32>(lane) * 16u);
        const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 a[4];
          place_codes(words[i], a);
          mma_m16n8k16(acc[i % 2][m], a, b[i / 2][0], b[i / 2][1]);
        }
      }
    }
    // Columns 2l and 2l + 1: two blocks of unit l / 2, whose scales are one word.
    const u32 scales = weights + kUnitCodeBytes + static_cast<u32>(u + (both ? l / 2 : 0)) * kUnitBytes +
                       static_cast<u32>(g) * 8u + static_cast<u32>(l % 2) * 4u;
#pragma unroll
    for (int m = 0; m < Tiles; ++m) {
      const u32 word = load_shared1(scales + static_cast<u32>(m) * (T::ku * kUnitBytes));
      const u32 even = scale_pair(word, false, scale_base);
      const u32 odd = scale_pair(word, true, scale_base);
      sum[m][0] += acc[0][m][0] * __uint_as_float(even << 16);
      sum[m][0] += acc[1][m][1] * __uint_as_float(odd << 16);
      sum[m][1] += acc[0][m][2] * __uint_as_float(even & 0xffff0000u);
      sum[m][1] += acc[1][m][3] * __uint_as_float(odd & 0xffff0000u);
    }
  }
}

// h of one (gate, up) pair of sums, or of one sum where there is no gate.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  if (limit > 0.0f) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.4426950408889634f)) * up;
}
__device__ __forceinline__ float relu2(float x) { return x < 0.0f ? 0.0f : x * x; }  // keeps NaN

}  // namespace fourfold::moe::stream_detail
