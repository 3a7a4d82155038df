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
// fp16 of both, round to nearest even.
__device__ __forceinline__ u32 to_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fourfold::ptx
