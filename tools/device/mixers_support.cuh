// What the bench of the mixers needs beside its kernels: device buffers, launches with programmatic dependency, times
// of graphs of dependent nodes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "nvfp4/number.h"

#define CUDA_CHECK(call)                                                                               \
  do {                                                                                                 \
    const cudaError_t status_ = (call);                                                                \
    if (status_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(1);                                                                                    \
    }                                                                                                  \
  } while (0)

namespace measure {

template <typename T>
struct Device {
  T* p = nullptr;
  size_t count = 0;
  explicit Device(size_t n) : count(n) { CUDA_CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T))); }
  explicit Device(const std::vector<T>& v) : Device(v.size()) { put(v); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(p); }
  void put(const std::vector<T>& v) {
    CUDA_CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void poison() { CUDA_CHECK(cudaMemset(p, 0xff, count * sizeof(T))); }
  std::vector<T> get() const {
    std::vector<T> v(count);
    CUDA_CHECK(cudaMemcpy(v.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

// FNV-1a: the same in two runs, and of two kernels that calculate alike.
template <typename T>
unsigned long long bits_of(const Device<T>& d) {
  unsigned long long hash = 0xcbf29ce484222325ull;
  for (const T& x : d.get()) hash = (hash ^ static_cast<unsigned long long>(x)) * 0x100000001b3ull;
  return hash;
}

template <typename Args>
void launch(void (*kernel)(Args), dim3 grid, unsigned threads, unsigned shared, cudaStream_t stream, const Args& args,
            bool programmatic = true) {
  if (shared > 48 * 1024) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

// Microseconds of one of `nodes` nodes that `record` puts on the stream one after the other: replays of a graph,
// median.
inline double graph_us(int nodes, const std::function<void(cudaStream_t)>& record, int replays = 9) {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  record(stream);
  cudaGraph_t graph;
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < replays + 2; ++i) {
    CUDA_CHECK(cudaEventRecord(begin, stream));
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  CUDA_CHECK(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return 1e3 * static_cast<double>(times[times.size() / 2]) / nodes;
}

__device__ __forceinline__ unsigned hash32(unsigned long long x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<unsigned>(x ^ (x >> 32));
}
__device__ __forceinline__ float uniform(unsigned long long i) {
  return static_cast<float>(hash32(i) >> 8) * (1.0f / 8388608.0f) - 1.0f;
}
__global__ void fill_floats(float* out, unsigned long long n, float scale) {
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull)
    out[i] = uniform(i) * scale;
}
__global__ void fill_bf16(unsigned short* out, unsigned long long n, float scale) {
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) {
    out[i] = fourfold::nvfp4::float_to_bf16(uniform(i) * scale);
  }
}
// e4m3 codes of magnitude 0.25 to 2.
__global__ void fill_e4m3(unsigned char* out, unsigned long long n) {
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) {
    const unsigned h = hash32(i);
    out[i] = static_cast<unsigned char>((h & 0x80u) | (0x28u + (h >> 8) % 24u));
  }
}
__global__ void __launch_bounds__(512)
    read_all(const uint4* __restrict__ data, unsigned long long count, unsigned* sink) {
  unsigned sum = 0;
  const unsigned long long step = gridDim.x * 512ull;
  unsigned long long i = blockIdx.x * 512ull + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + step), c = __ldcs(data + i + 2 * step),
                d = __ldcs(data + i + 3 * step);
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  if (sum == 0x12345678u) *sink = sum;  // the loads must not be optimised away
}
__global__ void __launch_bounds__(256) scale_all(float4* data, unsigned long long count) {
  const unsigned long long step = gridDim.x * 256ull;
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i + 7 * step < count; i += 8 * step) {
    float4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = data[i + j * step];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j].x *= 1.0001f;
      data[i + j * step] = x[j];
    }
  }
}

// What memory of the card does at best, in place and read alone.
inline void time_ceilings() {
  {
    Device<float> data(size_t{1} << 29);  // 2 GiB
    fill_floats<<<1024, 256>>>(data.p, data.count, 1.0f);
    for (const size_t mib : {128, 512, 2048}) {
      const int pieces = static_cast<int>(2048 / mib);
      const double us = graph_us(pieces, [&](cudaStream_t s) {
        for (int i = 0; i < pieces; ++i)
          scale_all<<<132 * 8, 256, 0, s>>>(reinterpret_cast<float4*>(data.p) + i * (mib << 16), mib << 16);
      });
      std::printf("ceiling: %4zu MiB in place, read and written %.2f TB/s\n", mib,
                  static_cast<double>(mib) * 2097152 / us * 1e-6);
    }
  }
  Device<uint4> data(size_t{1} << 27);  // 2 GiB
  fill_floats<<<1024, 256>>>(reinterpret_cast<float*>(data.p), data.count * 4, 1.0f);
  Device<unsigned> sink(1);
  for (const int blocks : {132 * 2, 132 * 4}) {
    const double us = graph_us(1, [&](cudaStream_t s) { read_all<<<blocks, 512, 0, s>>>(data.p, data.count, sink.p); });
    std::printf("ceiling: plain read, %d CTAs %.2f TB/s\n", blocks, static_cast<double>(data.count) * 16 / us * 1e-6);
  }
}

}  // namespace measure
