#!/usr/bin/env python3
"""Counts what the inner loops of the NEON kernels cost: instructions from the binary, cycles by llvm-mca.

    tools/arm/count_kernels.py [BUILD]      BUILD: a build directory of the preset aarch64 (default: build/aarch64)

Needs the packages of packages/apt-aarch64.txt and apt-mca.txt. Nothing is run: what a processor does with
memory is not in these figures. GB/s are bytes of weights a core at 3 GHz, as if all of them were in its first cache.
"""

import argparse
import pathlib
import re
import subprocess
import sys

OBJDUMP = "aarch64-linux-gnu-objdump"
MCA = "llvm-mca-19"
GHZ = 3.0

# Kernel, object file, weights of a turn of its loop, bytes of a weight, rows; how often instructions occur in the loop,
# which tells it from others: mnemonics (a regular expression) and their number.
NVFP4 = 576 / 1024
KERNELS = [
    ("NVFP4, one row", "neon", 2048, NVFP4, 1, {"tbl": 128, "sm[ul][al].*": 512}),
    ("NVFP4, one row", "dotprod", 2048, NVFP4, 1, {"tbl": 128, "sdot": 256}),
    ("NVFP4, two rows", "dotprod", 2048, NVFP4, 2, {"tbl": 128, "sdot": 512}),
    ("NVFP4, four rows", "dotprod", 1024, NVFP4, 4, {"tbl": 64, "sdot": 512}),
    ("FP8, one row", "dotprod", 512, 1, 1, {"fcvtl.*": 128, "fmla": 128}),
    ("bf16, one row", "dotprod", 256, 2, 1, {"fcvtl.*": 0, "shl": 32, "fmla": 64}),
    ("f32, one row", "dotprod", 128, 4, 1, {"fcvtl.*": 0, "shl": 0, "fmla": 32}),
    ("NVFP4, packed, two rows", "i8mm", 256, NVFP4, 2, {"smmla": 32, "tbl": 0}),
    ("bf16, FP8, packed, four rows", "bfmmla", 64, 2, 4, {"bfmmla": 32}),
]

VECTOR = re.compile(r"\b[vqds]\d+(\.|\b)")
MEMORY = re.compile(r"^(ld|st|prfm)")


def functions(path):
    """Demangled name -> [(address, mnemonic, operands)]"""
    text = subprocess.run([OBJDUMP, "-d", "-C", "--no-show-raw-insn", str(path)], check=True, capture_output=True, text=True)
    found, current = {}, None
    for line in text.stdout.splitlines():
        head = re.match(r"^([0-9a-f]+) <(.*)>:$", line)
        if head:
            current = found.setdefault(head.group(2), [])
            continue
        row = re.match(r"^\s+([0-9a-f]+):\s+(\S+)\s*(.*)$", line)
        if row and current is not None:
            operands = re.sub(r"\s*(//|<).*$", "", row.group(3))
            current.append((int(row.group(1), 16), row.group(2), operands))
    return found


def loops(code):
    """Innermost loops: bodies of backward branches without another loop inside."""
    spans = []
    index = {address: i for i, (address, _, _) in enumerate(code)}
    for i, (address, name, operands) in enumerate(code):
        if not re.match(r"^(b|b\..*|cbn?z|tbn?z)$", name):
            continue
        target = re.search(r"([0-9a-f]+)$", operands)
        start = index.get(int(target.group(1), 16)) if target else None
        if start is not None and start < i:
            spans.append((start, i + 1))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [code[a:b] for a, b in inner]


def count(body, mnemonic):
    return sum(1 for _, name, _ in body if re.fullmatch(mnemonic, name))


def cycles(body, processor):
    text = "\n".join(f"{name} {operands}" for _, name, operands in body if not re.match(r"^(b|b\..*|cbn?z|tbn?z)$", name))
    out = subprocess.run([MCA, "-march=aarch64", f"-mcpu={processor}", "-iterations=200"], input=text, capture_output=True, text=True)
    total = re.search(r"Total Cycles:\s+(\d+)", out.stdout)
    if not total:
        sys.exit(f"{MCA}: {out.stderr.strip().splitlines()[0] if out.stderr.strip() else 'no answer'}")
    return int(total.group(1)) / 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default="build/aarch64")
    parser.add_argument("--processors", default="neoverse-v1,neoverse-v2", help="names that llvm-mca knows")
    parser.add_argument("--show", help="print the loop of kernels whose name contains this")
    args = parser.parse_args()
    processors = args.processors.split(",")
    objects = pathlib.Path(args.build) / "src/cpu/CMakeFiles/fourfold_cpu.dir/gemm"
    print("| kernel | set | vector instructions a weight and row | others | " + " | ".join(f"{p}: cycles, GB/s" for p in processors) + " |")
    for what, source, weights, width, rows, signs in KERNELS:
        path = objects / f"{source}.cpp.o"
        if not path.exists():
            sys.exit(f"{path} is missing; wanted a build of the preset aarch64")
        bodies = [b for code in functions(path).values() for b in loops(code) if all(count(b, m) == n for m, n in signs.items())]
        if not bodies:
            sys.exit(f"{path}: no loop with {signs}")
        body = min(bodies, key=len)
        if args.show and args.show in f"{source} {what}":
            for _, name, operands in body:
                print(f"    {name:8} {operands}")
        vector = sum(1 for _, name, operands in body if VECTOR.search(operands) and not MEMORY.match(name))
        row = f"| {what} | {source} | {vector / weights / rows:.3f} ({vector}) | {len(body) - vector} "
        for processor in processors:
            taken = cycles(body, processor)
            row += f"| {taken:.0f}, {weights * width / taken * GHZ:.1f} "
        print(row + "|")


if __name__ == "__main__":
    main()
