"""JSON on request: pull fields out of a sentence into an object with the keys the user asks for."""
from . import words as w
from .rendering import dump
from .split import draw


def person_name(rng):
    first = w.pick(rng, w.NAMES, 0.25)
    return f"{first} {w.pick(rng, w.SURNAMES, 0.25)}" if rng.random() < 0.4 else first


def price(rng):
    return rng.randrange(2, 900) if rng.random() < 0.7 else round(rng.randrange(100, 9999) / 100 + 0.01, 2)


def clock(rng):
    return rng.choice((f"{rng.randrange(1, 13)} {rng.choice(('am', 'pm'))}", f"{rng.randrange(7, 22)}:{rng.choice(('00', '15', '30', '45'))}"))


def email(rng):
    return f"{w.pick(rng, w.NAMES, 0.3).lower()}@{rng.choice(('mail', 'post', 'web', w.made_up(rng, False)))}.{rng.choice(('com', 'org', 'net'))}"


def phone(rng):
    return f"{rng.randrange(100, 999)}-{rng.randrange(1000, 9999)}"


# record kind: (fields {slot: (maker, key names)}, sentences). A sentence names the slots it tells.
RECORDS = [
    ({"n": (person_name, ["name", "person", "full_name"]), "a": (lambda r: r.randrange(5, 95), ["age", "years"]),
      "c": (lambda r: w.pick(r, w.CITIES, 0.25), ["city", "town", "location"]), "j": (lambda r: r.choice(w.JOBS), ["job", "profession", "occupation"])},
     ["{n} is {a} years old and lives in {c}.", "{n} is a {j} from {c}.", "{n}, {a}, works as a {j} in {c}.", "{n} lives in {c} and works as a {j}.",
      "My friend {n} is {a} years old.", "{n} is a {a} year old {j} who lives in {c}.", "The {j} {n} is {a} and comes from {c}.",
      "This is {n} from {c}, age {a}."]),
    ({"i": (lambda r: r.choice(w.PRODUCTS), ["item", "product", "article"]), "q": (lambda r: r.randrange(1, 40), ["quantity", "count", "amount"]),
      "p": (price, ["price", "cost"]), "n": (person_name, ["customer", "buyer", "client"])},
     ["{n} ordered {q} {i} for {p} dollars.", "The {i} costs {p} dollars.", "{n} buys {q} {i}.", "An order of {q} {i} at {p} dollars each.",
      "Customer {n} wants {q} {i} at a price of {p} dollars.", "{n} paid {p} dollars for {q} {i}.", "Order: {q} x {i}, price {p}, customer {n}."]),
    ({"e": (lambda r: r.choice(w.EVENTS), ["event", "title", "what"]), "d": (lambda r: r.choice(w.DAYS), ["day", "date", "when"]),
      "t": (clock, ["time", "start", "hour"]), "c": (lambda r: w.pick(r, w.CITIES, 0.25), ["place", "city", "location"])},
     ["The {e} is on {d} at {t} in {c}.", "There is a {e} on {d} at {t}.", "On {d} we have a {e} in {c}.", "The {e} in {c} starts at {t} on {d}.",
      "Join the {e} on {d} at {t}.", "We moved the {e} to {d}, {t}."]),
    ({"n": (person_name, ["name", "contact", "person"]), "m": (email, ["email", "mail"]), "f": (phone, ["phone", "telephone", "number"])},
     ["You can reach {n} at {m} or {f}.", "{n} has the email {m} and the phone number {f}.", "Contact {n} at {m}.", "Call {n} at {f}.",
      "{n}: {f}, {m}", "The phone number of {n} is {f}."]),
    ({"o": (lambda r: w.pick(r, w.CITIES, 0.25), ["from", "origin", "departure"]), "z": (lambda r: w.pick(r, w.CITIES, 0.25), ["to", "destination", "arrival"]),
      "d": (lambda r: r.choice(w.DAYS), ["day", "date"]), "k": (lambda r: r.randrange(1, 9), ["passengers", "tickets", "seats"])},
     ["Book {k} tickets from {o} to {z} on {d}.", "A flight from {o} to {z} on {d}.", "I fly from {o} to {z} with {k} passengers.",
      "On {d} we travel from {o} to {z}.", "{k} seats to {z} from {o} on {d}, please."]),
    ({"n": (lambda r: w.pick(r, w.PETS, 0.3), ["name", "pet"]), "s": (lambda r: r.choice(w.ANIMALS), ["animal", "kind", "species"]),
      "k": (lambda r: r.choice(w.COLOURS), ["colour", "color"]), "a": (lambda r: r.randrange(1, 20), ["age", "years"])},
     ["{n} is a {k} {s}.", "My {s} {n} is {a} years old.", "The {s} is called {n}, is {k} and {a} years old.", "I have a {k} {s} called {n}.",
      "{n} is a {a} year old {s}."]),
    ({"i": (lambda r: r.choice(w.PRODUCTS), ["item", "product", "thing"]), "k": (lambda r: r.choice(w.COLOURS), ["colour", "color"]),
      "p": (price, ["price", "cost"]), "q": (lambda r: r.randrange(1, 300), ["stock", "count", "quantity"])},
     ["We have {q} {k} {i} in stock.", "The {k} {i} costs {p} dollars.", "A {k} {i} for {p} dollars, {q} in stock.",
      "There are {q} {i} left at {p} dollars."]),
]
ASK = ["Extract {k} as JSON: {s}", "Extract {k} as JSON from this text: {s}", "Give me {k} as JSON. {s}", "{s} Write this as JSON with the keys {k}.",
       "Return a JSON object with {k}. Text: {s}", "Turn this into JSON with the keys {k}: {s}", "{s} Answer in JSON with {k}.",
       "Read the text and answer with JSON. Keys: {k}. Text: {s}", "JSON with {k} please: {s}", "Convert to JSON ({k}): {s}"]


def key_list(rng, keys):
    style = rng.random()
    if style < 0.15:
        keys = [f'"{k}"' for k in keys]
    if len(keys) == 1 or style < 0.5:
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def json_record(rng, split, thinking):
    def make():
        kind = rng.randrange(len(RECORDS))
        fields, sentences = RECORDS[kind]
        index = rng.randrange(len(sentences))
        told = [s for s in fields if "{" + s + "}" in sentences[index]]
        values = {s: fields[s][0](rng) for s in told}
        return ("record", kind, index, tuple(values.values())), (fields, sentences[index], told, values)
    fields, sentence, told, values = draw(split, make)
    wanted = rng.sample(told, rng.randrange(1, len(told) + 1)) if rng.random() < 0.35 else rng.sample(told, len(told))
    slots = list(wanted)
    untold = [s for s in fields if s not in told]
    if untold and rng.random() < 0.15:
        slots.insert(rng.randrange(len(slots) + 1), rng.choice(untold))
    names = {}
    for s in slots:
        names[s] = rng.choice(fields[s][1]) if rng.random() < 0.93 else w.made_up(rng, False) + "_" + rng.choice(fields[s][1])
    answer = {names[s]: values.get(s) for s in slots}
    text = sentence.format(**values)
    user = rng.choice(ASK).format(k=key_list(rng, [names[s] for s in slots]), s=text)
    notes = []
    for s in slots:
        shown = answer[names[s]]
        notes.append(f"{names[s]}: {shown}" if shown is not None else f"{names[s]}: not given, null")
    content = dump(answer)
    return dict(user=user, reasoning="; ".join(notes), content=content, expect={"kind": "json", "value": answer})


def json_sum(rng, split, thinking):
    def make():
        op = rng.choice("+-*")
        a, b = (rng.randrange(10, 300), rng.randrange(2, 100)) if op != "*" else (rng.randrange(2, 60), rng.randrange(2, 10))
        if op == "-" and a < b:
            a, b = b, a
        return ("arith", op, a, b), (op, a, b)
    op, a, b = draw(split, make)
    key = rng.choice(["result", "answer", "value", "sum" if op == "+" else "result"])
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    user = rng.choice(["What is {e}? Answer as JSON with the key {k}.", "Calculate {e} and answer in JSON with {k}.",
                       "{e} = ? Reply with JSON, key {k}.", 'Give {e} as JSON with the key "{k}".']).format(e=f"{a} {op} {b}", k=key)
    answer = {key: result}
    return dict(user=user, reasoning=f"{a} {op} {b} = {result}", content=dump(answer), expect={"kind": "json", "value": answer})


def any_value(rng):
    kind = rng.random()
    if kind < 0.4:
        return w.odd(rng)
    if kind < 0.65:
        return rng.randrange(0, 10 ** rng.choice((1, 2, 3, 4)))
    if kind < 0.72:
        return rng.random() < 0.5
    return w.pick(rng, rng.choice((w.NAMES, w.CITIES, w.COLOURS, w.FOODS, w.ANIMALS, w.DAYS)), 0.25)


KEYS = """name age city colour color size price country email title author year id code status type street animal food job brand model weight height level score team date day month time first last user
password active width length total count key value a b c x y foo bar host port path file lang mode""".split()


def json_pairs(rng, split, thinking):
    """Keys and values given outright, of any letters."""
    def make():
        keys = rng.sample(KEYS, rng.choices((1, 2, 3, 4), (25, 40, 25, 10))[0])
        keys = [k if rng.random() < 0.8 else w.made_up(rng, False) if rng.random() < 0.5 else w.odd(rng).lower().split()[0].replace('"', "") for k in keys]
        keys = list(dict.fromkeys(keys))
        values = [any_value(rng) for _ in keys]
        return ("pairs", tuple(keys), tuple(values)), (keys, values)
    keys, values = draw(split, make)
    values = [int(v) if isinstance(v, str) and v.isdigit() and v[0] != "0" else v for v in values]
    shown = [dump(v) if isinstance(v, bool) else str(v) for v in values]
    style = rng.choice(("{k} {v}", "{k} = {v}", "{k}: {v}", "{k} is {v}", "{k}={v}"))
    parts = [style.format(k=k, v=v) for k, v in zip(keys, shown)]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + rng.choice((" and ", ", ")) + parts[-1]
    user = rng.choice(["Write JSON with {t}", "Make a JSON object with {t}.", "Give me JSON: {t}", "JSON: {t}", "Convert to JSON: {t}", "Create a JSON object with {t}", "Turn this into JSON: {t}", "Write this as JSON: {t}", "{t} as JSON", "Return JSON with {t}.",
                       "Give me a JSON object with {t}.", "Format as JSON: {t}"]).format(t=text)
    answer = dict(zip(keys, values))
    return dict(user=user, reasoning="; ".join(f"{k}: {v}" for k, v in zip(keys, shown)), content=dump(answer), expect={"kind": "json", "value": answer})


def json_list(rng, split, thinking):
    def make():
        if rng.random() < 0.3:
            low, count = rng.randrange(0, 50), rng.randrange(2, 8)
            return ("range", low, count), ("range", low, count)
        pool = rng.choice((w.NAMES, w.CITIES, w.COLOURS, w.FOODS, w.ANIMALS, w.OBJECTS))
        items = list(dict.fromkeys(w.odd(rng) if rng.random() < 0.2 else w.pick(rng, pool, 0.2) for _ in range(rng.randrange(2, 6))))
        return ("list", tuple(items)), ("list", items, 0)
    kind, a, b = draw(split, make)
    if kind == "range":
        answer = list(range(a, a + b))
        user = rng.choice(["Give me a JSON array with the numbers {a} to {b}.", "JSON array of the numbers from {a} to {b}", "Write the numbers from {a} to {b} as a JSON list.", "A JSON list with {a} to {b}, please."]).format(a=a, b=a + b - 1)
        return dict(user=user, reasoning=f"From {a} to {a + b - 1}.", content=dump(answer), expect={"kind": "json", "value": answer})
    text = rng.choice((", ".join(a), ", ".join(a[:-1]) + " and " + a[-1] if len(a) > 1 else a[0]))
    user = rng.choice(["Write as a JSON array: {t}", "JSON list: {t}", "Make a JSON array of {t}", "Turn this into a JSON list: {t}", "Give me a JSON array with {t}", "{t} as a JSON array", "Convert to a JSON array: {t}"]).format(t=text)
    return dict(user=user, reasoning="; ".join(a), content=dump(a), expect={"kind": "json", "value": a})


def json_answer(rng, split, thinking):
    kind = rng.random()
    if kind < 0.08:
        return json_sum(rng, split, thinking)
    return json_pairs(rng, split, thinking) if kind < 0.32 else json_list(rng, split, thinking) if kind < 0.42 else json_record(rng, split, thinking)
