"""Plain arithmetic: phrasings of + - * / and comparisons, with the working a person would write."""
import more_arithmetic
from split import draw
from words import in_words


def column_add(a, b):
    """347 + 285 digit by digit: the text of the working."""
    x, y, carry, parts, place = a, b, 0, [], 0
    while x or y or place == 0:
        da, db = x % 10, y % 10
        total = da + db + carry
        text = f"{da} + {db}" + (f" + {carry}" if carry else "") + f" = {total}"
        x, y = x // 10, y // 10
        if x or y:
            text += f", write {total % 10}" + (" carry 1" if total > 9 else "")
        carry = total // 10
        parts.append(text)
        place += 1
    return "; ".join(parts)


def column_sub(a, b):
    """a - b with a >= b, digit by digit."""
    x, y, borrow, parts, place = a, b, 0, [], 0
    while x or y or place == 0:
        da, db = x % 10, y % 10
        x, y = x // 10, y // 10
        need = db + borrow
        text = f"{da} - {db}" + (" - 1" if borrow else "")
        if da < need:
            text += f", borrow: {da + 10 - need}"
            borrow = 1
        else:
            text += f" = {da - need}"
            borrow = 0
        parts.append(text)
        place += 1
    return "; ".join(parts)


def times_digit(a, d):
    """a * d split by place: "20 * 7 = 140, 3 * 7 = 21, 140 + 21 = 161"."""
    pieces, scale, rest = [], 1, a
    while rest:
        if rest % 10:
            pieces.append(rest % 10 * scale)
        rest //= 10
        scale *= 10
    pieces.reverse()
    if not pieces:
        return f"{a} * {d} = 0"
    if len(pieces) == 1:
        return f"{a} * {d} = {a * d}"
    text = ", ".join(f"{p} * {d} = {p * d}" for p in pieces)
    total = pieces[0] * d
    for p in pieces[1:]:
        text += f", {total} + {p * d} = {total + p * d}"
        total += p * d
    return text


def long_division(a, b):
    """a / b for a one-digit or two-digit b, digit by digit from the left."""
    rest, parts, started = 0, [], False
    for digit in str(a):
        rest = rest * 10 + int(digit)
        q = rest // b
        if q or started:
            parts.append(f"{rest} / {b} = {q} rest {rest - q * b}")
            started = True
        rest -= q * b
    return "; ".join(parts) if parts else f"{a} / {b} = 0"


def work(op, a, b):
    """(thinking text, short working for answers without thinking, result)."""
    if op == "+":
        return f"{a} + {b}: {column_add(a, b)}. Result {a + b}.", f"{a} + {b} = {a + b}", a + b
    if op == "-":
        if a >= b:
            return f"{a} - {b}: {column_sub(a, b)}. Result {a - b}.", f"{a} - {b} = {a - b}", a - b
        return (f"{a} is less than {b}, so the result is negative. {b} - {a}: {column_sub(b, a)}. Result {a - b}.",
                f"{a} - {b} = {a - b}", a - b)
    if op == "*":
        if a < 10 <= b:
            return f"{a} * {b} = {b} * {a}: {times_digit(b, a)}. Result {a * b}.", direct_product(a, b), a * b
        if b < 10:
            text = times_digit(a, b)
            return f"{a} * {b}: {text}. Result {a * b}.", direct_product(a, b), a * b
        tens, ones = b // 10 * 10, b % 10
        if ones == 0:
            return (f"{a} * {b}: {times_digit(a, b // 10)}, with a zero {a * b}. Result {a * b}.", direct_product(a, b), a * b)
        high, low = a * tens, a * ones
        text = (f"{a} * {b}: {a} * {ones}: {times_digit(a, ones)}. {a} * {b // 10}: {times_digit(a, b // 10)}, with a zero {high}. "
                f"{high} + {low}: {column_add(high, low)}. Result {a * b}.")
        return text, direct_product(a, b), a * b
    text = long_division(a, b)
    return f"{a} / {b}: {text}. Result {a // b}.", f"{a} / {b} = {a // b}", a // b


def direct_product(a, b):
    """The short working shown without thinking; small facts need none."""
    if max(a, b) <= 12 or min(a, b) < 2 or round_number(a) or round_number(b) and (b == 10 or a < 13):
        return f"{a} * {b} = {a * b}"
    if min(a, b) < 10:
        many, few = max(a, b), min(a, b)
        tens, ones = many // 10 * 10, many % 10
        if not ones:
            return f"{a} * {b} = {a * b}"
        return f"{a} * {b} = {tens} * {few} + {ones} * {few} = {tens * few} + {ones * few} = {a * b}"
    tens, ones = b // 10 * 10, b % 10
    parts = f"{a} * {b} = {a} * {tens} + {a} * {ones}. " if ones else ""

    def part(d):
        high, low = a // 10 * 10, a % 10
        return f"{a} * {d} = {high * d} + {low * d} = {a * d}" if low and high else f"{a} * {d} = {a * d}"
    if not ones:
        return part(tens)
    return f"{parts}{part(tens)}. {part(ones)}. {a * tens} + {a * ones} = {a * b}"


def round_number(n):
    return n in (10, 100, 1000)


ASK = {
    "+": ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=", "what's {a} + {b}", "Whats {a}+{b}?", "Add {a} and {b}.",
          "What is {a} plus {b}?", "{a} plus {b}", "How much is {a} plus {b}?", "How much is {a} + {b}?", "Calculate {a} + {b}.",
          "Compute {a} + {b}", "What is the sum of {a} and {b}?", "Give me the sum of {a} and {b}.", "Please add {a} and {b}.",
          "Can you add {a} and {b}?", "Can you tell me what {a} + {b} is?", "I need to know {a} + {b}.", "Solve {a} + {b}", "what is {a}+{b}?",
          "Find {a} + {b}.", "What do you get if you add {a} and {b}?", "Tell me {a} plus {b} please"],
    "-": ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a}-{b}=", "what's {a} - {b}", "Whats {a}-{b}?", "Subtract {b} from {a}.",
          "What is {a} minus {b}?", "{a} minus {b}", "How much is {a} minus {b}?", "How much is {a} - {b}?", "Calculate {a} - {b}.",
          "Compute {a} - {b}", "What is the difference between {a} and {b}?", "Take {b} away from {a}.", "Please subtract {b} from {a}.",
          "Can you tell me what {a} - {b} is?", "I need to know {a} - {b}.", "Solve {a} - {b}", "what is {a}-{b}?", "Find {a} - {b}."],
    "*": ["What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} * {b} = ?", "{a} x {b}", "{a}x{b}", "what's {a} times {b}", "Multiply {a} by {b}.",
          "What is {a} times {b}?", "{a} times {b}", "How much is {a} times {b}?", "How much is {a} * {b}?", "Calculate {a} * {b}.",
          "Compute {a} x {b}", "What is the product of {a} and {b}?", "What is {a} multiplied by {b}?", "Please multiply {a} and {b}.",
          "Can you tell me what {a} * {b} is?", "I need to know {a} times {b}.", "Solve {a} * {b}", "what is {a}×{b}?", "Find {a} × {b}."],
    "/": ["What is {a} / {b}?", "{a} / {b}", "{a}/{b}", "{a} / {b} = ?", "{a} ÷ {b}", "{a}÷{b}", "what's {a} divided by {b}", "Divide {a} by {b}.",
          "What is {a} divided by {b}?", "{a} divided by {b}", "How much is {a} divided by {b}?", "How much is {a} / {b}?",
          "Calculate {a} / {b}.", "Compute {a} / {b}", "Please divide {a} by {b}.", "Can you tell me what {a} / {b} is?", "Solve {a} / {b}"],
}


WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
for _op, _word in WORDS.items():
    ASK[_op] += [f"What does {{a}} {_op} {{b}} equal?", f"{{a}} {_word} {{b}} equals?", f"what's {{a}} {_word} {{b}}?", f"What is the result of {{a}} {_op} {{b}}?", f"Can you calculate {{a}} {_op} {{b}}?",
                 f"{{a}} {_word} {{b}} is?", f"{{a}} {_op} {{b}} is", f"Could you compute {{a}} {_op} {{b}}?", f"how much is {{a}} {_word} {{b}}", f"Work out {{a}} {_op} {{b}}.", f"{{a}} {_op} {{b}}?",
                 f"Do you know what {{a}} {_word} {{b}} is?", f"calculate {{a}}{_op}{{b}}", f"What is {{a}}{_op}{{b}}?", f"Evaluate {{a}} {_op} {{b}}."]
BEFORE = ["Hi, ", "Hey, ", "Hello! ", "Quick question: ", "Please tell me: ", "Can you help me? ", "I have a question. ", "Hi! ", "One more: ", "And ", "ok, ", "Now ", "Tell me, "]
AFTER = [" please", " Thanks!", " Thank you.", " Think step by step.", " Answer with a number.", " (quick)", "?"]


def dress(rng, text):
    """Openings and endings people put around a question."""
    if rng.random() < 0.13:
        text = rng.choice(BEFORE) + text
    if rng.random() < 0.06:
        text = text + rng.choice(AFTER)
    if rng.random() < 0.08:
        text = text.lower()
    return text


def number(rng, digits):
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits)


def operands(rng, op, deep=True):
    """Operands of a sensible size; some at the carries that are hard (999 + 1, 1000 - 7)."""
    if op in "+-" and rng.random() < 0.09:
        top = 10 ** rng.choice((1, 2, 3, 3, 4))
        near = top - rng.choice((0, 1, 1, 1, 2, 3, 5, 10)) if rng.random() < 0.7 else rng.randrange(1, 10) * top - rng.choice((0, 1, 1, 2))
        near = max(near, 1)
        other = rng.choice((1, 1, 1, 2, 3, 5, 7, 9, 10, 11, 99, rng.randrange(1, top + 1)))
        if op == "-":
            return (near, other) if near >= other else (other, near)
        return (near, other) if rng.random() < 0.7 else (other, near)
    if op == "*" and rng.random() < 0.08:
        return (rng.randrange(2, 200), rng.choice((10, 100, 10, 100, 1000))) if rng.random() < 0.7 else (rng.choice((10, 100)), rng.randrange(2, 100))
    if op == "*":
        kind = rng.random()
        if kind < 0.24:
            return rng.randrange(0, 13), rng.randrange(0, 13)
        if kind < 0.48:
            a, b = rng.randrange(10, 100), rng.randrange(2, 10)
        elif kind < 0.55:
            a, b = rng.randrange(100, 1000), rng.randrange(2, 10)
        elif kind < 0.62 and deep:
            return rng.randrange(100, 1000), rng.randrange(10, 100)
        elif kind < 0.75:
            return rng.randrange(10, 26), rng.randrange(10, 26)
        else:
            return rng.randrange(10, 100), rng.randrange(10, 100)
        return (a, b) if rng.random() < 0.65 else (b, a)
    if op == "/":
        kind = rng.random()
        if kind < 0.3:
            b = rng.randrange(1, 13)
            return b * rng.randrange(0, 13), b
        if kind < 0.8:
            b = rng.randrange(2, 10)
            return b * rng.randrange(10, 200), b
        b = rng.choice((10, 100, 20, 50)) if rng.random() < 0.3 else rng.randrange(10, 13 if not deep else 31)
        return b * rng.randrange(1, 20 if not deep else 40), b
    digits = rng.choices((1, 2, 3, 4, 5, 6) if deep else (1, 2, 3, 4, 5, 5), (14, 36, 32, 11, 5, 2))[0]
    a, b = number(rng, digits), number(rng, max(1, digits - rng.choice((0, 0, 0, 1, 2))))
    if op == "-" and a < b and rng.random() < 0.75:
        a, b = b, a
    elif op == "+" and rng.random() < 0.5:
        a, b = b, a
    return a, b


def arithmetic(rng, split, thinking):
    kind = rng.random()
    if kind < 0.05:
        return comparison(rng, split)
    if kind < 0.11:
        return chain(rng, split)
    if kind < 0.34:
        return more_arithmetic.more(rng, split, thinking)

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
    from split import held_out
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
