"""Turns trained weights (tools/demo/train.py) into Hugging Face directories.

  python3 tools/demo/pack.py RUN models/demo            NVFP4 in modelopt form, with the input scales measured in RUN/results.json
  python3 tools/demo/pack.py RUN OUT --bf16             the same weights in bf16 (tokenizer and template are copied along)
"""
import argparse
import json
import os
import shutil

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from network import model as demo
from network.export import PREFIX, write

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def load(run):
    m = demo.Model(demo.DEMO)
    state = {}
    for i in range(3):
        state.update(load_file(os.path.join(run, f"weights_{i}.safetensors")))
    with torch.no_grad():
        for n, p in m.named_parameters():
            p.copy_(state.pop(n).float())
    assert not state, list(state)
    return m


def input_scales(ranges):
    """{module name: amax / (6 * 448)} from the activation ranges train.py measured."""
    amax = {}
    for path, value in ranges.items():
        parts = path.split(".")
        base = f"{PREFIX}layers.{parts[1]}." if parts[0] == "layers" else "mtp.layers.0."
        rest = parts[2:] if parts[0] == "layers" else parts[1:]
        if rest[0] == "mixer":
            kind = "self_attn" if rest[1] in ("q_proj", "k_proj", "v_proj", "o_proj") else "linear_attn"
            amax[f"{base}{kind}.{rest[1]}"] = value
        elif rest == ["mlp", "shared"]:
            amax[base + "mlp.shared_expert.gate_proj"] = amax[base + "mlp.shared_expert.up_proj"] = value
        elif rest == ["mlp", "shared_down"]:
            amax[base + "mlp.shared_expert.down_proj"] = value
        else:
            names = ("gate_proj", "up_proj") if rest[-1] == "in" else ("down_proj",)
            typical = max(value)
            for e, v in enumerate(value):
                for name in names:  # an expert the measured tokens never reached takes the layer's largest range
                    amax[f"{base}mlp.experts.{e}.{name}"] = v if v > 0 else typical
    return {k: v / (6.0 * 448.0) for k, v in amax.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("out")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--text", default=os.path.join(HERE, "../../models/demo"), help="directory with tokenizer and template")
    args = parser.parse_args()
    m = load(args.run)
    with open(os.path.join(args.run, "results.json")) as f:
        scales = input_scales(json.load(f)["ranges"])
    tokenizer = Tokenizer.from_file(os.path.join(args.text, "tokenizer.json"))
    write(m, args.out, tokenizer.get_vocab(), not args.bf16, scales)
    for name in TEXT_FILES:
        source = os.path.join(args.text, name)
        if os.path.realpath(source) != os.path.realpath(os.path.join(args.out, name)):
            shutil.copy(source, os.path.join(args.out, name))
    total = sum(os.path.getsize(os.path.join(args.out, f)) for f in os.listdir(args.out) if os.path.isfile(os.path.join(args.out, f)))
    print(f"{args.out}: {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
