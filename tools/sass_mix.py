#!/usr/bin/env python3
"""Instructions per weight in the tensor-core loops of a cubin.

Reads the disassembly (nvdisasm -c), cuts it into basic blocks and prints, for every block that holds HMMA or HGMMA, the
instruction mix and the number of issued instructions per dequantised weight and lane. A lane dequantises two weights
with each HMUL2.BF16, so weights per lane = 2 x HMUL2.

    python3 tools/sass_mix.py kernel.cubin [--nvdisasm PATH]
"""

import argparse
import collections
import re
import subprocess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    args = parser.parse_args()
    text = subprocess.run([args.nvdisasm, "-c", args.cubin], check=True, capture_output=True, text=True).stdout
    function = "?"
    block: list[str] = []

    def flush() -> None:
        mma = sum(op.startswith(("HMMA", "HGMMA")) for op in block)
        weights = 2 * sum(op.startswith("HMUL2.BF16") for op in block)
        if mma and weights:
            mix = collections.Counter(op.split(".")[0] for op in block)
            top = ", ".join(f"{n} {count / weights:.2f}" for n, count in mix.most_common(9))
            print(f"{function}: {len(block)} instructions, {mma} mma, {weights} weights/lane:"
                  f" {len(block) / weights:.2f} per weight ({top})")
        block.clear()

    for line in text.splitlines():
        line = line.strip()
        if line.startswith(".text."):
            flush()
            function = line[6:].rstrip(":")[-60:]
        elif re.match(r"\.L_x?_?\d+", line) or line.startswith(".L_"):
            flush()
        else:
            match = re.match(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d\s+)?([A-Z0-9_.]+)", line)
            if match:
                block.append(match.group(2))
                if match.group(2) in ("BRA", "EXIT", "RET"):
                    flush()
    flush()


if __name__ == "__main__":
    main()
