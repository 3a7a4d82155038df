// From stored words (layout.h) to bf16 A fragments. 9 integer instructions, 4 multiplies and half a shift per 8
// weights.
#pragma once

#include "kernels/moe/layout.h"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::moe {

// The constant 0x70007000 in a register the compiler cannot see through: (x & mask) | base is then one LOP3 (with two
// immediates it would be two).
__device__ __forceinline__ ptx::u32 opaque_scale_base(int zero) { return kScaleBase | static_cast<ptx::u32>(zero); }

// Factors of K blocks 2p (odd false) and 2p+1 (odd true): row g low, row g + 8 high.
__device__ __forceinline__ ptx::u32 scale_pair(ptx::u32 word, bool odd, ptx::u32 base) {
  return ptx::and_or<kScaleMask>(odd ? __funnelshift_l(word, word, 8) : word, base);
}

// The A fragment of one 16 x 16 block without its scales: code times 2^-126.
__device__ __forceinline__ void place_codes(ptx::u32 w, ptx::u32 (&a)[4]) {
  a[0] = w & kCodeMask;
  a[1] = (w << 6) & kCodeMask;
  a[2] = __funnelshift_r(w, w, 4) & kCodeMask;
  a[3] = ((w << 2) ^ (w >> 6)) & kCodeMask;
}

// The A fragment of one 16 x 16 block: weight times 2^-20 / tensor scale.
template <bool Pinned = false>
__device__ __forceinline__ void dequantise(ptx::u32 w, ptx::u32 scales, ptx::u32 (&a)[4]) {
  const ptx::u32 low = ptx::both_low(scales);
  const ptx::u32 high = ptx::both_high(scales);
  const auto multiply = [](ptx::u32 x, ptx::u32 y) {
    return Pinned ? ptx::mul_bf16x2_pinned(x, y) : ptx::mul_bf16x2(x, y);
  };
  place_codes(w, a);
  a[0] = multiply(a[0], low);
  a[1] = multiply(a[1], high);
  a[2] = multiply(a[2], low);
  a[3] = multiply(a[3], high);
}

}  // namespace fourfold::moe
