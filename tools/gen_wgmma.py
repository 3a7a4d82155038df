#!/usr/bin/env python3
"""Writes src/kernels/ptx/wgmma_sm90.cuh: the forms of wgmma m64nNk16 (bf16, fp32 accumulators) that kernels use.

    python3 tools/gen_wgmma.py > src/kernels/ptx/wgmma_sm90.cuh
"""

HEAD = """// Written by tools/gen_wgmma.py. wgmma m64nNk16, bf16 x bf16 -> fp32, shared memory with 128-byte swizzle:
//   Wgmma            A in registers (the m16n8k16 fragment of each warp's 16 rows), B with rows of 64 values along K
//   WgmmaShared      A and B in shared memory, rows of 64 values along K
//   WgmmaTransposed  A in registers, B with rows of 64 values along N: a block of 64 columns after the other
// Accumulator i of a lane: rows g (i % 4 < 2) and g + 8, column 8 (i / 4) + 2 l + i % 2, with g = lane / 4, l = lane % 4.
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
// Of B for WgmmaTransposed: 1024-byte atoms of eight rows (K) of 64 columns, `block_bytes` from 64 columns to the next.
__device__ __forceinline__ u64 transposed_descriptor(u32 address, u32 block_bytes) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(64) << 32) | (static_cast<u64>(block_bytes >> 4) << 16) |
         static_cast<u64>((address & 0x3ffffu) >> 4);
}

// set: d = a b, add: d += a b. `set` only writes its accumulators, so that they are not live before it.
template <int N>
struct Wgmma;
template <int N>
struct WgmmaShared;
template <int N>
struct WgmmaTransposed;
"""

# Name, whether A is in shared memory, the instruction's immediates (signs; which operands are transposed), all N.
FORMS = (("Wgmma", False, "1, 1, 0", range(16, 177, 8)),
         ("WgmmaShared", True, "1, 1, 0, 0", (64,)),
         ("WgmmaTransposed", False, "1, 1, 1", (64, 128, 256)))


def print_form(name: str, shared: bool, immediates: str, n: int) -> None:
    regs = n // 2
    a = "u64 a" if shared else "const u32 (&a)[4]"
    fragments = f"{{%{regs},%{regs + 1},%{regs + 2},%{regs + 3}}}"
    operands = f"%{regs}, %{regs + 1}" if shared else f"{fragments}, %{regs + 4}"
    inputs = '"l"(a)' if shared else '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
    print(f"template <>\nstruct {name}<{n}> {{")
    for function, mode, predicate in (("set", "=f", 0), ("add", "+f", 1)):
        print(f"  __device__ __forceinline__ static void {function}(float (&d)[{regs}], {a}, u64 b) {{")
        print("    asm volatile(")
        print('        "{.reg .pred p;\\n"')
        print(f'        "setp.ne.b32 p, {predicate}, 0;\\n"')
        print(f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{"')
        names = [f"%{i}" for i in range(regs)]
        for i in range(0, regs, 16):
            print(f'        "{",".join(names[i:i + 16])}{"," if i + 16 < regs else ""}"')
        print(f'        "}}, {operands}, p, {immediates};}}"')
        outs = [f'"{mode}"(d[{i}])' for i in range(regs)]
        print("        : " + ",\n          ".join(", ".join(outs[i:i + 8]) for i in range(0, regs, 8)))
        print(f'        : {inputs}, "l"(b));')
        print("  }")
    print("};")


def main() -> None:
    print(HEAD)
    for name, shared, immediates, sizes in FORMS:
        for n in sizes:
            print_form(name, shared, immediates, n)
    print("\n}  // namespace fourfold::ptx")


if __name__ == "__main__":
    main()
