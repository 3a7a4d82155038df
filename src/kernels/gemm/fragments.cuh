// From stored words (layout.h) to bf16 A fragments of 16 x 16 weights, and what the sums are then short of.
#pragma once

#include "kernels/gemm/layout.h"
#include "kernels/moe/dequant.cuh"
#include "kernels/ptx/sm90.cuh"

namespace fourfold::gemm {

// Calls `body` with the format, a constant where the tile has one only.
template <typename Tile, typename Body>
__device__ __forceinline__ void with_format(Weights format, const Body& body) {
  constexpr auto T = Tile::value;
  if constexpr (T.has(Weights::kFp8)) {
    if ((T.formats & 5) == 0 || format == Weights::kFp8) return body.template operator()<Weights::kFp8>();
  }
  if constexpr (T.has(Weights::kBf16)) {
    if ((T.formats & 4) == 0 || format == Weights::kBf16) return body.template operator()<Weights::kBf16>();
  }
  if constexpr (T.has(Weights::kNvfp4)) return body.template operator()<Weights::kNvfp4>();
}

// Weights times 2^-120.
__device__ __forceinline__ void fp8_fragment(ptx::u32 w0, ptx::u32 w1, ptx::u32 (&a)[4]) {
  a[0] = w0 & kFp8Mask;
  a[1] = ((w0 << 4) ^ (w0 >> 4)) & kFp8Mask;
  a[2] = w1 & kFp8Mask;
  a[3] = ((w1 << 4) ^ (w1 >> 4)) & kFp8Mask;
}
inline constexpr ptx::u32 kFp8Pair = 0x7b807b80u;  // 2^120, twice, in bf16

// Fragments are so much smaller than their weights: powers of two, exact.
FOURFOLD_HD constexpr float fragment_scale(Weights format) {
  return format == Weights::kBf16  ? 1.0f
         : format == Weights::kFp8 ? 1329227995784915872903807060280344576.0f  // 2^120
                                   : moe::kEpilogueScale;
}

// Small-row products multiply x by 2^80 first, or sums of fp8 codes would leave fp32's range below.
inline constexpr ptx::u32 kRowPair = moe::kOneTokenPair;
FOURFOLD_HD constexpr float rows_scale(Weights format) { return fragment_scale(format) / moe::kOneTokenScale; }

__device__ __forceinline__ float silu(float gate) {
  return gate * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(gate * -1.4426950408889634f));
}

}  // namespace fourfold::gemm
