// Weights of the stored form (layout.h) as rows of bf16, for a library that multiplies those: without their row's
// factor, so that all of them are exact (e4m3 codes have 4 significant bits, an e2m1 code times its e4m3 scale 6).
#pragma once

#include "kernels/gemm/fragments.cuh"
#include "kernels/gemm/unpack_args.h"

namespace fourfold::gemm {

// Any grid; a warp has one unit at a time. Its stores are of 4 bytes, 16 in a row beside each other, and the other half
// of a sector follows: L2 puts them together.
__global__ void __launch_bounds__(kUnpackThreads) gemm_unpack(const __grid_constant__ UnpackArgs args) {
  using namespace ptx;
  constexpr u32 kScaleBack = 0x49804980u;  // 2^20, twice, in bf16
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int l = lane % 4;
  const long long all = static_cast<long long>(args.tiles) * args.units;
  const long long warps = static_cast<long long>(gridDim.x) * (kUnpackThreads / 32);
  for (long long i = static_cast<long long>(blockIdx.x) * (kUnpackThreads / 32) + threadIdx.x / 32; i < all;
       i += warps) {
    const u8* unit = args.part.weights + i * unit_bytes(args.part.format);
    u32 a[4][4];  // of each block of 16 columns
    if (args.part.format == Weights::kBf16) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 w = reinterpret_cast<const uint4*>(unit + j * 512)[lane];
        a[j][0] = w.x, a[j][1] = w.y, a[j][2] = w.z, a[j][3] = w.w;
      }
    } else if (args.part.format == Weights::kFp8) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint4 w = reinterpret_cast<const uint4*>(unit + p * 512)[lane];
        fp8_fragment(w.x, w.y, a[2 * p]);
        fp8_fragment(w.z, w.w, a[2 * p + 1]);
#pragma unroll
        for (int k = 0; k < 8; ++k) a[2 * p + k / 4][k % 4] = mul_bf16x2(a[2 * p + k / 4][k % 4], kFp8Pair);
      }
    } else {
      const uint4 w = reinterpret_cast<const uint4*>(unit)[lane];
      const u32 words[4] = {w.x, w.y, w.z, w.w};
      const uint2 scales = reinterpret_cast<const uint2*>(unit + moe::kUnitCodeBytes)[g];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        moe::dequantise(words[j], moe::scale_pair(j < 2 ? scales.x : scales.y, j % 2 != 0, moe::kScaleBase), a[j]);
#pragma unroll
        for (int k = 0; k < 4; ++k) a[j][k] = mul_bf16x2(a[j][k], kScaleBack);
      }
    }
    const int row = static_cast<int>(i / args.units) * kTileRows + g;
    const int column = static_cast<int>(i % args.units) * kUnitK + 2 * l;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // rows g and g + 8
      if (row + 8 * h >= args.part.rows) continue;
      u16* out = args.out + static_cast<long long>(row + 8 * h) * args.columns + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j * kBlockK >= args.columns) continue;
        *reinterpret_cast<u32*>(out + j * kBlockK) = a[j][h];
        *reinterpret_cast<u32*>(out + j * kBlockK + 8) = a[j][2 + h];
      }
    }
  }
}

}  // namespace fourfold::gemm
