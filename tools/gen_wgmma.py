#!/usr/bin/env python3
"""Writes src/kernels/ptx/wgmma_sm90.cuh: wgmma m64nNk16 (bf16, A in registers, fp32 accumulators) for N = 16, 24 .. 176,
or src/kernels/ptx/wgmma_attention_sm90.cuh: A in shared memory, and B with its rows along K.

    python3 tools/gen_wgmma.py > src/kernels/ptx/wgmma_sm90.cuh
    python3 tools/gen_wgmma.py attention > src/kernels/ptx/wgmma_attention_sm90.cuh
"""

import sys

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

ATTENTION = """// Written by tools/gen_wgmma.py. wgmma m64nNk16, bf16 x bf16 -> fp32, as attention multiplies: accumulators as in
// wgmma_sm90.cuh, shared memory with 128-byte swizzle.
//   WgmmaShared      A and B in shared memory, rows of 64 values along K
//   WgmmaTransposed  A in registers, B with rows of 64 values along N: a block of 64 columns after the other
#pragma once

#include "kernels/ptx/wgmma_sm90.cuh"

namespace fourfold::ptx {

// Of B for WgmmaTransposed: 1024-byte atoms of eight rows (K) of 64 columns, `block_bytes` from 64 columns to the next.
__device__ __forceinline__ u64 transposed_descriptor(u32 address, u32 block_bytes) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(64) << 32) | (static_cast<u64>(block_bytes >> 4) << 16) |
         static_cast<u64>((address & 0x3ffffu) >> 4);
}

template <int N>
struct WgmmaShared;
template <int N>
struct WgmmaTransposed;
"""


def print_form(n: int, shared: bool) -> None:
    regs = n // 2
    print(f"template <>\nstruct {'WgmmaShared' if shared else 'WgmmaTransposed'}<{n}> {{")
    a = "u64 a" if shared else "const u32 (&a)[4]"
    for name, mode, predicate in (("set", "=f", 0), ("add", "+f", 1)):
        print(f"  __device__ __forceinline__ static void {name}(float (&d)[{regs}], {a}, u64 b) {{")
        print("    asm volatile(")
        print('        "{.reg .pred p;\\n"')
        print(f'        "setp.ne.b32 p, {predicate}, 0;\\n"')
        print(f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{"')
        names = [f"%{i}" for i in range(regs)]
        for i in range(0, regs, 16):
            print(f'        "{",".join(names[i:i + 16])}{"," if i + 16 < regs else ""}"')
        if shared:
            print(f'        "}}, %{regs}, %{regs + 1}, p, 1, 1, 0, 0;}}"')
        else:
            print(f'        "}}, {{%{regs},%{regs + 1},%{regs + 2},%{regs + 3}}}, %{regs + 4}, p, 1, 1, 1;}}"')
        outs = [f'"{mode}"(d[{i}])' for i in range(regs)]
        print("        : " + ",\n          ".join(", ".join(outs[i:i + 8]) for i in range(0, regs, 8)))
        if shared:
            print('        : "l"(a), "l"(b));')
        else:
            print('        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));')
        print("  }")
    print("};")


def attention() -> None:
    print(ATTENTION)
    print_form(64, True)
    for n in (64, 128, 256):
        print_form(n, False)
    print("\n}  // namespace fourfold::ptx")


def main() -> None:
    if sys.argv[1:] == ["attention"]:
        attention()
        return
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
