"""The held-out split: a key (operands, entity combination, ...) is held out when its hash says so, in every task alike."""
import hashlib

HELD_OUT_PERCENT = 6


def held_out(key):
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def draw(split, make):
    """Calls make() (which returns (key, value)) until the key falls in `split` ("train" or "eval")."""
    for _ in range(20000):
        key, value = make()
        if held_out(key) == (split == "eval"):
            return value
    raise RuntimeError(f"no {split} key among 20000 draws, the last was {key!r}")
