// PTX wrappers of sm_120a and sm_121a: the block-scaled FP4 multiplication and the conversions around it.
//
// With FOURFOLD_EMULATE_FP4_MMA the same functions run on any card from sm_80 on: the same fragments in and out, the
// same scales from the same lanes, fp32 accumulation. e2m1 x ue4m3 has at most 6 significant bits and lies between
// 2^-10 and 2688, so that each scaled operand is exact in f16; four m16n8k16 then add up the products of 64 K. What may
// differ from the instruction is the order and the internal width of that sum.
#pragma once

#include "kernels/ptx/sm90.cuh"
#ifdef FOURFOLD_EMULATE_FP4_MMA
#include "nvfp4/number.h"
#endif

namespace fourfold::ptx {

// Byte i of the result is byte (selector >> 4 i) & 7 of b:a.
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

#ifndef FOURFOLD_EMULATE_FP4_MMA

// d += (A x its scales) (B x its scales): e2m1 operands m16n8k64, one ue4m3 scale per 16 k. Fragments:
// moe/fp4_layout.h. The scale words of A's rows g and g + 8 come from lanes 4 g and 4 g + 1, of B's column g from lane
// 4 g.
__device__ __forceinline__ void mma_m16n8k64_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scales_a,
                                                   u32 scales_b) {
  asm volatile(
      "{.reg .b16 zero; mov.b16 zero, 0;\n"
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {zero, zero}, {%11}, {zero, zero};}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scales_a), "r"(scales_b));
}

// Two e2m1 codes, `low` in bits 3..0: nearest, ties to even, saturating at 6; NaN becomes 6.
__device__ __forceinline__ u32 to_e2m1x2(float low, float high) {
  u32 r;
  asm("{.reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u32.u8 %0, b;}" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

#else

namespace emulated {

// Two e2m1 codes times one ue4m3 scale in f16, exact.
__device__ __forceinline__ u32 scaled_f16x2(u32 codes, float scale) {
  const auto one = [&](u32 code) {
    return static_cast<u32>(nvfp4::float_to_f16(nvfp4::e2m1_to_float(static_cast<u8>(code & 15u)) * scale));
  };
  return one(codes) | one(codes >> 4) << 16;
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Fragment {
  float v[4];
};

// Group q + 2 p of 16 k lies in lanes l = 2 q and 2 q + 1, eight codes each. For m16n8k16 each of the four lanes takes
// four of them; the order of k inside the group is the same for both operands, so it does not matter. A function of its
// own: unrolled into every place where the instruction stands, it would take the compiler minutes.
__device__ __noinline__ Fragment multiply(Fragment d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, u32 scales_a,
                                          u32 scales_b) {
  const u32 lane = threadIdx.x % 32;
  const u32 quad = lane & ~3u;
  const u32 low = __shfl_sync(0xffffffffu, scales_a, static_cast<int>(quad));
  const u32 high = __shfl_sync(0xffffffffu, scales_a, static_cast<int>(quad + 1));
  const u32 column = __shfl_sync(0xffffffffu, scales_b, static_cast<int>(quad));
  const u32 shift = 16 * (lane & 1u);
#pragma unroll 1
  for (u32 group = 0; group < 4; ++group) {
    const int from = static_cast<int>(quad + 2 * (group & 1u) + (lane >> 1 & 1u));
    const u32 a_low = __shfl_sync(0xffffffffu, group < 2 ? a0 : a2, from) >> shift;
    const u32 a_high = __shfl_sync(0xffffffffu, group < 2 ? a1 : a3, from) >> shift;
    const u32 b = __shfl_sync(0xffffffffu, group < 2 ? b0 : b1, from) >> shift;
    const float s_low = nvfp4::e4m3_to_float(static_cast<u8>(low >> (8 * group) & 127u));
    const float s_high = nvfp4::e4m3_to_float(static_cast<u8>(high >> (8 * group) & 127u));
    const float s_column = nvfp4::e4m3_to_float(static_cast<u8>(column >> (8 * group) & 127u));
    const u32 f[4] = {scaled_f16x2(a_low, s_low), scaled_f16x2(a_high, s_high), scaled_f16x2(a_low >> 8, s_low),
                      scaled_f16x2(a_high >> 8, s_high)};
    mma_m16n8k16_f16(d.v, f, scaled_f16x2(b, s_column), scaled_f16x2(b >> 8, s_column));
  }
  return d;
}

}  // namespace emulated

__device__ __forceinline__ void mma_m16n8k64_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scales_a,
                                                   u32 scales_b) {
  const emulated::Fragment sum =
      emulated::multiply({{d[0], d[1], d[2], d[3]}}, a[0], a[1], a[2], a[3], b0, b1, scales_a, scales_b);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = sum.v[i];
}

__device__ __forceinline__ u32 to_e2m1x2(float low, float high) {
  const auto code = [](float v) { return static_cast<u32>(nvfp4::float_to_e2m1(v == v ? v : nvfp4::kE2m1Max)); };
  return code(low) | code(high) << 4;
}

#endif

}  // namespace fourfold::ptx
