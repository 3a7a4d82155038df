"""Trains the demo tokenizer (byte-level BPE with the pre-tokenisation of Qwen3.5) on generated conversations.

  python3 tools/demo/make_tokenizer.py models/demo    writes tokenizer.json and tokenizer_config.json
"""
import argparse
import json
import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import data
from conversations import small_talk, words

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
VOCABULARY = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
           "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
         "<tool_response>", "</tool_response>", "<think>", "</think>"]
LATE = ["<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"]
ADDED = [(t, True) for t in SPECIAL] + [(t, False) for t in PLAIN] + [(t, True) for t in LATE]


def corpus(count):
    marks = [t for t, _ in ADDED]
    for prompt, completion in data.texts(77, "train", count):
        text = prompt + completion
        for mark in marks:
            text = text.replace(mark, "\n")
        yield text
    rng = random.Random(4)
    for _ in range(count // 10):  # letters of words nobody has seen
        yield " ".join(words.made_up(rng, rng.random() < 0.5) for _ in range(8))
    yield " ".join(small_talk.OUT_OF_SCOPE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--conversations", type=int, default=30000)
    args = parser.parse_args()
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(ADDED), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
                                  special_tokens=[], min_frequency=4)
    tok.train_from_iterator(corpus(args.conversations), trainer)
    base = tok.get_vocab_size()
    tok.add_tokens([AddedToken(t, special=s, normalized=False) for t, s in ADDED])
    os.makedirs(args.out, exist_ok=True)
    tok.save(os.path.join(args.out, "tokenizer.json"))
    decoder = {str(base + i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": s}
               for i, (t, s) in enumerate(ADDED)}
    config = {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": decoder,
              "additional_special_tokens": [t for t, s in ADDED if s and t != "<|endoftext|>"], "bos_token": None,
              "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 4096,
              "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen3_5Tokenizer", "unk_token": None}
    with open(os.path.join(args.out, "tokenizer_config.json"), "w") as f:
        json.dump(config, f, indent=2, ensure_ascii=False)
        f.write("\n")
    ids = [len(tok.encode(p + c).ids) for p, c in data.texts(1, "train", 500)]
    print(f"{base} base tokens + {len(ADDED)} added; mean {sum(ids) / len(ids):.0f} tokens per conversation, longest {max(ids)}")


if __name__ == "__main__":
    main()
