// PTX wrappers beside sm90.cuh, for sm_80 and later: transposed fragments and multiplications in fp16.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::ptx {

// Four 8 x 8 matrices of 16-bit values, transposed: lane 8 q + r addresses row r of matrix q, and word q of lane 4 c +
// p holds rows 2 p and 2 p + 1 of column c.
__device__ __forceinline__ void load_matrix4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// An 8 x 8 matrix of 16-bit values, of which lane 4 r + p holds columns 2 p and 2 p + 1 of row r, transposed.
__device__ __forceinline__ u32 transpose_matrix(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// fp16 of both, round to nearest even.
__device__ __forceinline__ u32 to_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Four e4m3 codes as fp16, exactly: those in bytes 0 and 1, and those in bytes 2 and 3. sm_89 and later.
__device__ __forceinline__ void codes_to_f16(u32 codes, u32& low, u32& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
// Those in bytes 0 and 2, and those in bytes 1 and 3.
__device__ __forceinline__ void codes_to_f16_crossed(u32 codes, u32& even, u32& odd) {
  codes_to_f16(__byte_perm(codes, 0u, 0x3120), even, odd);
}
// e4m3 of both, round to nearest even, saturating. sm_89 and later.
__device__ __forceinline__ u32 to_e4m3x2(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fourfold::ptx
