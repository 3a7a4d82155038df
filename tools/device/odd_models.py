"""Models of unusual shapes, drawn and written as checkpoints with random weights, for odd_shapes.py.

The weights are random, and so are a router's logits: where the last expert taken and the first one left are a rounding
apart, two right backends take different ones, and that is most of what they differ by. So embeddings get a topic in
their first columns, and routers rows that take other experts for each topic, with room between those taken and the rest.
The same weights in fp32 and bf16 then differ by a mean KL of 1e-5 to 4e-5, 1 % of what a layer adds and 2 to 4 % of a
logit at most; before, it was a KL of up to 0.04. Queries are made longer, because random ones look at all positions
alike, and a wrong score would not be seen.
"""
import json
import os
import random
import re
import struct

SEED = os.environ.get("SEED", "1")
FORMATS = ["bf16", "f16", "f32", "modelopt-nvfp4", "modelopt-w4a16", "modelopt-mixed", "modelopt-fp8", "fp8-block",
           "fp8-channel", "ct-nvfp4", "ct-nvfp4a16", "ct-mixed"]
HIDDEN = [64, 80, 144, 208, 272, 400, 528, 656, 1040]
EXPERTS = [1, 2, 3, 7, 16, 33, 60, 128, 257, 300, 512, 0, 0, 0]  # 0: dense
HEADS = [(1, 1), (2, 1), (3, 3), (4, 2), (5, 5), (6, 3), (7, 1), (8, 1), (9, 3), (10, 2), (12, 1), (12, 4), (16, 2), (20, 2),
         (24, 2)]
MOST_PARAMETERS = 24_000_000


class Failure(Exception):
    pass


class Refused(Exception):
    pass


# ---- drawing

def deal(name, values, index):
    """As from a shuffled pack of cards: all values come up."""
    turn, place = divmod(index, len(values))
    return random.Random(f"{SEED}/{name}/{turn}").sample(values, len(values))[place]


def draw(rng, index, experts, heads, odd):
    """Options of `generate`, and what is changed in config.json afterwards. Now and then something that a GPU has no
    kernels for (heads of 96, 3 taps, sizes that are no multiples of 16): it must be refused with what is wanted, and then
    the model is drawn again without such."""
    odd = odd and rng.random() < 0.3
    o = {"format": deal("format", FORMATS, index)}
    nvfp4 = "nvfp4" in o["format"] or "w4a16" in o["format"] or "mixed" in o["format"]
    o["hidden"] = deal("hidden", HIDDEN, index)
    if odd and not nvfp4 and rng.random() < 0.3:
        o["hidden"] -= 8
    o["layers"] = rng.choice([2, 3, 3, 4])
    o["attention-interval"] = rng.choice([1, 2, 2, 3, 4, 5])
    o["vocab"] = rng.choice([97, 131, 257, 509, 1003, 1024, 1201])
    o["head-dim"] = 96 if odd and rng.random() < 0.25 else deal("head-dim", [64, 128, 256], index)
    o["heads"], o["kv-heads"] = heads
    dims = [16, 32, 48, 64, 80, 96, 128, 128, 192, 256] + ([24, 40] if odd else [])
    o["linear-key-dim"], o["linear-value-dim"] = rng.choice(dims), rng.choice(dims)
    o["linear-key-heads"] = rng.choice([1, 2, 3, 4, 5])
    o["linear-value-heads"] = o["linear-key-heads"] * rng.choice([1, 2, 2, 3, 4])
    o["conv-taps"] = rng.choice([4, 4, 3, 2]) if odd else 4
    widths = [16, 48, 80, 112, 208, 256, 320] + ([] if nvfp4 else [20, 40, 72])
    if experts == 0:
        o["intermediate"] = rng.choice([80, 208, 400, 1040] + ([] if nvfp4 else [72, 200, 1000]))
    else:
        o["experts"] = experts
        o["top-k"] = min(experts, rng.choice([1, 2, 3, 4, 6, 8, 10, 16, 24]))
        o["moe-intermediate"] = width = rng.choice(widths)
        o["shared-intermediate"] = rng.choice([0, width, 2 * width, 3 * width, 48, 80, 176])
        o["dead-experts"] = min(rng.choice([0, 0, 0, 1, 2]), o["experts"] - 1)
    flags = deal("mtp", [[], [], [], ["no-mtp"]], index).copy()
    flags += [name for name, part in (("tied", 0.25), ("kv-scales", 0.2), ("visual", 0.2)) if rng.random() < part]
    if "experts" in o:
        flags += rng.choice([[], [], ["fused-experts"], ["per-expert"]])
    o["prefix"] = rng.choice(["model.language_model.", "language_model.model.", "model.", "none"])
    o["quantized"] = rng.choice(["all", "all", "all", "experts"])
    o["shards"] = rng.choice([1, 1, 2, 3])
    o["seed"] = rng.randrange(1 << 32)
    rotary = [r for r in (16, 32, 64, 128, 256) if r <= o["head-dim"]] + [o["head-dim"] * 3 // 4]
    edits = {"partial_rotary_factor": rng.choice(rotary + ([8] if odd else [])) / o["head-dim"],
             "rope_theta": rng.choice([1e4, 1e6, 1e7]), "rms_norm_eps": rng.choice([1e-6, 1e-6, 1e-5]),
             "norm_topk_prob": rng.random() < 0.75}
    return o, flags, edits


def parameters(o, flags):
    layers = o["layers"] + ("no-mtp" not in flags)
    channels = 3 * o["hidden"] * (o["experts"] * o["moe-intermediate"] if "experts" in o else o["intermediate"])
    mixer = o["hidden"] * (3 * o["heads"] * o["head-dim"] + 2 * o["linear-key-heads"] * o["linear-key-dim"] +
                           3 * o["linear-value-heads"] * o["linear-value-dim"])
    return layers * (channels + mixer) + 2 * o["vocab"] * o["hidden"]


def has_attention(o, flags):
    return "no-mtp" not in flags or o["layers"] >= o["attention-interval"]


def splits_in_two(o, flags):
    """As docs/ranks.md says: heads divide by the ranks; key heads divide, or are divided."""
    attention = o["heads"] % 2 == 0 and (o["kv-heads"] == 1 or o["kv-heads"] % 2 == 0)
    delta = o["linear-value-heads"] % 2 == 0 and (o["linear-key-heads"] == 1 or o["linear-key-heads"] % 2 == 0)
    return (attention or not has_attention(o, flags)) and (delta or o["attention-interval"] == 1)


def described(o, flags, edits):
    moe = (f"{o['experts']} experts top {o['top-k']} x{o['moe-intermediate']} shared {o['shared-intermediate']}"
           f"{'' if edits['norm_topk_prob'] else ' raw'}" if "experts" in o else f"dense x{o['intermediate']}")
    taps = "" if o["conv-taps"] == 4 else f" taps {o['conv-taps']}"
    return (f"{o['format']}{'' if o['quantized'] == 'all' else '/experts'} h{o['hidden']} {o['layers']}/{o['attention-interval']} "
            f"heads {o['heads']}/{o['kv-heads']}x{o['head-dim']} rot {edits['partial_rotary_factor'] * o['head-dim']:.0f} "
            f"delta {o['linear-key-heads']}/{o['linear-value-heads']} {o['linear-key-dim']}/{o['linear-value-dim']}{taps} "
            f"{moe} vocab {o['vocab']}{''.join(' ' + f for f in flags)}")


# ---- checkpoints

def read_header(data):
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return header, 8 + size


def number(value, dtype):
    if dtype == "F16":
        return struct.pack("<e", value)
    return struct.pack("<f", value)[2 if dtype == "BF16" else 0:]


def give_topics(data, rng, top_k):
    """Writes topics into the embedding, routers and the MTP head's projection of one shard, as the module's text says, and
    longer queries."""
    header, base = read_header(data)
    for name, entry in header.items():
        if name.endswith("q_norm.weight") and entry["dtype"] in ("BF16", "F16", "F32"):
            begin, end = (base + at for at in entry["data_offsets"])
            data[begin:end] = number(2.0, entry["dtype"]) * entry["shape"][0]  # the factor is one more
        if entry["dtype"] not in ("BF16", "F16", "F32") or len(entry["shape"]) != 2:
            continue
        is_table, is_router = name.endswith("embed_tokens.weight"), name.endswith("mlp.gate.weight")
        is_projection = name.endswith("mtp.fc.weight")
        if not (is_table or is_router or is_projection):
            continue
        rows, columns = entry["shape"]
        hidden = columns // 2 if is_projection else columns
        coordinates = 64 if hidden >= 144 else 32
        topics = coordinates // 2
        signs = [[1 - 2 * ((topic & i).bit_count() % 2) for i in range(coordinates)] for topic in range(1, topics + 1)]
        bytes_each = 4 if entry["dtype"] == "F32" else 2
        begin = base + entry["data_offsets"][0]
        if is_table:
            written = [b"".join(number(3.0 * s, entry["dtype"]) for s in row) for row in signs]
            for row in range(rows):
                at = begin + row * columns * bytes_each
                data[at:at + coordinates * bytes_each] = written[rng.randrange(topics)]
        elif is_router:
            # Experts in turns, so that all of them are taken by some topic where there are topics enough.
            order = list(range(rows))
            rng.shuffle(order)
            taken = [{order[(t * top_k + i) % rows] for i in range(top_k)} for t in range(topics)]
            factor = 6.0 / (1.5 * coordinates)
            for row in range(rows):
                votes = [1 if row in t else -1 for t in taken]
                values = [factor * sum(v * s[i] for v, s in zip(votes, signs)) for i in range(coordinates)]
                at = begin + row * columns * bytes_each
                data[at:at + coordinates * bytes_each] = b"".join(number(v, entry["dtype"]) for v in values)
        else:
            for row in range(coordinates):
                at = begin + row * columns * bytes_each
                values = [2.0 if i == row else 0.0 for i in range(columns)]
                data[at:at + columns * bytes_each] = b"".join(number(v, entry["dtype"]) for v in values)


def spell(token):
    return chr(ord("A") + token) if token < 26 else f"t{token};"


def spelled(text):
    found = re.findall(r"[A-Z]|t\d+;", text)
    if "".join(found) != text:
        raise Failure(f"the answer is {text!r}, wanted tokens as they are spelled")
    return [ord(f) - ord("A") if len(f) == 1 else int(f[1:-1]) for f in found]


def finish_checkpoint(folder, o, edits, rng):
    """config.json's other fields, topics, no end token, and a tokenizer in which every token can be told from the text."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    text["rope_parameters"]["partial_rotary_factor"] = edits["partial_rotary_factor"]
    text["rope_parameters"]["rope_theta"] = edits["rope_theta"]
    text["rms_norm_eps"] = edits["rms_norm_eps"]
    if "experts" in o:
        text["norm_topk_prob"] = edits["norm_topk_prob"]
    text.pop("eos_token_id", None)
    path.write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    bytes_as_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": bytes_as_text, "post_processor": None,
        "decoder": bytes_as_text,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {spell(token): token for token in range(o["vocab"])}, "merges": []}}))
    for shard in sorted(folder.glob("*.safetensors")):
        data = bytearray(shard.read_bytes())
        give_topics(data, rng, o.get("top-k", 1))
        shard.write_bytes(data)
