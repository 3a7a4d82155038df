"""Gives a generated checkpoint the demo model's tokenizer and template, filled up with words nobody writes to its vocabulary."""
import json
import pathlib
import shutil
import sys

demo, checkpoint = map(pathlib.Path, sys.argv[1:])
config = json.loads((checkpoint / "config.json").read_text())
vocabulary = config.get("text_config", config)["vocab_size"]
tokenizer = json.loads((demo / "tokenizer.json").read_text())
vocab = tokenizer["model"]["vocab"]
taken = len(vocab) + len(tokenizer["added_tokens"])
for token in range(taken, vocabulary):
    letters, rest = "", token
    while rest:
        letters += chr(ord("a") + rest % 26)
        rest //= 26
    vocab["\u0120q" + letters + "q"] = token
(checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
for name in ("tokenizer_config.json", "chat_template.jinja"):
    shutil.copy(demo / name, checkpoint / name)
