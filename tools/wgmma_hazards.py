#!/usr/bin/env python3
"""Fragments that a wgmma may still read when something else is written into their registers.

A wgmma with its first operand in registers reads them until the wait for it. ptxas takes them for free once the wgmma is
issued and may load other words into them, also under a wait that lets the newest group run on. Follows every such HGMMA
along all branches to the WARPGROUP.DEPBAR that its group cannot outlive, and reports what writes its fragment before.

    python3 tools/wgmma_hazards.py FILE-OR-FOLDER... [--nvdisasm PATH]

Files: cubins, or kernels of a store (`fourfold warm --arch sm_90a --store FOLDER`); folders: all files in them. Exit
status 1 when there is such a write.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
# Nothing that these name first is a register they write.
NO_RESULT = ("ST", "RED", "BAR", "BRA", "BRX", "BSYNC", "BSSY", "CALL", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FENCE", "HGMMA",
             "LDGDEPBAR", "LDGSTS", "MEMBAR", "NANOSLEEP", "NOP", "RET", "SYNCS", "U", "WARPGROUP", "WARPSYNC", "YIELD")
MOST_GROUPS = 9  # that are followed behind one; more than any wait leaves running


class Instruction:
    def __init__(self, address: str, predicate: str, name: str, operands: str) -> None:
        self.address, self.name = address, name
        self.text = f"{address} {predicate}{name} {operands}"
        self.operands = [o.strip() for o in operands.split(",")] if operands else []
        self.always = not predicate and not re.match(r"!?U?P\d", self.operands[0] if self.operands else "")
        target = re.search(r"\(\.(L_\w+)\)", operands) if name.startswith(("BRA", "BRX", "CALL")) else None
        self.target = target.group(1) if target else None
        self.ends_group = name.startswith("HGMMA") and "gsb0" in operands

    def written(self) -> range:
        if self.name.startswith(NO_RESULT):
            return range(0)
        results = [o for o in self.operands if not re.fullmatch(r"!?U?P(T|\d+)", o)]
        first = re.fullmatch(r"R(\d+)(\.\w+)*", results[0]) if results else None
        if first is None or (results[0] != self.operands[0] and "SETP" in self.name):
            return range(0)
        parts = self.name.split(".")
        count = 4 if "128" in parts else 2 if "64" in parts or "WIDE" in parts else 1
        if parts[0] == "HMMA":
            count = 4 if "F32" in parts else 2
        if parts[0] == "LDSM":
            count = int(parts[-1]) if parts[-1].isdigit() else 1
        return range(int(first.group(1)), int(first.group(1)) + count)


def writes_before_the_wait(code: list[Instruction], labels: dict[str, int], index: int) -> set[int]:
    fragment = re.match(r"R(\d+)", code[index].operands[1])
    if fragment is None:
        return set()
    registers = set(range(int(fragment.group(1)), int(fragment.group(1)) + 4))
    found = set()
    # How many groups have ended since the wgmma's own; -1: that one has not.
    paths = [(index + 1, 0 if code[index].ends_group else -1)]
    seen = set()
    while paths:
        at, groups = paths.pop()
        if at >= len(code) or (at, groups) in seen:
            continue
        seen.add((at, groups))
        instruction = code[at]
        if instruction.name.startswith("WARPGROUP.DEPBAR") and groups >= int(instruction.operands[-1], 16):
            continue
        if instruction.ends_group:
            groups = min(groups + 1, MOST_GROUPS)
        if registers & set(instruction.written()):
            found.add(at)
        if instruction.target in labels:
            paths.append((labels[instruction.target], groups))
        if not (instruction.always and instruction.name.startswith(("EXIT", "BRA", "BRX", "RET"))):
            paths.append((at + 1, groups))
    return found


def check(text: str, name: str) -> tuple[int, int]:
    fragments = hazards = 0
    function, code, labels = "?", [], {}

    def finish() -> None:
        nonlocal fragments, hazards
        for i, instruction in enumerate(code):
            if not instruction.name.startswith("HGMMA") or not instruction.operands[1].startswith("R"):
                continue
            fragments += 1
            for at in sorted(writes_before_the_wait(code, labels, i)):
                hazards += 1
                print(f"{name}: {function}\n  {instruction.text}\n  {code[at].text}")
        code.clear()
        labels.clear()

    for line in text.splitlines():
        if line.startswith(".text."):
            finish()
            function = line[6:].rstrip(":")
        elif label := re.match(r"\.(L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append(Instruction(found.group(1), found.group(2) or "", found.group(3), found.group(4)))
    finish()
    return fragments, hazards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--nvdisasm", default="nvdisasm")
    args = parser.parse_args()
    files = [f for p in args.paths for f in (sorted(p.iterdir()) if p.is_dir() else [p]) if f.is_file()]
    fragments = hazards = 0
    for file in files:
        data = file.read_bytes()
        begin = data.find(b"\x7fELF")  # a store keeps more with it
        if begin < 0:
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(data[begin:])
            cubin.flush()
            text = subprocess.run([args.nvdisasm, "-c", cubin.name], check=True, capture_output=True, text=True).stdout
        counts = check(text, file.name)
        fragments, hazards = fragments + counts[0], hazards + counts[1]
    print(f"{len(files)} files, {fragments} wgmma with fragments in registers, {hazards} overwritten too early")
    if fragments == 0:
        print("no such wgmma: wanted kernels for sm_90a")
    sys.exit(1 if hazards else 0)


if __name__ == "__main__":
    main()
