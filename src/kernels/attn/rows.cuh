// A head's vector of a new row: norm, rotation, and what the cache holds of it. One warp a vector, 8 dimensions a lane;
// lanes beyond the head take part with zeros.
#pragma once

#include "kernels/attn/tables.h"
#include "kernels/ptx/fragments.cuh"
#include "kernels/ptx/sm90.cuh"
#include "nvfp4/number.h"

namespace fourfold::attn {

using ptx::u16;
using ptx::u32;
using ptx::u64;
using ptx::u8;
using ptx::Vec2;
using ptx::Vec4;

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kNobody = -1e30f;  // a score that is not there

// {cos, sin} of the rotation of dimension pair i at `position`. The angle is rounded to fp32 as in training, its cosine
// and sine are exact but for their own rounding.
__device__ __forceinline__ float2 rotation(float frequency, int position) {
  const float angle = static_cast<float>(position) * frequency;
  double turns = static_cast<double>(angle) * 0.31830988618379067154;  // half ones
  turns -= 2.0 * rint(turns * 0.5);
  float2 r;
  sincospif(static_cast<float>(turns), &r.y, &r.x);
  return r;
}

// Four e4m3 codes, in two of them each: fp16 of 2^-8 times their value, exactly (a NaN becomes 480 x 2^-8).
__device__ __forceinline__ u32 e4m3_pair(u32 codes, u32 selector) {
  const u32 high = __byte_perm(codes, 0u, selector);  // the codes in the high bytes of the halves
  return (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
}
inline constexpr u32 kPair01 = 0x1404;
inline constexpr u32 kPair23 = 0x3424;
inline constexpr u32 kPair02 = 0x2404;
inline constexpr u32 kPair13 = 0x3414;

struct HeadVector {
  float x[8];
};

// Eight bf16 values.
__device__ __forceinline__ HeadVector unpack(const uint4& words) {
  HeadVector v;
  const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v.x[2 * i] = __uint_as_float(w[i] << 16);
    v.x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
  return v;
}
template <int HeadDim>
__device__ __forceinline__ HeadVector load_vector(const u16* source, int lane) {
  return unpack(lane * 8 < HeadDim ? *reinterpret_cast<const uint4*>(source + lane * 8) : make_uint4(0, 0, 0, 0));
}

// The norm's weights of a lane's dimensions; `norm` may be null.
template <int HeadDim>
__device__ __forceinline__ HeadVector norm_weights(const float* norm, int lane) {
  HeadVector v = {};
  if (norm != nullptr && lane * 8 < HeadDim) {
    const float4 low = reinterpret_cast<const float4*>(norm)[lane * 2];
    const float4 high = reinterpret_cast<const float4*>(norm)[lane * 2 + 1];
    v = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
  return v;
}
// `turns`: [rotary_dim / 2] of this row, in shared memory.
template <int HeadDim, int RotaryDim>
__device__ __forceinline__ void norm_and_rotate(HeadVector& v, bool normed, const HeadVector& weights, float eps,
                                                const float2* turns, int lane) {
  constexpr u32 kAll = 0xffffffffu;
  if (normed) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) square += v.x[i] * v.x[i];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) square += __shfl_xor_sync(kAll, square, d);
    const float factor = rsqrtf(square / static_cast<float>(HeadDim) + eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] *= factor * weights.x[i];
  }
  if constexpr (RotaryDim > 0) {
    constexpr int kDistance = RotaryDim / 16;  // lanes between the two of a pair
    const bool second = lane >= kDistance;
    const int from = second ? lane - kDistance : lane + kDistance;
    const bool rotates = lane < 2 * kDistance;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_sync(kAll, v.x[i], from & 31);
      if (rotates) {
        const float2 turn = turns[(second ? lane - kDistance : lane) * 8 + i];
        v.x[i] = second ? v.x[i] * turn.x + other * turn.y : v.x[i] * turn.x - other * turn.y;
      }
    }
  }
}

template <int HeadDim, int RotaryDim>
__device__ __forceinline__ void norm_and_rotate(HeadVector& v, const float* norm, float eps, const float2* turns,
                                                int lane) {
  norm_and_rotate<HeadDim, RotaryDim>(v, norm != nullptr, norm_weights<HeadDim>(norm, lane), eps, turns, lane);
}

// Eight e4m3 codes of x / scale.
__device__ __forceinline__ Vec2 to_e4m3x8(const HeadVector& v, float inverse_scale) {
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[i] |= static_cast<u32>(nvfp4::float_to_e4m3(v.x[4 * i + j] * inverse_scale)) << (8 * j);
  }
  return {words[0], words[1]};
}
__device__ __forceinline__ uint4 to_bf16x8(const HeadVector& v) {
  return make_uint4(ptx::to_bf16x2(v.x[0], v.x[1]), ptx::to_bf16x2(v.x[2], v.x[3]), ptx::to_bf16x2(v.x[4], v.x[5]),
                    ptx::to_bf16x2(v.x[6], v.x[7]));
}

// Where 16-byte chunk `chunk` of query `row` is in shared memory.
template <int Chunks>
__device__ __forceinline__ u32 query_place(int row, int chunk) {
  return static_cast<u32>(row * Chunks + (chunk ^ (row & 7))) * 16u;
}

}  // namespace fourfold::attn
