"""Strings that are hard on tokenizers, from a seeded generator. Used by the scripts beside it; not run on its own."""

import random
import unicodedata

WORDS = {
    "latin": "the quick brown fox jumps over lazy dogs and then reads a token of text while streaming answers".split(),
    "accents": "café naïve Ångström façade über señor příliš žluťoučký kůň œuvre İstanbul ıslak Straße".split(),
    "cyrillic": "привет мир модель читает слова быстро Ёлка йод".split(),
    "greek": "Καλημέρα κόσμε λόγος ὀδός ΑΣΣΟΣ".split(),
    "arabic": "مرحبا بالعالم النص العربي هٰذا".split(),
    "hebrew": "שלום עולם בְּרֵאשִׁית".split(),
    "devanagari": "नमस्ते दुनिया हिन्दी क्षेत्र".split(),
    "thai": "สวัสดี ชาวโลก น้ำ".split(),
    "cjk": "你好 世界 漢字 東京都 人工智能 ひらがな カタカナ ガギグ 한국어 안녕".split(),
    "jamo": ["\u1112\u1161\u11ab", "\u1100\u1161", "\u1100\u1161\u11a8\u11a8", "\ud55c\u11ab"],
    "emoji": ["😀", "👩\u200d👩\u200d👧", "🇫🇷", "👍🏽", "❤\ufe0f", "☕", "\U0001faf6"],
}
COMBINING = ["\u0301", "\u0300", "\u0323", "\u0308", "\u0327", "\u031b", "\u0345", "\u0483", "\u20dd", "\u0e48", "\u05b0"]
BASES = ["e", "o", "a", "A", "u", "q", "\u1ea1", "\u212b", "\u2126", "\u1e9b", "\u00f4", "\u0928", "\u09c7", "x"]
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["...", "--", "=>", "//", "«", "»", "“", "”", "、", "。", "…", "—"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\r", " \n", "\n ", "\t\t", "\u00a0", "\u3000", "\u2009", "\u180e",
          "\u0085", "\u2028", "\u200b", "\x0b", "\x0c"]
NUMBERS = ["0", "7", "12", "345", "2024", "3.14159", "1,000,000", "१२३", "٣٤", "Ⅳ", "½", "²", "①", "0x1F", "1e-5"]
CONTRACTIONS = ["I'm", "you're", "it's", "WE'LL", "don't", "he'D", "they've", "'S", "x'\u017f", "can'T", "'tis", "'re'"]
SPECIAL_CHARS = ["\x00", "\x01", "\x1b", "\x7f", "\ufeff", "\ufffd", "\u200d", "\u2060", "\ufb01", "\u01c5", "\u0130",
                 "\u0149", "\u1f88", "\U0001d49c", "\U00020000", "\U0002f800", "\ue000", "\U0010fffd", "\u0378"]
CODE = ["def f(x):\n    return x+1\n", "for (int i = 0; i < n; ++i) {\n\ta[i] = i;\n}", "{\"key\": [1, 2.5, null]}",
        "<div class=\"a\">", "SELECT * FROM t;", "snake_case_name", "camelCaseName", "HTTPServer2", "path/to/file.txt"]


class Strings:
    def __init__(self, seed, added=()):
        self.random = random.Random(seed)
        self.added = list(added)

    def random_char(self):
        r = self.random
        while True:
            top = r.choice([0x80, 0x250, 0x800, 0x3000, 0x10000, 0x20000, 0x110000])
            c = r.randrange(top)
            # Characters in Unicode 3.2: libraries differ on later ones.
            if not 0xD800 <= c < 0xE000 and unicodedata.ucd_3_2_0.category(chr(c)) != "Cn":
                return chr(c)

    def piece(self):
        r = self.random
        kind = r.random()
        if kind < 0.30:
            word = r.choice(WORDS[r.choice(["latin"] * 4 + list(WORDS))])
            change = r.random()
            return word.upper() if change < 0.08 else word.capitalize() if change < 0.2 else word
        if kind < 0.50:
            return r.choice(SPACES[:4] + SPACES)
        if kind < 0.60:
            return "".join(r.choice(PUNCTUATION) for _ in range(r.randint(1, 3)))
        if kind < 0.68:
            return r.choice(NUMBERS)
        if kind < 0.73:
            return r.choice(CONTRACTIONS)
        if kind < 0.80:
            return r.choice(BASES) + "".join(r.choice(COMBINING) for _ in range(r.randint(1, 3)))
        if kind < 0.84:
            return r.choice(SPECIAL_CHARS)
        if kind < 0.88:
            return self.random_char()
        if kind < 0.90:
            return r.choice(CODE)
        if kind < 0.92:
            return r.choice(SPACES) * r.randint(2, 9)
        if not self.added:
            return "<|x|>"
        token = r.choice(self.added)
        if kind < 0.98:
            return r.choice(["", "", " ", "  ", "\n"]) + token + r.choice(["", "", " ", "  ", "a"])
        return token[: r.randint(1, len(token))]

    def string(self, pieces=None):
        r = self.random
        if pieces is None:
            pieces = r.choice([1, 1, 2, 3, 4, 5, 6, 8, 10])
        parts = []
        for _ in range(pieces):
            parts.append(self.piece())
            if r.random() < 0.45:
                parts.append(" ")
        return "".join(parts)

    def sentence(self):
        r = self.random
        words = [r.choice(WORDS["latin"]) for _ in range(r.randint(4, 14))]
        return " ".join(words).capitalize() + r.choice(".!?")

    def invalid_bytes(self):
        """Bytes that are not valid UTF-8: cuts, overlong forms, surrogates, stray continuation bytes."""
        r = self.random
        out = bytearray(self.string().encode())
        for _ in range(r.randint(1, 3)):
            at = r.randrange(len(out) + 1)
            change = r.random()
            if change < 0.4 and out:
                del out[min(at, len(out) - 1)]
            elif change < 0.7:
                out[at:at] = r.choice([b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xe2\x82", b"\x80", b"\xf5\x80",
                                       b"\xf4\x90\x80\x80", b"\xe0\x80\x80"])
            else:
                out[at:at] = bytes([r.randrange(256)])
        return bytes(out)


def corpus(seed=1, lines=4000):
    """Training text: mostly plain sentences of our own words in many scripts, some code and numbers."""
    strings = Strings(seed)
    r = strings.random
    out = []
    for _ in range(lines):
        if r.random() < 0.5:
            out.append(strings.sentence())
        else:
            script = r.choice(list(WORDS))
            out.append(" ".join(r.choice(WORDS[script]) for _ in range(r.randint(2, 8))) + " " + strings.string())
    return out
