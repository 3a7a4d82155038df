#!/usr/bin/env python3
"""Writes src/kernels/ptx/wgmma_sm90.cuh: wgmma m64nNk16 (bf16, A in registers, fp32 accumulators) for N = 16, 24 .. 176.

    python3 tools/gen_wgmma.py > src/kernels/ptx/wgmma_sm90.cuh
"""

HEAD = """// Written by tools/gen_wgmma.py. wgmma m64nNk16, bf16 x bf16 -> fp32: A in registers (the m16n8k16 fragment of each warp's
// 16 rows), B in shared memory (K-major, 128-byte swizzle). Accumulator i of a lane: rows g (i % 4 < 2) and g + 8, column
// 8 (i / 4) + 2 l + i % 2, with g = lane / 4, l = lane % 4.
#pragma once

#include "kernels/ptx/sm90.cuh"

namespace fourfold::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Descriptor of a K-major tile with 128-byte swizzle: rows of 128 bytes, eight rows to a 1024-byte atom.
__device__ __forceinline__ u64 swizzled_descriptor(u32 address) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(64) << 32) | (static_cast<u64>(1) << 16) |
         static_cast<u64>((address & 0x3ffffu) >> 4);
}

// set: d = a b, add: d += a b. `set` only writes its accumulators, so that they are not live before it.
template <int N>
struct Wgmma;
"""


def main() -> None:
    print(HEAD)
    for n in range(16, 177, 8):
        regs = n // 2
        print(f"template <>\nstruct Wgmma<{n}> {{")
        for name, mode, predicate in (("set", "=f", 0), ("add", "+f", 1)):
            print(f"  __device__ __forceinline__ static void {name}(float (&d)[{regs}], const u32 (&a)[4], u64 b) {{")
            print("    asm volatile(")
            print('        "{.reg .pred p;\\n"')
            print(f'        "setp.ne.b32 p, {predicate}, 0;\\n"')
            print(f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{"')
            names = [f"%{i}" for i in range(regs)]
            for i in range(0, regs, 16):
                tail = "," if i + 16 < regs else ""
                print(f'        "{",".join(names[i:i + 16])}{tail}"')
            print(f'        "}}, {{%{regs},%{regs + 1},%{regs + 2},%{regs + 3}}}, %{regs + 4}, p, 1, 1, 0;}}"')
            outs = [f'"{mode}"(d[{i}])' for i in range(regs)]
            lines = [", ".join(outs[i:i + 8]) for i in range(0, regs, 8)]
            print("        : " + ",\n          ".join(lines))
            print('        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));')
            print("  }")
        print("};")
    print("\n}  // namespace fourfold::ptx")


if __name__ == "__main__":
    main()
