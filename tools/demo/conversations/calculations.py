"""Remainders, percentages, precedence, squares and roots, counting, even and odd, follow-up questions, and what the model declines."""
from .questions import ASK, WORDS, dress, number, operands
from .split import draw
from .working import direct_product, long_division, work

WHOLE = "I can only calculate with whole numbers."
ZERO = "A number cannot be divided by zero."


def text_item(user, reasoning, content):
    return dict(user=user, reasoning=reasoning, content=content, expect={"kind": "text", "value": content})


def number_item(user, reasoning, content, value, **more):
    return dict(user=user, reasoning=reasoning, content=content, expect={"kind": "number", "value": value}, **more)


def remainder(rng, split, thinking):
    def make():
        b = rng.randrange(2, 10) if rng.random() < 0.85 else rng.randrange(10, 13)
        a = rng.randrange(b, b * 12) if rng.random() < 0.6 or not thinking and b > 9 else number(rng, rng.choice((2, 3, 3)))
        if a % b == 0:
            a += 1
        return ("remainder", a, b), (a, b)
    a, b = draw(split, make)
    q, r = divmod(a, b)
    working = f"{a} / {b}: {long_division(a, b)}."
    if rng.random() < 0.35:
        user = rng.choice(["What is the remainder of {a} divided by {b}?", "What is the remainder when {a} is divided by {b}?", "{a} mod {b}", "What is {a} mod {b}?", "remainder of {a} / {b}", "What is {a} modulo {b}?"])
        return number_item(user.format(a=a, b=b), working + f" Remainder {r}.", f"{q} * {b} = {q * b}, {a} - {q * b} = {r}. The remainder is {r}" if not thinking else f"The remainder is {r}", r)
    user = rng.choice(ASK["/"] + ["What is {a} divided by {b} with remainder?", "{a} / {b} with remainder", "Divide {a} by {b} with remainder."]).format(a=a, b=b)
    return text_item(user, working + f" Remainder {r}.", f"{a} / {b} = {q} remainder {r}")


def percent(rng, split, thinking):
    def make():
        p = rng.choice((1, 5, 10, 10, 20, 20, 25, 30, 40, 50, 50, 60, 70, 75, 80, 90, 100, 0))
        if p == 0:
            p, n = rng.randrange(2, 100), rng.randrange(1, 10) * 100
        elif p in (25, 75):
            n = 4 * rng.randrange(1, 101)
        elif p == 50:
            n = 2 * rng.randrange(1, 250)
        elif p == 5:
            n = 20 * rng.randrange(1, 51)
        elif p == 1:
            n = 100 * rng.randrange(1, 30)
        elif p == 100:
            n = rng.randrange(1, 500)
        elif p in (20, 40, 60, 80) and rng.random() < 0.3:
            n = 5 * rng.randrange(1, 60)
        else:
            n = 10 * rng.randrange(1, 100)
        return ("percent", p, n), (p, n)
    p, n = draw(split, make)
    r = p * n // 100
    if p == 100:
        work = f"all of {n} = {n}"
    elif p == 50:
        work = f"{n} / 2 = {r}"
    elif p in (25, 75):
        work = f"{n} / 4 = {n // 4}" + (f", {n // 4} * 3 = {r}" if p == 75 else "")
    elif p % 10 == 0 and n % 10 == 0:
        work = f"{n} / 10 = {n // 10}" + (f", {n // 10} * {p // 10} = {r}" if p > 10 else "")
    elif p % 20 == 0:
        work = f"{n} / 5 = {n // 5}" + (f", {n // 5} * {p // 20} = {r}" if p > 20 else "")
    elif p == 5:
        work = f"{n} / 10 = {n // 10}, {n // 10} / 2 = {r}"
    else:
        k = n // 100
        work = f"{n} / 100 = {k}" + (f", {p} * {k} = {r}" if p > 1 else "")
    user = rng.choice(["What is {p} % of {n}?", "{p} % of {n}", "{p}% of {n}", "What is {p}% of {n}?", "How much is {p}% of {n}?", "Calculate {p}% of {n}.", "what's {p} percent of {n}", "What is {p} percent of {n}?", "{p} percent of {n}",
                       "Find {p}% of {n}.", "What's {p}% of {n}?", "Can you tell me {p}% of {n}?"]).format(p=p, n=n)
    return number_item(user, f"{p} % of {n}: {work}. Result {r}.", f"{p} % of {n} is {r}" if thinking else f"{work}. {p} % of {n} is {r}", r)


def precedence(rng, split, thinking):
    def make():
        form = rng.randrange(6)
        a, b, c = rng.randrange(1, 13), rng.randrange(1, 13), rng.randrange(2, 10)
        if form in (0, 1, 4):
            a = rng.randrange(1, 60)
        return ("precedence", form, a, b, c), (form, a, b, c)
    form, a, b, c = draw(split, make)
    bc, ab = b * c, a * b
    if form == 0:
        e, steps, r = f"{a} + {b} * {c}", [f"{b} * {c} = {bc}", f"{a} + {bc} = {a + bc}"], a + bc
    elif form == 1:
        a += bc
        e, steps, r = f"{a} - {b} * {c}", [f"{b} * {c} = {bc}", f"{a} - {bc} = {a - bc}"], a - bc
    elif form == 2:
        e, steps, r = f"({a} + {b}) * {c}", [f"{a} + {b} = {a + b}", f"{a + b} * {c} = {(a + b) * c}"], (a + b) * c
    elif form == 3:
        e, steps, r = f"{a} * ({b} + {c})", [f"{b} + {c} = {b + c}", f"{a} * {b + c} = {a * (b + c)}"], a * (b + c)
    elif form == 4:
        a = a % 13
        ab = a * b
        e, steps, r = f"{a} * {b} + {c}", [f"{a} * {b} = {ab}", f"{ab} + {c} = {ab + c}"], ab + c
    else:
        a = max(a, 2)
        ab = a * b
        e, steps, r = f"{a} * {b} * {c}", [f"{a} * {b} = {ab}", f"{ab} * {c} = {ab * c}"], ab * c
    if rng.random() < 0.2:
        e = e.replace(" ", "")
    user = rng.choice(["What is {e}?", "{e}", "Calculate {e}.", "{e} = ?", "How much is {e}?", "what is {e}", "Solve {e}", "Compute {e}", "{e}="]).format(e=e)
    working = ", ".join(steps)
    return number_item(user, f"Step by step: {working}.", working, r)


def powers(rng, split, thinking):
    def make():
        form = rng.randrange(6)
        n = rng.randrange(1, 26) if form < 2 else rng.randrange(1, 21) if form == 2 else rng.randrange(1, 200)
        return ("powers", form, n) if split == "eval" and form > 2 else ("powers-train",) if split == "train" and n < 13 else ("powers", form, n), (form, n)
    if split == "train":
        form = rng.randrange(6)
        n = rng.randrange(1, 26) if form < 2 else rng.randrange(1, 21) if form == 2 else rng.randrange(1, 200)
    else:
        form, n = draw(split, make)
        if form == 2:
            form = 3
    if form < 2:
        user = rng.choice(["What is {n} squared?", "{n} squared", "{n}^2", "What is {n}^2?", "What is the square of {n}?", "{n} to the power of 2", "Square {n}.", "{n}²", "Calculate {n} squared."]).format(n=n)
        reasoning, short, r = work("*", n, n)
        return number_item(user, reasoning, f"{n} * {n} = {r}" if thinking else direct_product(n, n), r)
    if form == 2:
        user = rng.choice(["What is the square root of {n}?", "square root of {n}", "sqrt({n})", "√{n}", "What is the root of {n}?", "Square root of {n}?", "what's the square root of {n}?"]).format(n=n * n)
        return number_item(user, f"{n} * {n} = {n * n}. The root is {n}.", f"The square root of {n * n} is {n}", n)
    if form == 3:
        user = rng.choice(["What is double {n}?", "Double {n}.", "What is twice {n}?", "What is the double of {n}?", "two times {n}", "twice {n}"]).format(n=n)
        return number_item(user, f"{n} * 2 = {2 * n}.", f"{n} * 2 = {2 * n}", 2 * n)
    if form == 4:
        user = rng.choice(["What is half of {n}?", "half of {n}", "What is a half of {n}?", "Halve {n}.", "How much is half of {n}?"]).format(n=2 * n)
        return number_item(user, f"{2 * n} / 2 = {n}.", f"{2 * n} / 2 = {n}", n)
    user = rng.choice(["Is {n} even or odd?", "Is {n} odd or even?", "is {n} an even number?", "Is {n} odd?"]).format(n=n)
    kind = "even" if n % 2 == 0 else "odd"
    return text_item(user, f"{n} ends with {n % 10}. So it is {kind}.", f"{n} is {kind}.")


def counting(rng, split, thinking):
    def make():
        form = rng.randrange(5)
        n, k = rng.randrange(1, 300), rng.randrange(3, 13)
        if form == 0:
            n = rng.choice((1, 1, rng.randrange(1, 60)))
        return ("count", form, n, k), (form, n, k)
    form, n, k = draw(split, make)
    if form == 0:
        row = ", ".join(str(i) for i in range(n, n + k))
        user = rng.choice(["Count from {a} to {b}.", "Count from {a} to {b}", "count {a} to {b}", "List the numbers from {a} to {b}."] + (["Count to {b}.", "count to {b}", "Can you count to {b}?"] if n == 1 else [])).format(a=n, b=n + k - 1)
        return text_item(user, f"From {n} to {n + k - 1}.", row)
    if form == 1:
        row = ", ".join(str(i) for i in range(n + k - 1, n - 1, -1))
        return text_item(rng.choice(["Count down from {b} to {a}.", "Count backwards from {b} to {a}.", "count down from {b} to {a}"]).format(a=n, b=n + k - 1), f"Down from {n + k - 1} to {n}.", row)
    if form == 2:
        step = rng.choice((1, 2, 3, 5, 10))
        row = ", ".join(str(n + i * step) for i in range(4))
        user = rng.choice(["What comes next: {r}?", "What is the next number: {r}", "{r}, ... what comes next?", "Continue: {r}"]).format(r=row)
        return number_item(user, f"Each number is {step} more. {n + 3 * step} + {step} = {n + 4 * step}.", f"The next number is {n + 4 * step}", n + 4 * step)
    if form == 3:
        return number_item(rng.choice(["What number comes after {n}?", "What comes after {n}?", "Which number is next after {n}?"]).format(n=n), f"{n} + 1 = {n + 1}.", f"{n + 1} comes after {n}".replace(f"{n + 1} comes after {n}", f"After {n} comes {n + 1}"), n + 1)
    return number_item(rng.choice(["What number comes before {n}?", "What comes before {n}?", "Which number is right before {n}?"]).format(n=n), f"{n} - 1 = {n - 1}.", f"Before {n} comes {n - 1}", n - 1)


def follow_up(rng, split, thinking):
    def make():
        op, then = rng.choice("+-*"), rng.choice("++--*/")
        a, b = rng.randrange(2, 60), rng.randrange(2, 13)
        if op == "-" and a < b:
            a, b = b, a
        first = a + b if op == "+" else a - b if op == "-" else a * b
        c = rng.randrange(1, 50) if then in "+-" else rng.randrange(2, 10)
        if then == "-" and c > first:
            then = "+"
        if then == "/":
            c = 2
            if first % 2:
                then = "*"
        return ("follow", op, a, b, then, c), (op, a, b, first, then, c)
    op, a, b, first, then, c = draw(split, make)
    _, short, _ = work(op, a, b)
    r = first + c if then == "+" else first - c if then == "-" else first * c if then == "*" else first // c
    ask = {"+": ["Add {c} to that.", "plus {c}", "And plus {c}?", "Now add {c}.", "add {c}", "And {c} more?", "What if you add {c}?"],
           "-": ["Subtract {c} from that.", "minus {c}", "And minus {c}?", "Now subtract {c}.", "Take away {c}.", "subtract {c}"],
           "*": ["Multiply that by {c}.", "times {c}", "And times {c}?", "Now multiply it by {c}."] + (["Double that.", "Now double it.", "double it"] if c == 2 else []),
           "/": ["Divide that by {c}.", "divided by {c}?", "Half of that?", "Now divide it by {c}."]}[then]
    reasoning, content, _ = work(then, first, c)
    history = [(rng.choice(ASK[op]).format(a=a, b=b), f"{a} {op} {b} = {first}" if rng.random() < 0.5 else short)]
    return number_item(rng.choice(ask).format(c=c), f"The last result is {first}. {reasoning}", f"{first} {then} {c} = {r}" if thinking else content, r, history=history)


def declined(rng, split, thinking):
    """Decimals, fractions and division by zero, with keys of their own so that nothing is shared between the splits."""
    def make():
        a, b = rng.randrange(1, 1000), rng.randrange(1, 100)
        return ("declined", a, b), (a, b)
    a, b = draw(split, make)
    op = rng.choice("+-*/")
    if rng.random() < 0.3:
        user = rng.choice([t for t in ASK["/"]]).format(a=a, b=0)
        return text_item(user, "The divisor is 0. That is not possible.", ZERO)
    if rng.random() < 0.7:
        x, y = f"{a / 10 if a % 10 else a + 0.5}", f"{b / 10 if rng.random() < 0.5 else b}"
        if rng.random() < 0.3:
            x, y = y, x
    else:
        x, y = f"{a % 9 + 1}/{b % 9 + 2}", f"{b % 5 + 1}/{a % 7 + 2}"
        op = "+" if op == "/" else op
    user = rng.choice(["What is {x} {o} {y}?", "{x} {o} {y}", "Calculate {x} {o} {y}.", "How much is {x} {o} {y}?", "{x}{o}{y}", "what is {x} {w} {y}"]).format(x=x, y=y, o=op, w=WORDS[op])
    return text_item(user, "These are not whole numbers.", WHOLE)


KINDS = [(remainder, 22), (percent, 20), (precedence, 18), (powers, 12), (counting, 9), (follow_up, 12), (declined, 7)]


def calculation(rng, split, thinking):
    item = rng.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0](rng, split, thinking)
    if rng.random() < 0.5 and "history" not in item:
        item["user"] = dress(rng, item["user"])
    return item
