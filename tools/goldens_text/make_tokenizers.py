"""Trains the small tokenizers of the tests and records what Hugging Face's `tokenizers` makes of generated strings.

Writes tests/text/data/tokenizers/NAME.json and tests/text/data/tokenizer_cases.jsonl. Each tokenizer has the pipeline of
a public family (its normalizer, pre-tokenizer, added-token flags, post-processor, decoder) and a vocabulary of a few
hundred tokens learnt from text of our own. Needs `pip install tokenizers`. Run from anywhere:

    python3 tools/goldens_text/make_tokenizers.py [--cases N] [--out DIR] [--seed S]

A case is one line: {"t": tokenizer, "s": text or "x": hexadecimal bytes, "m": mode, "i": ids, "o": offsets in
characters (flattened; in some cases), "d": decoded (where it differs from the text), "k": decoded without special
tokens (where it differs from "d")}. Modes: absent = as is, "n" = add_special_tokens off, "e" = encode_special_tokens.
"""

import argparse
import json
import pathlib

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from strings import Strings, corpus

QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(pattern if isinstance(pattern, str) else pattern, behavior, invert)


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **options})


def control(names, special=True, **flags):
    return [AddedToken(name, special=special, normalized=flags.pop("normalized", False), **flags) for name in names]


def train(model, text, size, alphabet=(), **options):
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=list(alphabet), show_progress=False, **options)
    model.train_from_iterator(text, trainer)
    return model


def make_byte_level(text, pre_tokenizer, normalizer=None, post=None, size=420):
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, text, size, pre_tokenizers.ByteLevel.alphabet())
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


def whole_words(tokenizer, words):
    """ignore_merges, and words in the vocabulary that no merge makes."""
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = True
    vocabulary = data["model"]["vocab"]
    for word in words:
        vocabulary.setdefault(word, len(vocabulary))
    return Tokenizer.from_str(json.dumps(data))


def bos(tokenizer, token, byte_level_first=False):
    template = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    if byte_level_first:
        template = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    tokenizer.post_processor = template


def build(text):
    out = {}

    plain_post = processors.ByteLevel(trim_offsets=False)
    out["qwen3_5"] = make_byte_level(text, pre_tokenizers.Sequence([split(Regex(QWEN35)), byte_level()]), normalizers.NFC(), plain_post)
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>"]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    out["qwen3_5"].add_special_tokens(control(chatml))
    out["qwen3_5"].add_tokens(control(tags, special=False))

    out["qwen2"] = make_byte_level(text, pre_tokenizers.Sequence([split(Regex(QWEN2)), byte_level()]), normalizers.NFC(), plain_post)
    out["qwen2"].add_special_tokens(control(chatml))

    llama = make_byte_level(text, pre_tokenizers.Sequence([split(Regex(LLAMA3)), byte_level()]))
    llama = whole_words(llama, ["streaming", "Ġanswers", "Ġtokenizerless", "ĠÐ¿ÑĢÐ¸Ð²ÐµÑĤ"])
    llama.add_special_tokens(control(["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]))
    bos(llama, "<|begin_of_text|>", byte_level_first=True)
    out["llama3"] = llama

    gpt2 = make_byte_level(
        text, byte_level(add_prefix_space=True, use_regex=True), post=processors.ByteLevel(add_prefix_space=True, trim_offsets=True)
    )
    gpt2.add_special_tokens(control(["<|endoftext|>"]))
    gpt2.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<both>", lstrip=True, rstrip=True, normalized=False, special=True),
            AddedToken("word", single_word=True, normalized=True),
            AddedToken("  ", normalized=False),
            AddedToken("<ab", normalized=False),
            AddedToken("<abc>", normalized=True),
        ]
    )
    out["gpt2"] = gpt2

    deepseek = make_byte_level(
        text,
        pre_tokenizers.Sequence(
            [split(Regex(r"\p{N}{1,3}")), split(Regex("[一-龥\u3040-ゟ゠-ヿ]+")), split(Regex(DEEPSEEK)), byte_level()]
        ),
        normalizers.Sequence([]),
    )
    deepseek.add_special_tokens(control(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]))
    deepseek.add_tokens(control(["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"], special=False, normalized=True))
    deepseek.add_tokens(control(["<think>", "</think>"], special=False))
    bos(deepseek, "<｜begin▁of▁sentence｜>")
    out["deepseek"] = deepseek

    tekken = make_byte_level(text, pre_tokenizers.Sequence([split(Regex(TEKKEN)), byte_level()]))
    tekken = whole_words(tekken, ["Ġwhile", "HTTPServer", "ĠÃ©tÃ©"])
    tekken.add_special_tokens(control(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"]))
    bos(tekken, "<s>")
    out["tekken"] = tekken

    harmony = make_byte_level(text, pre_tokenizers.Sequence([split(Regex(O200K)), byte_level()]), post=processors.ByteLevel(trim_offsets=True))
    harmony.add_special_tokens(control(["<|startoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]))
    out["gpt_oss"] = harmony

    # Digits apart, compatibility forms, lower case, a prefix space, and tokens matched after normalization.
    digits = make_byte_level(
        text,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True, add_prefix_space=True)]),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")]),
        processors.ByteLevel(add_prefix_space=True, trim_offsets=True),
        size=380,
    )
    digits.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=True), AddedToken("[SEP]", normalized=False)])
    digits.add_tokens([AddedToken("Ångström", normalized=True, single_word=True)])
    out["nfkc_digits"] = digits

    # SentencePiece converted: characters, byte fallback, unknown tokens fused.
    spm = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spm.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spm.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    train(trained, text, 430, limit_alphabet=110)
    data, learnt = json.loads(spm.to_str()), json.loads(trained.to_str())["model"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for token in learnt["vocab"]:
        vocabulary.setdefault(token, len(vocabulary))
    data["model"]["vocab"], data["model"]["merges"] = vocabulary, learnt["merges"]
    spm = Tokenizer.from_str(json.dumps(data))
    spm.add_special_tokens(control(["<unk>", "<s>", "</s>"]))
    bos(spm, "<s>")
    out["spm_bytes"] = spm

    # The same without byte fallback, with Metaspace, and with merges written the old way as strings.
    data["model"]["byte_fallback"], data["normalizer"] = False, None
    for byte in range(256):
        del vocabulary[f"<0x{byte:02X}>"]
    data["model"]["vocab"] = {token: i for i, token in enumerate(vocabulary)}
    data["model"]["merges"] = ["#version: 0.2"] + [" ".join(pair) for pair in learnt["merges"]]
    data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    data["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    metaspace = Tokenizer.from_str(json.dumps(data))
    metaspace.add_special_tokens(control(["<unk>", "<s>", "</s>"]))
    out["metaspace"] = metaspace

    # The behaviours of Split.
    out["split_behaviors"] = make_byte_level(
        text,
        pre_tokenizers.Sequence(
            [
                split("!", "merged_with_previous"),
                split(Regex(r"\s"), "merged_with_next"),
                split(Regex(r"[\p{P}\p{S}]"), "contiguous"),
                split(Regex(r"[\w\s\p{P}\p{S}]+"), "removed", invert=True),
                split(Regex(r"\d{2}+|\h\H?"), "isolated"),
                byte_level(),
            ]
        ),
        normalizers.NFD(),
        size=360,
    )
    out["split_behaviors"].add_tokens([AddedToken("é", normalized=True), AddedToken("e\u0301!", normalized=False)])
    return out


def record(name, tokenizer, strings, count):
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for number in range(count):
        case = {"t": name}
        if number % 20 == 19:
            raw = strings.invalid_bytes()
            text = raw.decode("utf-8", errors="replace")
            case["x"] = raw.hex()
        else:
            text = strings.string() if number % 50 else strings.string(60)
            case["s"] = text
        mode = "n" if number % 7 == 3 else "e" if number % 7 == 5 and special else ""
        if mode:
            case["m"] = mode
        tokenizer.encode_special_tokens = mode == "e"
        encoding = tokenizer.encode(text, add_special_tokens=mode != "n")
        tokenizer.encode_special_tokens = False
        case["i"] = encoding.ids
        if number % 3 == 0:
            case["o"] = [x for pair in encoding.offsets for x in pair]
        decoded = tokenizer.decode(encoding.ids, skip_special_tokens=False)
        if decoded != text:
            case["d"] = decoded
        skipped = tokenizer.decode(encoding.ids, skip_special_tokens=True)
        if skipped != decoded:
            case["k"] = skipped
        yield case


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=11000, help="strings in all (default 11000)")
    parser.add_argument("--out", type=pathlib.Path, default=root / "tests/text/data", help="output folder")
    parser.add_argument("--seed", type=int, default=7, help="seed of the strings (default 7)")
    parser.add_argument("--tokenizers", type=pathlib.Path, help="use the tokenizer files of this folder, do not train")
    options = parser.parse_args()
    if options.tokenizers:
        built = {path.stem: Tokenizer.from_file(str(path)) for path in sorted(options.tokenizers.glob("*.json"))}
    else:
        built = build(corpus())
        (options.out / "tokenizers").mkdir(parents=True, exist_ok=True)
        for name, tokenizer in built.items():
            data = json.loads(tokenizer.to_str())
            if name in ("metaspace", "gpt2"):  # the old form of merges
                data["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
            path = options.out / "tokenizers" / f"{name}.json"
            path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
            built[name] = Tokenizer.from_file(str(path))
    options.out.mkdir(parents=True, exist_ok=True)
    total = 0
    with open(options.out / "tokenizer_cases.jsonl", "w", encoding="utf-8") as file:
        for number, (name, tokenizer) in enumerate(sorted(built.items())):
            added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            strings = Strings(options.seed * 1000 + number, added)
            for case in record(name, tokenizer, strings, -(-options.cases // len(built))):
                file.write(json.dumps(case, ensure_ascii=False, separators=(",", ":")) + "\n")
                total += 1
    print(f"{len(built)} tokenizers, {total} cases, tokenizers {tokenizers.__version__}")


if __name__ == "__main__":
    main()
