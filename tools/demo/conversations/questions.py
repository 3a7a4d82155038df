"""How calculations are asked: phrasings, what people put around them, and operands of sensible sizes."""

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
