"""Invented tools: a verb and a noun (or a name of random letters with a description), parameters of any name, values of any letters."""
from . import words as w
from .rendering import dump
from .split import draw

VERBS = """open close start stop check find get show delete create update send book cancel move copy rename print scan lock unlock repair clean pause resume download upload share count measure test reset
activate rent sell buy archive publish sort approve reject charge restart connect load save mark record paint feed water deploy restore install remove list pack ship return inspect invite block track
register verify export import read write fetch assign""".split()
NOUNS = """door window robot file folder document account invoice ticket printer camera server database garage oven washer pump engine car bike room table seat order package customer employee student course
lesson book movie song photo video game player team match recipe plant garden field machine battery sensor drone truck warehouse shelf box contract report task project meeting job ticket device router phone
user group channel page post comment backup key card license plate elevator gate valve heater fridge lamp curtain""".split()


def odd_text(rng):
    return w.odd(rng)


# label in the request, key names, type, maker
PARAMS = [
    ("number", ["id", "number", "no", "index"], "integer", lambda r: r.randrange(1, 10 ** r.choice((1, 2, 3, 5)))),
    ("id", ["id", "identifier", "code", "ref"], "string", odd_text),
    ("code", ["code", "key", "id", "pin"], "string", odd_text),
    ("name", ["name", "title", "label"], "string", lambda r: w.pick(r, w.NAMES, 0.5)),
    ("day", ["day", "date", "when"], "string", lambda r: r.choice(w.DAYS)),
    ("colour", ["colour", "color"], "string", lambda r: w.pick(r, w.COLOURS, 0.1)),
    ("city", ["city", "place", "location"], "string", lambda r: w.pick(r, w.CITIES, 0.3)),
    ("speed", ["speed", "level", "rate"], "integer", lambda r: r.randrange(1, 200)),
    ("size", ["size", "length", "width"], "number", lambda r: r.randrange(1, 100) if r.random() < 0.6 else r.randrange(11, 999) / 10),
    ("format", ["format", "type", "kind"], "string", lambda r: r.choice("pdf txt csv png json xml html".split() + [w.odd(r)])),
    ("count", ["count", "quantity", "amount"], "integer", lambda r: r.randrange(1, 100)),
    ("owner", ["owner", "user", "person"], "string", lambda r: w.pick(r, w.NAMES, 0.5)),
    ("room", ["room", "area", "zone"], "string", lambda r: r.choice(w.ROOMS)),
    ("time", ["time", "hour", "at"], "string", lambda r: f"{r.randrange(0, 24):02d}:{r.choice(('00', '15', '30', '45'))}"),
    ("text", ["text", "message", "content"], "string", lambda r: r.choice(w.MESSAGES) if r.random() < 0.5 else w.odd(r)),
]


def gibberish(rng):
    kind = rng.random()
    letters = "abcdefghijklmnopqrstuvwxyz"
    if kind < 0.4:
        return w.made_up(rng, False) + ("_" + w.made_up(rng, False) if rng.random() < 0.3 else "")
    text = "".join(rng.choice(letters) for _ in range(rng.randrange(2, 8)))
    return text if kind < 0.7 else f"{text}_{rng.randrange(1, 100)}" if kind < 0.9 else text + "_" + "".join(rng.choice(letters) for _ in range(rng.randrange(1, 6)))


def name_of(rng, verb, noun):
    style = rng.random()
    if style < 0.4:
        return gibberish(rng)
    return (f"{verb}_{noun}" if style < 0.65 else verb + noun.capitalize() if style < 0.75 else f"{noun}_{verb}" if style < 0.85 else f"{verb}_the_{noun}" if style < 0.9 else f"{noun}.{verb}" if style < 0.93 else f"{verb}-{noun}")


def invented(rng, verb, noun, params):
    """One tool object and the keys of its parameters."""
    properties, keys, used = {}, [], set()
    for label, options, type_, _ in params:
        key = rng.choice([o for o in options if o not in used] or [label])
        strange = rng.random() < 0.2
        if strange:
            key = gibberish(rng)
        while key in used:
            key = gibberish(rng)
        used.add(key)
        keys.append(key)
        spec = {"type": type_}
        if strange or rng.random() < 0.4:
            spec["description"] = rng.choice((f"The {label}", label.capitalize(), f"The {label} of the {noun}"))
        properties[key] = spec
    schema = {"type": "object", "properties": properties, "required": list(keys)}
    if rng.random() < 0.2:
        del schema["required"]
    text = rng.choice((f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}", f"Can {verb} a {noun}."))
    return {"type": "function", "function": {"name": name_of(rng, verb, noun), "description": text, "parameters": schema}}, keys


def request(rng, split):
    """(tools, user text, call)"""
    def make():
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        params = rng.sample(PARAMS, rng.choices((0, 1, 2, 3), (8, 52, 30, 10))[0])
        values = [p[3](rng) for p in params]
        return ("invented", verb, noun, tuple(p[0] for p in params), tuple(values)), (verb, noun, params, values)
    verb, noun, params, values = draw(split, make)
    tool, keys = invented(rng, verb, noun, params)
    tools, seen, pairs = [tool], {tool["function"]["name"]}, {(verb, noun)}
    want = rng.choices((1, 2, 3, 4), (20, 35, 30, 15))[0]
    while len(tools) < want:
        pair = (verb if rng.random() < 0.2 else rng.choice(VERBS), noun if rng.random() < 0.3 else rng.choice(NOUNS))
        if pair in pairs:
            continue
        other, _ = invented(rng, *pair, rng.sample(PARAMS, rng.choice((0, 1, 1, 2))))
        if other["function"]["name"] in seen:
            continue
        pairs.add(pair)
        seen.add(other["function"]["name"])
        tools.append(other)
    rng.shuffle(tools)
    parts = [rng.choice((f"{p[0]} {v}", f"{p[0]} {v}", f"{p[0]} = {v}", f"{p[0]}: {v}") if len(params) > 1 else (f"{p[0]} {v}",)) for p, v in zip(params, values)]
    text = f"{verb} the {noun}"
    if parts:
        link = rng.choice((" with ", " with ", " with the ", ", "))
        text += link + (parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + rng.choice((" and ", ", ")) + parts[-1])
        if len(params) == 1 and params[0][0] in ("number", "id", "code", "name") and rng.random() < 0.5:
            text = f"{verb} {noun} {values[0]}"
    shape = rng.random()
    cap = text[0].upper() + text[1:]
    if shape < 0.5:
        user = cap + "."
    elif shape < 0.65:
        user = f"Please {text}."
    elif shape < 0.75:
        user = f"Can you {text}?"
    elif shape < 0.83:
        user = text
    elif shape < 0.9:
        user = f"I want to {text}."
    else:
        user = f"{cap}, please."
    if len(tools) == 1 and rng.random() < 0.3:
        user = f"Use {tool['function']['name']} to {text}." if rng.random() < 0.5 else f"Call {tool['function']['name']}" + (f" with {', '.join(parts)}." if parts else ".")
    call = {"name": tool["function"]["name"], "arguments": {k: v for k, v in zip(keys, values)}}
    return tools, user, call
