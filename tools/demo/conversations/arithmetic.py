"""Plain arithmetic: + - * / and comparisons; other calculations for every fourth."""
from .calculations import calculation
from .questions import ASK, dress, number, operands
from .split import draw, held_out
from .words import in_words
from .working import work


def arithmetic(rng, split, thinking):
    kind = rng.random()
    if kind < 0.05:
        return comparison(rng, split)
    if kind < 0.11:
        return chain(rng, split)
    if kind < 0.34:
        return calculation(rng, split, thinking)

    def make():
        op = rng.choices("+-*/", (31, 26, 29, 14))[0]
        a, b = operands(rng, op, deep=thinking)
        # Small facts are always in the training split: people ask "2 + 2".
        key = ("arith", op, a, b) if max(a, b) >= 13 else (("small", op, a, b) if split == "eval" else ("arith-train-small",))
        return key, (op, a, b)
    op, a, b = draw(split, make) if split == "eval" else draw_train(make)
    reasoning, short, result = work(op, a, b)
    text = rng.choice(ASK[op])
    if max(a, b) < 100 and rng.random() < 0.07:
        words_a, words_b = in_words(a, rng.random() < 0.7), in_words(b, rng.random() < 0.7)
        text = rng.choice([t for t in ASK[op] if " " in t and not any(c in t for c in "+-*/x×÷=")]).format(a=words_a, b=words_b)
    else:
        text = text.format(a=a, b=b)
    text = dress(rng, text)
    content = f"{a} {op} {b} = {result}" if thinking else short
    return dict(user=text, reasoning=reasoning, content=content, expect={"kind": "number", "value": result})


def draw_train(make):
    while True:
        key, value = make()
        if key[0] == "arith-train-small" or not held_out(key):
            return value


def comparison(rng, split):
    def make():
        a, b = number(rng, rng.choice((2, 3, 3, 4))), number(rng, rng.choice((2, 3, 3, 4)))
        if rng.random() < 0.5:
            b = max(0, a + rng.randrange(-30, 31))
        return ("compare", a, b), (a, b)
    a, b = draw(split, make)
    if a == b:
        b += 1
    larger = rng.random() < 0.6
    word = rng.choice(["larger", "bigger", "greater"] if larger else ["smaller", "less"])
    text = rng.choice(["Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?",
                       "which one is {w}, {a} or {b}"]).format(w=word, a=a, b=b)
    result = max(a, b) if larger else min(a, b)
    reasoning = f"Compare {a} and {b}. {max(a, b)} is more than {min(a, b)}. The {'larger' if larger else 'smaller'} one is {result}."
    return dict(user=text, reasoning=reasoning, content=f"The {word if word != 'less' else 'smaller'} number is {result}",
                expect={"kind": "number", "value": result})


def chain(rng, split):
    def make():
        a, b, c = rng.randrange(1, 100), rng.randrange(1, 100), rng.randrange(1, 60)
        ops = rng.choice(("++", "+-", "-+"))
        if ops == "-+" and a < b:
            a, b = b, a
        if ops == "+-" and a + b < c:
            c = rng.randrange(1, a + b + 1)
        return ("chain", ops, a, b, c), (ops, a, b, c)
    ops, a, b, c = draw(split, make)
    first = a + b if ops[0] == "+" else a - b
    result = first + c if ops[1] == "+" else first - c
    text = rng.choice(["What is {e}?", "{e}", "Calculate {e}.", "{e} = ?", "How much is {e}?", "what is {e}", "Solve {e}"]).format(
        e=f"{a} {ops[0]} {b} {ops[1]} {c}")
    working = f"{a} {ops[0]} {b} = {first}, {first} {ops[1]} {c} = {result}"
    return dict(user=text, reasoning=f"Step by step: {working}.", content=working, expect={"kind": "number", "value": result})
