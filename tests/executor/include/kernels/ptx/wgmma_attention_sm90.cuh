// The wrappers of src/kernels/ptx/wgmma_attention_sm90.cuh for the executor.
#pragma once

#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::ptx {

inline u64 transposed_descriptor(u32 address, u32 block_bytes) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(64) << 32) | (static_cast<u64>(block_bytes >> 4) << 16) |
         static_cast<u64>((address & 0x3ffffu) >> 4);
}

// A: fragments, or (nullptr) the descriptor.
void wgmma_issue_any(float* d, const u32* a, u64 a_descriptor, u64 b, bool transposed, int n, bool accumulate,
                     Site site);

template <int N>
struct WgmmaShared {
  static void set(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    wgmma_issue_any(d, nullptr, a, b, false, N, false, site);
  }
  static void add(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    wgmma_issue_any(d, nullptr, a, b, false, N, true, site);
  }
};
template <int N>
struct WgmmaTransposed {
  static void set(float (&d)[N / 2], const u32 (&a)[4], u64 b, Site site = Site::here()) {
    wgmma_issue_any(d, a, 0, b, true, N, false, site);
  }
  static void add(float (&d)[N / 2], const u32 (&a)[4], u64 b, Site site = Site::here()) {
    wgmma_issue_any(d, a, 0, b, true, N, true, site);
  }
};

}  // namespace fourfold::ptx
