// Test data, repack, reference and ceilings for the expert-layer bench. Plain kernels, written to be obviously right.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/moe/layout.h"
#include "nvfp4/number.h"

#define CUDA_CHECK(call)                                                                               \
  do {                                                                                                 \
    const cudaError_t status_ = (call);                                                                \
    if (status_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(1);                                                                                    \
    }                                                                                                  \
  } while (0)

namespace bench {

using fourfold::nvfp4::u16;
using fourfold::nvfp4::u32;
using fourfold::nvfp4::u8;

__host__ __device__ inline u32 hash32(unsigned long long x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return static_cast<u32>(x ^ (x >> 32));
}
__host__ __device__ inline float uniform(unsigned long long x) { return (hash32(x) >> 8) * (1.0f / 16777216.0f); }
// Sum of four uniforms, unit variance.
__host__ __device__ inline float normal(unsigned long long x) {
  const float s = uniform(4 * x) + uniform(4 * x + 1) + uniform(4 * x + 2) + uniform(4 * x + 3) - 2.0f;
  return s * 1.7320508f;
}

__global__ void fill_codes(u32* words, unsigned long long n, unsigned long long seed) {
  for (unsigned long long i = blockIdx.x * 256ULL + threadIdx.x; i < n; i += gridDim.x * 256ULL) {
    words[i] = hash32(seed + i);
  }
}
// adversarial: every e4m3 value (subnormals, zero, some negative); otherwise values near one.
__global__ void fill_scales(u8* scales, unsigned long long n, unsigned long long seed, bool adversarial) {
  for (unsigned long long i = blockIdx.x * 256ULL + threadIdx.x; i < n; i += gridDim.x * 256ULL) {
    const u32 h = hash32(seed + i);
    if (adversarial) {
      const u32 code = (h & 0xffffu) % 127u;
      scales[i] = static_cast<u8>(code | ((h >> 16) % 50u == 0 ? 0x80u : 0u));
    } else {
      scales[i] = static_cast<u8>(0x30u + (h & 15u));  // 0.5 .. 1.875
    }
  }
}
__global__ void fill_rows(u16* rows, unsigned long long n, unsigned long long seed) {
  for (unsigned long long i = blockIdx.x * 256ULL + threadIdx.x; i < n; i += gridDim.x * 256ULL) {
    rows[i] = fourfold::nvfp4::float_to_bf16(normal(seed + i));
  }
}
__global__ void fill_u32(u32* words, unsigned long long n, u32 value) {
  for (unsigned long long i = blockIdx.x * 256ULL + threadIdx.x; i < n; i += gridDim.x * 256ULL) words[i] = value;
}

// One thread per unit. first/second as in repack_unit; matrices of one expert lie one after the other.
__global__ void repack(const u8* first_codes, const u8* first_scales, const u8* second_codes, const u8* second_scales,
                       int source_rows, int k, bool pair, int row_tiles, unsigned long long units, u8* out, int* bad) {
  using namespace fourfold::moe;
  for (unsigned long long i = blockIdx.x * 128ULL + threadIdx.x; i < units; i += gridDim.x * 128ULL) {
    const int per_row = k / kUnitK;
    const int unit = static_cast<int>(i % per_row);
    const int tile = static_cast<int>(i / per_row % row_tiles);
    const unsigned long long expert = i / per_row / row_tiles;
    const unsigned long long codes = expert * source_rows * (k / 2);
    const unsigned long long scales = expert * source_rows * (k / 16);
    const SourceMatrix a{first_codes + codes, first_scales + scales, k / 2, k / 16};
    const SourceMatrix b{second_codes + codes, second_scales + scales, k / 2, k / 16};
    const int first_row = pair ? tile * 8 : tile * 16;
    if (!repack_unit(a, first_row, b, pair ? first_row : first_row + 8, unit, out + i * kUnitBytes)) *bad = 1;
  }
}

__device__ inline float weight_at(const u8* codes, const u8* scales, unsigned long long row, int k, int i) {
  const u8 pair = codes[row * (k / 2) + i / 2];
  return fourfold::nvfp4::nvfp4_product(i % 2 ? pair >> 4 : pair & 15, scales[row * (k / 16) + i / 16]);
}

// One warp per (sampled pick, row): h = silu(gate . x) * (up . x), or max(gate . x, 0)^2, fp32.
__global__ void reference_gate_up(const u8* gate, const u8* gate_scales, const u8* up, const u8* up_scales,
                                  const float* tensor_scales, const u16* x, const int* ids, const int* sample,
                                  int samples, int top_k, int experts, int hidden, int intermediate, bool relu2,
                                  float* h) {
  const long long warp = (blockIdx.x * 256LL + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (warp >= static_cast<long long>(samples) * top_k * intermediate) return;
  const int row = static_cast<int>(warp % intermediate);
  const int pick = static_cast<int>(warp / intermediate);
  const int token = sample[pick / top_k];
  const int expert = ids[token * top_k + pick % top_k];
  float g = 0.0f;
  float u = 0.0f;
  if (expert >= 0 && expert < experts) {
    const unsigned long long r = static_cast<unsigned long long>(expert) * intermediate + row;
    for (int i = lane; i < hidden; i += 32) {
      const float v = fourfold::nvfp4::bf16_to_float(x[static_cast<long long>(token) * hidden + i]);
      g += weight_at(gate, gate_scales, r, hidden, i) * v;
      u += weight_at(up, up_scales, r, hidden, i) * v;
    }
    for (int d = 16; d > 0; d /= 2) {
      g += __shfl_xor_sync(0xffffffffu, g, d);
      u += __shfl_xor_sync(0xffffffffu, u, d);
    }
    g *= tensor_scales[relu2 ? expert : expert * 2];
    if (!relu2) u *= tensor_scales[expert * 2 + 1];
  }
  if (lane != 0) return;
  const float positive = g < 0.0f ? 0.0f : g;
  h[static_cast<long long>(pick) * intermediate + row] = relu2 ? positive * positive : g / (1.0f + expf(-g)) * u;
}
// One warp per (sampled token, row): y = sum over choices of weight * (down . h), fp32.
__global__ void reference_down(const u8* down, const u8* down_scales, const float* tensor_scales, const float* h,
                               const int* ids, const float* router, const int* sample, int samples, int top_k,
                               int experts, int hidden, int intermediate, float* y) {
  const long long warp = (blockIdx.x * 256LL + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (warp >= static_cast<long long>(samples) * hidden) return;
  const int row = static_cast<int>(warp % hidden);
  const int s = static_cast<int>(warp / hidden);
  float sum = 0.0f;
  for (int k = 0; k < top_k; ++k) {
    const int expert = ids[sample[s] * top_k + k];
    if (expert < 0 || expert >= experts) continue;
    const unsigned long long r = static_cast<unsigned long long>(expert) * hidden + row;
    const float* hk = h + (static_cast<long long>(s) * top_k + k) * intermediate;
    float dot = 0.0f;
    for (int i = lane; i < intermediate; i += 32) dot += weight_at(down, down_scales, r, intermediate, i) * hk[i];
    for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, d);
    sum += dot * tensor_scales[expert] * router[sample[s] * top_k + k];
  }
  if (lane == 0) y[static_cast<long long>(s) * hidden + row] = sum;
}

// Ceiling: reads n 16-byte words once.
__global__ void __launch_bounds__(512) read_all(const uint4* data, unsigned long long n, u32* sink) {
  u32 acc = 0;
  const unsigned long long step = gridDim.x * 512ULL;
  unsigned long long i = blockIdx.x * 512ULL + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + step), c = __ldcs(data + i + 2 * step),
                d = __ldcs(data + i + 3 * step);
    acc ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  if (acc == 0x12345678u) *sink = acc;
}

}  // namespace bench
