// The wrappers of src/kernels/ptx/wgmma_sm90.cuh for the executor.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::ptx {

void wgmma_fence(Site site = Site::here());
void wgmma_commit(Site site = Site::here());
void wgmma_wait_groups(int pending, Site site);
template <int Pending>
void wgmma_wait(Site site = Site::here()) {
  wgmma_wait_groups(Pending, site);
}

inline u64 swizzled_descriptor(u32 address) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(64) << 32) | (static_cast<u64>(1) << 16) |
         static_cast<u64>((address & 0x3ffffu) >> 4);
}

inline u64 transposed_descriptor(u32 address, u32 block_bytes) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(64) << 32) | (static_cast<u64>(block_bytes >> 4) << 16) |
         static_cast<u64>((address & 0x3ffffu) >> 4);
}

// A: fragments, or (nullptr) the descriptor.
void wgmma_issue(float* d, const u32* a, u64 a_descriptor, u64 b, bool transposed, int n, bool accumulate, Site site);

template <int N>
struct Wgmma {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256);
  static void set(float (&d)[N / 2], const u32 (&a)[4], u64 b, Site site = Site::here()) {
    wgmma_issue(d, a, 0, b, false, N, false, site);
  }
  static void add(float (&d)[N / 2], const u32 (&a)[4], u64 b, Site site = Site::here()) {
    wgmma_issue(d, a, 0, b, false, N, true, site);
  }
};
template <int N>
struct WgmmaShared {
  static void set(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    wgmma_issue(d, nullptr, a, b, false, N, false, site);
  }
  static void add(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    wgmma_issue(d, nullptr, a, b, false, N, true, site);
  }
};
template <int N>
struct WgmmaTransposed {
  static void set(float (&d)[N / 2], const u32 (&a)[4], u64 b, Site site = Site::here()) {
    wgmma_issue(d, a, 0, b, true, N, false, site);
  }
  static void add(float (&d)[N / 2], const u32 (&a)[4], u64 b, Site site = Site::here()) {
    wgmma_issue(d, a, 0, b, true, N, true, site);
  }
};

}  // namespace fourfold::ptx
