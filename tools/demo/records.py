"""JSON on request: pull fields out of a sentence into an object with the keys the user asks for."""
import words as w
from chat import dump
from split import draw


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


def json_answer(rng, split, thinking):
    return json_sum(rng, split, thinking) if rng.random() < 0.1 else json_record(rng, split, thinking)
