// What the Gated DeltaNet kernels have in common.
#pragma once

#include "kernels/gdn/tables.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gdn {

using ptx::u16;
using ptx::u32;
using ptx::u64;
using ptx::u8;

// Element i of rows in bf16 or fp32.
template <bool Float32>
__device__ __forceinline__ float element(const void* p, long long i) {
  if constexpr (Float32) {
    return static_cast<const float*>(p)[i];
  } else {
    return __uint_as_float(static_cast<u32>(static_cast<const u16*>(p)[i]) << 16);
  }
}
// The bits of an element, and their number.
template <bool Float32>
__device__ __forceinline__ u32 element_bits(const void* p, long long i) {
  if constexpr (Float32) {
    return static_cast<const u32*>(p)[i];
  } else {
    return static_cast<const u16*>(p)[i];
  }
}
template <bool Float32>
__device__ __forceinline__ float number_of(u32 bits) {
  return __uint_as_float(Float32 ? bits : bits << 16);
}
template <bool Float32>
__device__ __forceinline__ void store_bits(void* p, long long i, u32 bits) {
  if constexpr (Float32) {
    static_cast<u32*>(p)[i] = bits;
  } else {
    static_cast<u16*>(p)[i] = static_cast<u16>(bits);
  }
}
template <bool Float32>
__device__ __forceinline__ const void* element_at(const void* p, long long i) {
  return static_cast<const u8*>(p) + i * (Float32 ? 4 : 2);
}

__device__ __forceinline__ float silu(float x) {
  return x * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-1.4426950408889634f * x));
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// g = -exp(A_log) softplus(a + dt_bias), the logarithm of the decay.
__device__ __forceinline__ float log_decay(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias;
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return -expf(a_log) * softplus;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

}  // namespace fourfold::gdn
