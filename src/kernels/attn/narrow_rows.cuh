// New queries, keys and values of the attention kernel for up to 8 rows of scores (narrow.cuh): from the projection's
// rows to shared memory and to the cache.
#pragma once

#include "kernels/attn/narrow_tile.h"
#include "kernels/attn/rows.cuh"

namespace fourfold::attn::narrow_detail {

// Vectors of new rows, one by each eight lanes of a warp: norm, rotation, and where they go. Lane e of them has chunks
// e, e + 8, and so on of 8 dimensions.
template <typename Tile>
struct Vectors {
  static constexpr NarrowTile T = Tile::value;
  static constexpr int kEach = T.head_dim / 64;
  static constexpr int kApart = T.rotary_dim / 16;  // chunks between the two of a rotated pair
  float x[kEach][8];
  float weight[kEach][8];
  bool normed = false;

  __device__ __forceinline__ void take_norm(const float* norm, int lane) {
    normed = norm != nullptr;
    if (!normed) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float4* from = reinterpret_cast<const float4*>(norm) + (lane % 8 + 8 * i) * 2;
      const float4 low = from[0];
      const float4 high = from[1];
      const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) weight[i][j] = all[j];
    }
  }
  __device__ __forceinline__ void load(const u16* from, bool there, int lane) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const HeadVector v =
          unpack(there ? reinterpret_cast<const uint4*>(from)[lane % 8 + 8 * i] : make_uint4(0, 0, 0, 0));
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = v.x[j];
    }
  }
  // A whole warp.
  __device__ __forceinline__ void norm(float eps) {
    float square[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) square[j % 2] += x[i][j] * x[i][j];
    float all = square[0] + square[1];
#pragma unroll
    for (int d = 4; d > 0; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
    if (!normed) return;
    const float factor = rsqrtf(all / static_cast<float>(T.head_dim) + eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] *= factor * weight[i][j];
  }
  // `turns`: [rotary_dim / 2] of this row, in shared memory. A whole warp; those that do not rotate take part.
  __device__ __forceinline__ void rotate(const float2* turns, bool rotates, int lane) {
    if constexpr (kApart >= 8) {
      if (!rotates) return;
#pragma unroll
      for (int i = 0; i < kApart / 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 turn = turns[(lane % 8 + 8 * i) * 8 + j];
          const float low = x[i][j];
          const float high = x[i + kApart / 8][j];
          x[i][j] = low * turn.x - high * turn.y;
          x[i + kApart / 8][j] = high * turn.x + low * turn.y;
        }
    } else if constexpr (kApart > 0) {
      const int e = lane % 8;
      const float sign = e < kApart ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float other = __shfl_xor_sync(0xffffffffu, x[0][j], kApart);
        const float2 turn = turns[e % kApart * 8 + j];
        if (rotates && e < 2 * kApart) x[0][j] = x[0][j] * turn.x + sign * other * turn.y;
      }
    }
  }
  __device__ __forceinline__ void store_query(unsigned char* queries, int m, int lane) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto pair = [&](int j) {
        return T.fp8 ? ptx::to_f16x2(x[i][2 * j], x[i][2 * j + 1]) : ptx::to_bf16x2(x[i][2 * j], x[i][2 * j + 1]);
      };
      *reinterpret_cast<uint4*>(queries + query_place<T.head_dim / 8>(m, lane % 8 + 8 * i)) =
          make_uint4(pair(0), pair(1), pair(2), pair(3));
    }
  }
  // A key or a value: to shared memory, and to the cache. `out`: where its page begins for it, null: another part's
  // CTA writes it there; `inverse_scale`: e4m3.
  __device__ __forceinline__ void store_new(unsigned char* to, u8* out, int positions, int in_page, float inverse_scale,
                                            int lane) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int chunk = lane % 8 + 8 * i;
      if constexpr (T.fp8) {
        const auto code = [&](int j) {
          return ptx::to_e4m3x2(x[i][2 * j] * inverse_scale, x[i][2 * j + 1] * inverse_scale);
        };
        const uint2 words = make_uint2(code(0) | code(1) << 16, code(2) | code(3) << 16);
        reinterpret_cast<uint2*>(to)[chunk] = words;
        if (out != nullptr) {
          *reinterpret_cast<uint2*>(out + cache_place(T.row_bytes(), positions, in_page, chunk / 2) + chunk % 2 * 8) =
              words;
        }
      } else {
        const auto pair = [&](int j) { return ptx::to_bf16x2(x[i][2 * j], x[i][2 * j + 1]); };
        const uint4 words = make_uint4(pair(0), pair(1), pair(2), pair(3));
        reinterpret_cast<uint4*>(to)[chunk] = words;
        if (out != nullptr) {
          *reinterpret_cast<uint4*>(out + cache_place(T.row_bytes(), positions, in_page, chunk)) = words;
        }
      }
    }
  }
};

}  // namespace fourfold::attn::narrow_detail
