// What a card can do at most, for fractions: a plain read, and bare loops of matrix instructions. And data to measure
// with: random weights, scales and rows (zeros would be faster than real data).
#pragma once

#include "kernels/ptx/sm90.cuh"
#include "nvfp4/number.h"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "kernels/ptx/wgmma_sm90.cuh"
#endif

namespace fourfold::bench {

using ptx::u16;
using ptx::u32;
using ptx::u64;
using ptx::u8;

__device__ __forceinline__ u32 hash32(u64 x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<u32>(x ^ (x >> 32));
}

// Random words: e2m1 codes. Any grid of 256 threads, as the next two.
__global__ void __launch_bounds__(256) fill_codes(u32* words, u64 count, u64 seed) {
  for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) words[i] = hash32(seed + i);
}

// e4m3 block scales of 0.5 to 1.875.
__global__ void __launch_bounds__(256) fill_scales(u8* scales, u64 count, u64 seed) {
  for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
    scales[i] = static_cast<u8>(0x30u + (hash32(seed + i) & 15u));
  }
}

// bf16 values of unit variance: sums of four uniforms.
__global__ void __launch_bounds__(256) fill_rows(u16* rows, u64 count, u64 seed) {
  for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
    float sum = -2.0f;
    for (u64 j = 0; j < 4; ++j) {
      sum += static_cast<float>(hash32(seed + 4 * i + j) >> 8) * (1.0f / 16777216.0f);
    }
    rows[i] = nvfp4::float_to_bf16(sum * 1.7320508f);
  }
}

// Reads `count` 16-byte words once; 512 threads.
__global__ void __launch_bounds__(512) read_all(const uint4* __restrict__ data, u64 count, u32* sink) {
  u32 sum = 0;
  const u64 step = gridDim.x * 512ull;
  u64 i = blockIdx.x * 512ull + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + step), c = __ldcs(data + i + 2 * step),
                d = __ldcs(data + i + 3 * step);
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  if (sum == 0x12345678u) *sink = sum;  // the loads must not be optimised away
}

__device__ __forceinline__ u32 random_pair(u64 seed) {
  return nvfp4::float_to_bf16(static_cast<float>(hash32(2 * seed) >> 8) * (1.0f / 8388608.0f) - 1.0f) |
         static_cast<u32>(
             nvfp4::float_to_bf16(static_cast<float>(hash32(2 * seed + 1) >> 8) * (1.0f / 8388608.0f) - 1.0f))
             << 16;
}

// Each warp: `rounds` times 8 independent mma.sync m16n8k16. 256 threads. 8 x 4096 flops per warp and round.
__global__ void __launch_bounds__(256) matrix_mma(int rounds, float* sink) {
  float d[8][4] = {};
  u32 a[4];
  for (int i = 0; i < 4; ++i) a[i] = random_pair(blockIdx.x * 4096ull + threadIdx.x * 8ull + i);
  const u32 b0 = random_pair(threadIdx.x * 8ull + 5), b1 = random_pair(threadIdx.x * 8ull + 6);
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::mma_m16n8k16(d[i], a, b0, b1);
  }
  float sum = 0.0f;
  for (int i = 0; i < 8; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
  if (sum == 12345.678f) *sink = sum;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr int kMatrixN = 128;
inline constexpr unsigned kMatrixBytes = kMatrixN * 128;

// Each of three warpgroups: `rounds` times 4 wgmma m64n128k16, A from registers. 384 threads, kMatrixBytes of shared
// memory. 4 x 2 x 64 x 128 x 16 flops per warpgroup and round.
__global__ void __launch_bounds__(384, 1) matrix_wgmma(int rounds, float* sink) {
  FOURFOLD_DYNAMIC_SHARED(smem);
  for (u32 i = threadIdx.x; i < kMatrixBytes / 4; i += blockDim.x) reinterpret_cast<u32*>(smem)[i] = random_pair(i);
  ptx::fence_async_shared();
  __syncthreads();
  u32 a[4];
  for (int i = 0; i < 4; ++i) a[i] = random_pair(blockIdx.x * 4096ull + threadIdx.x * 8ull + i);
  const u64 rows = ptx::swizzled_descriptor(ptx::shared_address(smem));
  float d[kMatrixN / 2];
  ptx::wgmma_fence();
  ptx::Wgmma<kMatrixN>::set(d, a, rows);
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (u64 j = 0; j < 4; ++j) ptx::Wgmma<kMatrixN>::add(d, a, rows + 2 * j);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_wait<0>();
  float sum = 0.0f;
  for (const float v : d) sum += v;
  if (sum == 12345.678f) *sink = sum;
}
#endif

}  // namespace fourfold::bench
