"""Word problems: short stories built from parts, with the steps that solve them."""
from .narration import narrate
from .split import draw
from .words import ITEMS, NAMES, OBJECTS, pick

GAIN = ["{n} buys {b} more.", "{m} gives {n} {b} more.", "Then {n} finds {b} more.", "{n} gets {b} {o} from {m}.", "{n} picks up {b} more {o}.",
        "Later {n} wins {b} more.", "{m} brings {n} {b} {o}.", "Then {n} adds {b} {o}.", "Then {n} receives {b} more {o} as a gift.",
        "{n} collects another {b}."]
LOSS = ["{n} gives {b} to {m}.", "{n} loses {b} of them.", "Then {n} sells {b}.", "{m} takes {b} {o}.", "{n} gives away {b} {o}.",
        "Then {n} throws away {b}.", "{b} of them break.", "{n} trades away {b} {o}.", "{n} hands {b} {o} to {m}.", "{n} uses {b} of them."]
START = ["{n} has {a} {o}.", "{n} starts with {a} {o}.", "{n} owns {a} {o}.", "There are {a} {o} in the box of {n}.", "In the morning {n} has {a} {o}.",
         "{n} bought {a} {o}."]
ENDQ = ["How many {o} does {n} have now?", "How many {o} does {n} have in the end?", "How many {o} are left for {n}?",
        "How many does {n} have now?", "Now how many {o} does {n} have?"]


def people(rng):
    n = pick(rng, NAMES, 0.12)
    m = pick(rng, NAMES, 0.12)
    while m == n:
        m = pick(rng, NAMES, 0.12)
    return n, m


def changes(rng, split):
    def make():
        count = rng.choices((1, 2, 3), (45, 40, 15))[0]
        a = rng.randrange(3, 100)
        total, events = a, []
        for _ in range(count):
            if rng.random() < 0.5 and total > 2:
                b = rng.randrange(1, total)
                events.append(("-", b))
                total -= b
            else:
                b = rng.randrange(2, 60)
                events.append(("+", b))
                total += b
        return ("changes", a, tuple(events)), (a, events, total)
    a, events, total = draw(split, make)
    n, m = people(rng)
    o = pick(rng, OBJECTS, 0.05)
    lines = [rng.choice(START).format(n=n, a=a, o=o)]
    steps, now = [], a
    for op, b in events:
        lines.append(rng.choice(GAIN if op == "+" else LOSS).format(n=n, m=m, b=b, o=o))
        after = now + b if op == "+" else now - b
        steps.append(f"{now} {op} {b} = {after}")
        now = after
    text = " ".join(lines) + " " + rng.choice(ENDQ).format(n=n, o=o)
    return text, f"{n} starts with {a} {o}.", steps, f"{n} has {total} {o} now.", total


# text, opening of the working, operation ("a*b" on the drawn numbers), answer. Numbers come from RANGES by letter pair.
SIMPLE = [
    ("There are {a} boxes with {b} {o} in each box. How many {o} are there in total?", "{a} boxes of {b}.", "*", "There are {r} {o} in total."),
    ("{n} has {a} bags. Each bag holds {b} {o}. How many {o} does {n} have?", "{a} bags of {b}.", "*", "{n} has {r} {o}."),
    ("{n} reads {b} pages every day. How many pages does {n} read in {a} days?", "{a} days with {b} pages.", "*", "{n} reads {r} pages."),
    ("One {i} costs {b} dollars. {n} buys {a}. How much does {n} pay?", "{a} at {b} dollars each.", "*", "{n} pays {r} dollars."),
    ("A {i} costs {b} euros. How much do {a} of them cost?", "{a} at {b} euros each.", "*", "They cost {r} euros."),
    ("A car drives {a} km per hour. How far does it go in {b} hours?", "{b} hours at {a} km per hour.", "*", "It goes {r} km."),
    ("A train travels {a} km every hour. How many km does it travel in {b} hours?", "{b} hours at {a} km per hour.", "*", "It travels {r} km."),
    ("{n} earns {a} dollars per hour. How much does {n} earn in {b} hours?", "{b} hours at {a} dollars.", "*", "{n} earns {r} dollars."),
    ("A class has {a} rows with {b} seats each. How many seats are there?", "{a} rows of {b}.", "*", "There are {r} seats."),
    ("{n} plants {a} rows of {b} flowers. How many flowers does {n} plant?", "{a} rows of {b}.", "*", "{n} plants {r} flowers."),
    ("{n} shares {p} {o} equally among {d} friends. How many {o} does each friend get?", "{p} shared by {d}.", "/", "Each friend gets {r} {o}."),
    ("{p} {o} are packed into {d} equal boxes. How many {o} are in each box?", "{p} in {d} boxes.", "/", "Each box has {r} {o}."),
    ("{n} puts {p} {o} into bags of {d}. How many bags does {n} need?", "{p} in bags of {d}.", "/", "{n} needs {r} bags."),
    ("{d} {i}s cost {p} dollars together. How much does one cost?", "{p} dollars for {d}.", "/", "One costs {r} dollars."),
    ("{n} has {p} dollars. A {i} costs {d} dollars. How many can {n} buy?", "{p} dollars at {d} each.", "/", "{n} can buy {r}."),
    ("{n} has {x} {o} and {m} has {y} {o}. How many {o} do they have together?", "Add both.", "+", "They have {r} {o} together."),
    ("{n} has {x} {o}. {m} has {y} more than {n}. How many {o} does {m} have?", "{m} has {y} more than {x}.", "+", "{m} has {r} {o}."),
    ("{n} is {x} years old. {m} is {y} years older. How old is {m}?", "{m} is {y} years older than {x}.", "+", "{m} is {r} years old."),
    ("There are {x} girls and {y} boys in a school. How many children are there?", "Add girls and boys.", "+", "There are {r} children."),
    ("{n} walks {x} m to the shop and then {y} m to the park. How far does {n} walk?", "Add both ways.", "+", "{n} walks {r} m."),
    ("On Monday {n} sells {x} {o} and on Tuesday {y}. How many {o} does {n} sell in total?", "Add both days.", "+", "{n} sells {r} {o} in total."),
    ("{n} has {u} {o} and {m} has {v}. How many more {o} does {n} have than {m}?", "The difference.", "-", "{n} has {r} more {o}."),
    ("A book has {u} pages. {n} has read {v} of them. How many pages are left?", "Pages left.", "-", "There are {r} pages left."),
    ("{n} pays with {u} dollars for a {i} that costs {v} dollars. How much change does {n} get?", "The change.", "-", "{n} gets {r} dollars back."),
    ("{n} is {u} years old. {m} is {v} years younger. How old is {m}?", "{m} is {v} years younger than {u}.", "-", "{m} is {r} years old."),
    ("There were {u} birds on a tree. {v} flew away. How many birds are left?", "Birds left.", "-", "There are {r} birds left."),
    ("A bus has {u} seats and {v} are taken. How many seats are free?", "Free seats.", "-", "There are {r} free seats."),
    ("{n} wants to save {u} dollars and already has {v}. How many dollars are missing?", "The rest.", "-", "{r} dollars are missing."),
    ("A rope is {u} m long. {n} cuts off {v} m. How long is the rest?", "The rest.", "-", "The rest is {r} m long."),
    ("A baker makes {u} rolls and sells {v}. How many rolls remain?", "Rolls left.", "-", "{r} rolls remain."),
]


def simple(rng, split):
    index = rng.randrange(len(SIMPLE))
    text, opening, op, answer = SIMPLE[index]

    def make():
        a, b = rng.randrange(2, 31), rng.randrange(2, 10)
        if rng.random() < 0.1:
            a = rng.randrange(20, 100)
        d = rng.randrange(2, 10)
        p = d * rng.randrange(2, 21)
        x, y = rng.randrange(2, 130), rng.randrange(2, 100)
        u = rng.randrange(10, 200)
        v = rng.randrange(2, u)
        used = {"*": (a, b), "/": (p, d), "+": (x, y), "-": (u, v)}[op]
        return ("simple", index, used), used
    first, second = draw(split, make)
    letters = {"*": "ab", "/": "pd", "+": "xy", "-": "uv"}[op]
    result = {"*": first * second, "/": first // second, "+": first + second, "-": first - second}[op]
    n, m = people(rng)
    slots = dict(n=n, m=m, o=rng.choice(OBJECTS), i=rng.choice(ITEMS), r=result)
    slots[letters[0]], slots[letters[1]] = first, second
    return text.format(**slots), opening.format(**slots), [f"{first} {op} {second} = {result}"], answer.format(**slots), result


def two_step(rng, split):
    def make():
        a, b, c = rng.randrange(2, 10), rng.randrange(2, 13), rng.randrange(2, 50)
        form = rng.randrange(5)
        if form in (0, 3):
            c = rng.randrange(1, a * b)
        if form == 4:
            c = a * b + rng.randrange(1, 60)
        return ("two", form, a, b, c), (form, a, b, c)
    form, a, b, c = draw(split, make)
    n, m = people(rng)
    o, i = rng.choice(OBJECTS), rng.choice(ITEMS)
    ab = a * b
    if form == 0:
        return (f"{n} has {a} boxes with {b} {o} each. {n} gives {c} {o} to {m}. How many {o} does {n} have left?", f"First {a} boxes of {b}.",
                [f"{a} * {b} = {ab}", f"{ab} - {c} = {ab - c}"], f"{n} has {ab - c} {o} left.", ab - c)
    if form == 1:
        return (f"{n} has {c} {o} and buys {a} packs of {b} {o}. How many {o} does {n} have now?", f"First {a} packs of {b}.",
                [f"{a} * {b} = {ab}", f"{c} + {ab} = {c + ab}"], f"{n} has {c + ab} {o} now.", c + ab)
    if form == 2:
        return (f"{n} buys {a} {i}s for {b} dollars each and a bag for {c} dollars. How much does {n} pay?", f"First {a} at {b} dollars.",
                [f"{a} * {b} = {ab}", f"{ab} + {c} = {ab + c}"], f"{n} pays {ab + c} dollars.", ab + c)
    if form == 3:
        return (f"{n} works {a} days and makes {b} {o} each day. {c} of them break. How many {o} are left?", f"First {a} days with {b}.",
                [f"{a} * {b} = {ab}", f"{ab} - {c} = {ab - c}"], f"There are {ab - c} {o} left.", ab - c)
    return (f"{n} buys {a} {i}s for {b} dollars each and pays with {c} dollars. How much change does {n} get?", f"First {a} at {b} dollars.",
            [f"{a} * {b} = {ab}", f"{c} - {ab} = {c - ab}"], f"{n} gets {c - ab} dollars back.", c - ab)


def word_problem(rng, split, thinking):
    kind = rng.random()
    text, opening, steps, answer, result = (narrate if kind < 0.7 else changes if kind < 0.82 else simple if kind < 0.94 else two_step)(rng, split)
    if rng.random() < 0.08:
        text = rng.choice(["Solve this: ", "Here is a problem. ", "Please help me: ", "Question: ", "Hi! ", "Can you solve this? ", "Can you help? ", "Math problem: ", "A riddle: "]) + text
    if rng.random() < 0.05:
        text = text.rstrip("?.")
    working = ", ".join(steps)
    return dict(user=text, reasoning=f"{opening} {working}. So {result}.", content=answer if thinking else f"{working}. {answer}",
                expect={"kind": "number", "value": result})
