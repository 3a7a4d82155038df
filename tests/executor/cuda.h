// The part of CUDA C++ that the kernels use, for a host compiler. Threads are fibers of the executor.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "executor/executor.h"

#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// Static shared variables: the program's only thread-local storage, which the executor knows as one range.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Of the thread that runs; set at every switch.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  n &= 31u;
  return n == 0 ? high : (high << n) | (low >> (32u - n));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  n &= 31u;
  return n == 0 ? low : (low >> n) | (high << (32u - n));
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(std::sin(static_cast<double>(x) * 3.14159265358979323846));
  *cosine = static_cast<float>(std::cos(static_cast<double>(x) * 3.14159265358979323846));
}
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }

using fourfold::executor::Site;

void __syncthreads(Site site = Site::here());
void __syncwarp(unsigned mask = 0xffffffffu, Site site = Site::here());
void __threadfence(Site site = Site::here());
inline void __threadfence_block() {}

unsigned __ballot_sync(unsigned mask, bool vote, Site site = Site::here());
unsigned __match_any_sync(unsigned mask, int value, Site site = Site::here());
inline int __any_sync(unsigned mask, bool vote, Site site = Site::here()) {
  return __ballot_sync(mask, vote, site) != 0;
}
inline int __all_sync(unsigned mask, bool vote, Site site = Site::here()) {
  return __ballot_sync(mask, !vote, site) == 0;
}

namespace fourfold::executor {
enum class Shuffle { kIndex, kUp, kDown, kXor };
unsigned shuffle(unsigned mask, unsigned value, Shuffle kind, int lane, int width, Site site);
// For tests inside a kernel: reports a violation, "the kernel's own check fails".
void machine_fails(Site site = Site::here());
// Reads `bytes` of a buffer as a plain load would.
void check_read(const void* address, std::size_t bytes);
template <typename T>
T shuffle_value(unsigned mask, T value, Shuffle kind, int lane, int width, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 8) {  // two shuffles, as on the device
    const auto bits = __builtin_bit_cast(unsigned long long, value);
    const unsigned low = shuffle(mask, static_cast<unsigned>(bits), kind, lane, width, site);
    const unsigned high = shuffle(mask, static_cast<unsigned>(bits >> 32), kind, lane, width, site);
    return __builtin_bit_cast(T, static_cast<unsigned long long>(high) << 32 | low);
  } else {
    return __builtin_bit_cast(T, shuffle(mask, __builtin_bit_cast(unsigned, value), kind, lane, width, site));
  }
}
template <typename T>
T load(const T* p) {
  check_read(p, sizeof(T));
  return *p;
}
}  // namespace fourfold::executor

template <typename T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32, Site site = Site::here()) {
  return fourfold::executor::shuffle_value(mask, v, fourfold::executor::Shuffle::kIndex, lane, width, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, Site site = Site::here()) {
  return fourfold::executor::shuffle_value(mask, v, fourfold::executor::Shuffle::kUp, static_cast<int>(delta), width,
                                           site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, Site site = Site::here()) {
  return fourfold::executor::shuffle_value(mask, v, fourfold::executor::Shuffle::kDown, static_cast<int>(delta), width,
                                           site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, Site site = Site::here()) {
  return fourfold::executor::shuffle_value(mask, v, fourfold::executor::Shuffle::kXor, lanes, width, site);
}

// All 32 lanes.
template <typename T, typename Combine>
T reduce_lanes(unsigned mask, T v, const Combine& combine, Site site) {
  for (int d = 16; d > 0; d /= 2) v = combine(v, __shfl_xor_sync(mask, v, d, 32, site));
  return v;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, Site site = Site::here()) {
  return reduce_lanes(
      mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; }, site);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, Site site = Site::here()) {
  return reduce_lanes(
      mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; }, site);
}

// Not a number gives the least integer, and what is too large the one next to it.
inline long long __float2ll_rn(float x) {
  constexpr float kEnd = 9223372036854775808.0f;
  if (!(x >= -kEnd)) return std::numeric_limits<long long>::min();
  return x >= kEnd ? std::numeric_limits<long long>::max() : std::llrint(x);
}
int atomicAdd(int* address, int value, Site site = Site::here());
unsigned atomicAdd(unsigned* address, unsigned value, Site site = Site::here());
unsigned long long atomicAdd(unsigned long long* address, unsigned long long value, Site site = Site::here());
float atomicAdd(float* address, float value, Site site = Site::here());
unsigned atomicOr(unsigned* address, unsigned value, Site site = Site::here());
int atomicMax(int* address, int value, Site site = Site::here());
unsigned atomicMax(unsigned* address, unsigned value, Site site = Site::here());
unsigned long long atomicMax(unsigned long long* address, unsigned long long value, Site site = Site::here());
int atomicExch(int* address, int value, Site site = Site::here());
int atomicCAS(int* address, int expected, int value, Site site = Site::here());

template <typename T>
T __ldg(const T* p) {
  return fourfold::executor::load(p);
}
template <typename T>
T __ldcg(const T* p) {
  return fourfold::executor::load(p);
}
template <typename T>
T __ldcs(const T* p) {
  return fourfold::executor::load(p);
}
template <typename T>
void __stcg(T* p, T v) {
  *p = v;
}
