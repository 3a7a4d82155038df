"""Word problems in free wording: clauses built from subjects, verbs in two tenses, nouns and questions, in many orders."""
from . import words as w
from .split import draw
from .words import ITEMS, NAMES, in_words, pick

THINGS = """apples pears books coins pens marbles stickers cards shells stamps balloons oranges bananas pencils toys flowers tickets buttons
stones cups plates keys nuts cherries lemons crayons beads magnets postcards dolls candles bottles boxes bags hats shirts bricks notebooks
erasers ribbons rings dice puzzles photos posters badges feathers roses tulips melons plums peaches grapes mangoes carrots potatoes onions
tomatoes blocks balls kites cars trains robots games letters envelopes chairs spoons forks acorns seeds leaves sticks pebbles jars""".split()
FOOD = """cookies apples candies cakes muffins pancakes eggs cherries sandwiches pizzas oranges bananas donuts cupcakes sweets chocolates nuts
grapes strawberries pies biscuits rolls crackers plums peaches lollipops dumplings tacos brownies waffles slices""".split()
BAKED = "cookies cakes muffins pancakes cupcakes pies biscuits rolls brownies waffles donuts pizzas".split()
BEASTS = "sheep cows chickens goats horses ducks rabbits pigs dogs cats fish birds hens hamsters".split()
ROLES = """a farmer;a baker;the teacher;my sister;my brother;my friend;a shop;a girl;a boy;my mother;my father;the baker;a student;my uncle;my aunt;
a man;a woman;the farmer;a child;my neighbour;a store;the librarian;a collector;my grandmother""".replace("\n", "").split(";")
MONEY = ["{x} dollars", "${x}", "{x} euros", "{x} dollars", "€{x}", "{x} pounds", "{x} coins"]

# verbs: past, present (he), base (I)
LOSE = [("gave away", "gives away", "give away"), ("lost", "loses", "lose"), ("sold", "sells", "sell"), ("threw away", "throws away", "throw away"),
        ("dropped", "drops", "drop"), ("used", "uses", "use"), ("donated", "donates", "donate"), ("gave {m}", "gives {m}", "give {m}"),
        ("lent {m}", "lends {m}", "lend {m}"), ("broke", "breaks", "break"), ("hid", "hides", "hide"), ("sent away", "sends away", "send away"),
        ("traded", "trades", "trade"), ("gave", "gives", "give"), ("gave", "gives", "give"), ("handed {m}", "hands {m}", "hand {m}"), ("gave up", "gives up", "give up"),
        ("took out", "takes out", "take out"), ("removed", "removes", "remove"), ("burned", "burns", "burn"), ("returned", "returns", "return")]
EAT = [("ate", "eats", "eat"), ("ate", "eats", "eat"), ("shared", "shares", "share"), ("ate up", "eats up", "eat up"), ("served", "serves", "serve"),
       ("dropped", "drops", "drop"), ("gave away", "gives away", "give away"), ("sold", "sells", "sell"), ("gave {m}", "gives {m}", "give {m}")]
GET = [("bought", "buys", "buy"), ("bought", "buys", "buy"), ("found", "finds", "find"), ("got", "gets", "get"), ("received", "receives", "receive"),
       ("picked up", "picks up", "pick up"), ("won", "wins", "win"), ("collected", "collects", "collect"), ("made", "makes", "make"),
       ("added", "adds", "add"), ("was given", "is given", "am given"), ("bought", "buys", "buy"), ("took", "takes", "take"), ("brought home", "brings home", "bring home")]
BAKE = [("baked", "bakes", "bake"), ("made", "makes", "make"), ("bought", "buys", "buy"), ("got", "gets", "get")]
START = [("had", "has", "have"), ("had", "has", "have"), ("had", "has", "have"), ("bought", "buys", "buy"), ("found", "finds", "find"), ("got", "gets", "get"),
         ("collected", "collects", "collect"), ("picked", "picks", "pick"), ("owned", "owns", "own"), ("started with", "starts with", "start with")]

# noun, place, verbs of leaving (past, present plural), verbs of arriving
SCENES = [
    ("birds", ["on a tree", "in a tree", "on a wire", "on the roof", "on a branch", "on a fence"], [("flew away", "fly away"), ("flew off", "fly off"), ("left", "leave")],
     [("came", "come"), ("landed", "land"), ("joined them", "join them"), ("arrived", "arrive")]),
    ("people", ["on a bus", "in a bus", "on the train", "in a room", "in a cafe", "in the queue", "at a party", "in a museum"],
     [("got off", "get off"), ("left", "leave"), ("went home", "go home"), ("walked away", "walk away")],
     [("got on", "get on"), ("came in", "come in"), ("arrived", "arrive"), ("joined", "join")]),
    ("children", ["in the park", "on the playground", "in a class", "in the garden", "at a party", "in the pool"],
     [("went home", "go home"), ("left", "leave"), ("ran away", "run away"), ("went inside", "go inside")], [("came", "come"), ("joined them", "join them"), ("arrived", "arrive")]),
    ("students", ["in a class", "in the classroom", "in the library", "on a bus"], [("left", "leave"), ("went home", "go home"), ("were sick", "are sick")],
     [("came", "come"), ("joined", "join"), ("arrived", "arrive")]),
    ("passengers", ["on a train", "on a bus", "on a ship", "on a plane"], [("got off", "get off"), ("left", "leave")], [("got on", "get on"), ("boarded", "board")]),
    ("cars", ["in a parking lot", "in the garage", "on the street"], [("drove away", "drive away"), ("left", "leave")], [("arrived", "arrive"), ("came", "come"), ("parked", "park")]),
    ("ducks", ["on a pond", "in the lake", "in the water"], [("swam away", "swim away"), ("flew away", "fly away"), ("left", "leave")], [("came", "come"), ("joined them", "join them")]),
    ("fish", ["in a tank", "in the pond", "in a bowl"], [("died", "die"), ("swam away", "swim away"), ("were sold", "are sold")], [("were added", "are added"), ("came", "come")]),
    ("cows", ["in a field", "on a farm", "in the barn"], [("ran away", "run away"), ("were sold", "are sold"), ("left", "leave")], [("came", "come"), ("were born", "are born"), ("were added", "are added")]),
    ("frogs", ["on a log", "in the pond", "on a leaf"], [("jumped off", "jump off"), ("jumped away", "jump away"), ("left", "leave")], [("came", "come"), ("jumped on", "jump on")]),
    ("guests", ["at a party", "in a hotel", "at the wedding"], [("left", "leave"), ("went home", "go home")], [("arrived", "arrive"), ("came", "come")]),
    ("cats", ["in the garden", "on the sofa", "in a house"], [("ran away", "run away"), ("left", "leave"), ("were adopted", "are adopted")], [("came", "come"), ("arrived", "arrive")]),
    ("bees", ["in a hive", "on a flower"], [("flew away", "fly away"), ("left", "leave")], [("came", "come"), ("arrived", "arrive")]),
    ("apples", ["on a tree", "in a basket", "on the table", "in a bowl", "in a box"], [("fell down", "fall down"), ("were eaten", "are eaten"), ("were sold", "are sold"), ("were picked", "are picked")],
     [("were added", "are added"), ("grew", "grow")]),
    ("books", ["on a shelf", "in a library", "on the table", "in a bag"], [("were taken", "are taken"), ("were sold", "are sold"), ("were removed", "are removed"), ("fell down", "fall down")],
     [("were added", "are added"), ("were returned", "are returned"), ("were put there", "are put there")]),
    ("candies", ["in a jar", "in a box", "in the bag", "on a plate"], [("were eaten", "are eaten"), ("were taken", "are taken"), ("were given away", "are given away")], [("were added", "are added"), ("were put in", "are put in")]),
    ("balls", ["in a box", "in a bag", "in the basket"], [("were taken out", "are taken out"), ("rolled away", "roll away"), ("were lost", "are lost")], [("were added", "are added"), ("were put in", "are put in")]),
    ("eggs", ["in a basket", "in the fridge", "in a carton", "in a nest"], [("broke", "break"), ("were used", "are used"), ("were eaten", "are eaten"), ("hatched", "hatch")], [("were added", "are added"), ("were laid", "are laid")]),
]
NOISE = ["{N} likes {c}.", "It is a {w} day.", "It is {d}.", "{N} is {k} years old.", "The weather is {w}.", "{N} lives in {y}.", "{N} is happy.", "{N} also has {k} {q}.",
         "{M} is a friend of {n}.", "It is {d} morning.", "{N} goes to school.", "{M} has {k} {q}."]


class Writer:
    """Who the story is about, in which tense, and how numbers are written."""

    def __init__(self, rng):
        self.rng = rng
        kind = rng.random()
        self.me = kind > 0.86
        self.past = rng.random() < 0.5
        name = pick(rng, NAMES, 0.15)
        self.m = pick(rng, NAMES, 0.15)
        while self.m == name:
            self.m = pick(rng, NAMES, 0.15)
        self.n = "I" if self.me else (rng.choice(ROLES) if kind > 0.72 else name)
        self.it = self.n in ("a shop", "a store")
        self.he = "I" if self.me else "it" if self.it else rng.choice(("he", "she", "he", "she", "they"))
        self.him = {"I": "me", "he": "him", "she": "her", "they": "them", "it": "it"}[self.he]
        self.does = "did" if self.past and rng.random() < 0.3 else "do" if self.he in ("I", "they") else "does"
        self.does_n = "do" if self.me else "does"
        self.you = "You" if self.me else self.cap(self.n.replace("my ", "your ").replace("a ", "the ") if not self.n[0].isupper() else self.n)
        self.have = "have" if self.me else "has"
        self.spell = rng.random() < 0.07

    def cap(self, text):
        return text[0].upper() + text[1:]

    def num(self, n):
        return in_words(n) if self.spell and n <= 20 and self.rng.random() < 0.7 else str(n)

    def verb(self, forms):
        return forms[0 if self.past else 2 if self.me else 1].format(m=self.m)

    def tidy(self, text):
        rng = self.rng
        if rng.random() < 0.12 and not self.me:
            extra = rng.choice(NOISE).format(N=self.cap(self.n), n=self.n, M=self.m, c=rng.choice(w.COLOURS), w=rng.choice(w.WEATHER), d=rng.choice(w.DAYS),
                                             k=rng.randrange(3, 40), y=pick(rng, w.CITIES, 0.2), q=rng.choice(ITEMS) + "s")
            text = extra + " " + text if rng.random() < 0.6 or ". " not in text else text.replace(". ", ". " + extra + " ", 1)
        return text


def amounts(rng):
    return rng.choices((12, 30, 100, 300, 1000), (15, 35, 32, 13, 5))[0]


def event_numbers(rng, count, signs=None):
    top = amounts(rng)
    a = rng.randrange(3, top + 1)
    total, events = a, []
    for i in range(count):
        sign = signs[i] if signs else rng.choice("+-")
        if sign == "-" and total > 1:
            b = rng.randrange(1, total + (rng.random() < 0.1))
            total -= b
        else:
            sign = "+"
            b = rng.randrange(1, max(3, top))
            total += b
        events.append((sign, b))
    return a, events, total


def steps_of(a, events):
    steps, now = [], a
    for sign, b in events:
        after = now + b if sign == "+" else now - b
        steps.append(f"{now} {sign} {b} = {after}")
        now = after
    return steps


def story(rng, split):
    """{n} baked 24 cookies and ate 5. How many are left?"""
    def make():
        count = rng.choices((1, 2, 3), (60, 30, 10))[0]
        a, events, total = event_numbers(rng, count)
        return ("story", a, tuple(events)), (a, events, total)
    a, events, total = draw(split, make)
    s = Writer(rng)
    flavour = rng.random()
    if flavour < 0.4:
        o, lose, start = rng.choice(FOOD), EAT, START + BAKE[:1]
        if o in BAKED:
            start = START + BAKE * 2
    elif flavour < 0.5:
        o, lose, start = rng.choice(BEASTS), LOSE[:3], START[:5]
    else:
        o, lose, start = pick(rng, THINGS, 0.06), LOSE, START
        if not o.endswith(("s", "e")):
            o += "s"
    clauses = [f"{s.n} {s.verb(rng.choice(start))} {s.num(a)} {o}"]
    facts = [f"{a} {o}"]
    for sign, b in events:
        x = s.num(b)
        if sign == "-":
            what = rng.choice([x, x, f"{x} of them", f"{x} {o}", f"{x} of the {o}"])
            verb = s.verb(rng.choice(lose))
            tail = f" to {s.m}" if verb in ("gave", "gives", "give") or (verb in ("gave away", "sold", "sells") and rng.random() < 0.1) else ""
            if rng.random() < 0.12:
                clauses.append(f"{s.m} {'took' if s.past else 'takes'} {what}" if rng.random() < 0.5 else f"{x} {'got lost' if s.past else 'get lost'}")
            else:
                clauses.append(f"@ {verb} {what}{tail}")
        else:
            what = rng.choice([f"{x} more", f"{x} more", f"another {x}", f"{x} more {o}", f"{x} {o}", f"{x} extra {o}", f"another {x} {o}"])
            tail = f" from {s.m}" if rng.random() < 0.12 else ""
            if rng.random() < 0.15:
                clauses.append(f"{s.m} {'gave' if s.past else 'gives'} {s.him} {what}")
            else:
                clauses.append(f"@ {s.verb(rng.choice(GET))} {what}{tail}")
        facts.append(f"{'minus' if sign == '-' else 'plus'} {b}")
    left = events[-1][0] == "-"
    they = s.n if rng.random() < 0.4 else s.he
    do = s.does if they == s.he else s.does_n
    if left:
        question = rng.choice([f"How many {o} are left?", "How many are left?", f"How many {o} {do} {they} have left?", f"How many {do} {they} have left?", f"How many {o} remain?",
                               f"How many {o} {do} {they} have now?", f"How many {o} {do} {they} still have?", f"How many {do} {they} have now?", f"How many {do} {they} still have?"])
        answer = f"{s.you} {s.have} {total} {o} left."
    else:
        question = rng.choice([f"How many {o} {do} {they} have?", f"How many {do} {they} have?", f"How many {o} {do} {they} have now?", f"How many {do} {they} have now?",
                               f"How many {o} {do} {they} have in total?", f"How many {o} {do} {they} have altogether?", f"How many {do} {they} have in all?",
                               f"What is the total number of {o}?", f"How many {o} {do} {they} have in the end?", f"How many {o} are there now?"])
        answer = f"{s.you} {s.have} {total} {o}."
    text = join(s, clauses, question)
    return s.tidy(text), "; ".join(facts) + ":", steps_of(a, events), answer, total


def product_steps(b, a):
    """b * a in steps a small model can do: large factors by place."""
    if b <= 12 or a < 2 or a == 10 or not b % 100 or (b < 100 and not b % 10):
        return [f"{b} * {a} = {a * b}"]
    parts = [(10, f"{b} * 10"), (a - 10, f"{b} * {a - 10}")] if a > 10 else None
    values = [(b * 10, parts[0][1]), (b * (a - 10), parts[1][1])] if parts else [(b // 10 * 10 * a, f"{b // 10 * 10} * {a}"), (b % 10 * a, f"{b % 10} * {a}")]
    return [f"{text} = {value}" for value, text in values] + [f"{values[0][0]} + {values[1][0]} = {a * b}"]


def join(s, clauses, question):
    """Clauses ("@" = the subject again) and the question as a text."""
    rng = s.rng
    if len(clauses) <= 3 and rng.random() < 0.14:
        body = " and ".join(c.replace("@ ", "" if rng.random() < 0.5 else s.he + " ") for c in clauses)
        if rng.random() < 0.75:
            return f"{rng.choice(['If', 'If', 'Suppose', 'When'])} {body}, {question[0].lower()}{question[1:]}"
        return f"{question[:-1]} if {body}?"
    out = s.cap(clauses[0])
    for i, c in enumerate(clauses[1:]):
        mark = rng.random()
        bare = c[2:] if c.startswith("@ ") else c
        he = s.he if rng.random() < 0.6 else s.n
        full = f"{he} {bare}" if c.startswith("@ ") else c
        if mark < 0.32:
            other = clauses[i][0] != "@" and i > 0  # somebody else acted last: say who acts now
            out += f" and {full if other else bare}" if c.startswith("@ ") else f" and {c}"
        elif mark < 0.42:
            out += f", then {full}" if rng.random() < 0.5 else f", {full}"
        elif mark < 0.48:
            out += f" but {full}" if rng.random() < 0.5 else f" and then {bare if c.startswith('@ ') else c}"
        else:
            head = rng.choice(["", "", "", "", "Then ", "Later ", "After that, ", "Later, ", "The next day ", "In the evening ", "Then, ", "Today ", "Yesterday "])
            out += ". " + (head + full if head else s.cap(full))
    return f"{out}. {question}" if rng.random() < 0.93 else f"{out}, {question[0].lower()}{question[1:]}"


def scene(rng, split):
    """There are 12 birds on a tree, 4 fly away. How many are left?"""
    def make():
        index = rng.randrange(len(SCENES))
        a, events, total = event_numbers(rng, rng.choices((1, 2), (68, 32))[0])
        return ("scene", index, a, tuple(events)), (index, a, events, total)
    index, a, events, total = draw(split, make)
    s = Writer(rng)
    o, places, leave, come = SCENES[index]
    place = rng.choice(places)
    t = 0 if s.past else 1
    opening = rng.choice([f"There {'were' if s.past else 'are'} {s.num(a)} {o} {place}", f"{s.num(a)} {o} {'were' if s.past else 'are'} {place}",
                          f"There {'were' if s.past else 'are'} {s.num(a)} {o} {place}", f"{place} {'there were' if s.past else 'there are'} {s.num(a)} {o}"])
    out = s.cap(opening)
    facts = [f"{a} {o}"]
    for sign, b in events:
        verb = rng.choice(leave if sign == "-" else come)[t]
        x = s.num(b)
        who = rng.choice([x, x, f"{x} of them", f"{x} {o}"]) if sign == "-" else rng.choice([f"{x} more", f"{x} more", f"another {x}", f"{x} more {o}", f"{x} others"])
        clause = f"{who} {verb}"
        mark = rng.random()
        head = rng.choice(["", "", "", "Then ", "Later ", "After a while "])
        out += f", {clause}" if mark < 0.2 else f" and {clause}" if mark < 0.4 else f", then {clause}" if mark < 0.47 else ". " + (head + clause if head else s.cap(clause))
        facts.append(f"{'minus' if sign == '-' else 'plus'} {b}")
    left = events[-1][0] == "-"
    question = rng.choice(["How many are left?", f"How many {o} are left?", f"How many {o} remain?", f"How many {o} are still there?", "How many remain?", f"How many {o} are {place} now?",
                           "How many are there now?"] if left else ["How many are there now?", f"How many {o} are there now?", f"How many {o} are {place} now?", f"How many {o} are there in total?",
                                                                    "How many are there in total?", f"How many {o} are there?", "How many are there altogether?"])
    text = f"{out}. {question}"
    if rng.random() < 0.08:
        text = f"If {out[0].lower()}{out[1:]}, {question[0].lower()}{question[1:]}".replace(". ", " and ", 1) if ". " not in out else text
    return s.tidy(text), "; ".join(facts) + ":", steps_of(a, events), f"There are {total} {o} {'left' if left else 'now'}.", total


def compare(rng, split):
    """How many more; how many together; twice as many."""
    def make():
        top = amounts(rng)
        form = rng.randrange(9)
        x, y = rng.randrange(1, top + 1), rng.randrange(1, top + 1)
        if form in (0, 1, 2) and x == y:
            x += 1
        k = rng.choice((2, 2, 3, 4, 5))
        if form in (5, 6, 8):
            x = rng.randrange(2, 60)
        return ("compare", form, x, y, k), (form, x, y, k)
    form, x, y, k = draw(split, make)
    s = Writer(rng)
    n = pick(rng, NAMES, 0.15) if s.me or s.it else s.n
    n_ = s.cap(n)
    o = rng.choice(THINGS + FOOD)
    had = "had" if s.past else "has"
    big, small = max(x, y), min(x, y)
    mine = f"{n} and {s.m}" if rng.random() < 0.5 else "they"
    both = rng.choice([f"{n_} {had} {s.num(x)} {o} and {s.m} {had} {s.num(y)}.", f"{n_} {had} {s.num(x)} {o}. {s.m} {had} {s.num(y)} {o}.", f"{n_} {had} {s.num(x)} {o}, {s.m} {had} {s.num(y)}.",
                       f"{n_} {had} {s.num(x)} {o} and {s.m} {had} {s.num(y)} {o}.", f"{n_} {had} {s.num(x)} {o} while {s.m} {had} {s.num(y)}."])
    more, less = (n, s.m) if x > y else (s.m, n)
    if form == 0:
        question = rng.choice([f"How many more {o} does {more} have than {less}?", f"How many more does {more} have?", f"How many more {o} does {more} have?", f"How many fewer {o} does {less} have than {more}?",
                               "What is the difference?", f"By how many {o} does {more} beat {less}?", f"How many {o} does {less} need to have as many as {more}?"])
        return s.tidy(f"{both} {question}"), f"{more} has {big}, {less} has {small}:", [f"{big} - {small} = {big - small}"], f"The difference is {big - small}.", big - small
    if form == 1:
        kinds = [("is {x} years old", "How much older is {m} than {l}?", "How many years older is {m}?", "years"), ("weighs {x} kg", "How much heavier is {m} than {l}?", "How much heavier is {m}?", "kg"),
                 ("is {x} cm tall", "How much taller is {m} than {l}?", "How many cm taller is {m}?", "cm"), ("ran {x} km", "How much farther did {m} run?", "How many more km did {m} run than {l}?", "km"),
                 ("scored {x} points", "How many more points did {m} score?", "By how many points did {m} win?", "points"), ("read {x} pages", "How many more pages did {m} read than {l}?", "How many more pages did {m} read?", "pages")]
        verb, q1, q2, unit = rng.choice(kinds)
        text = f"{n_} {verb.format(x=x)}{rng.choice([' and', '.', ','])} {s.m} {verb.format(x=y)}. {rng.choice((q1, q2)).format(m=more, l=less)}"
        return text, f"{more} has {big}, {less} has {small}:", [f"{big} - {small} = {big - small}"], f"The difference is {big - small} {unit}.", big - small
    if form in (2, 3):
        question = rng.choice([f"How many {o} do {mine} have together?", f"How many do {mine} have in total?", f"How many {o} do {mine} have altogether?", "How many do they have together?",
                               f"How many {o} are there in total?", f"What is the total number of {o}?", f"How many {o} do {mine} have in all?", f"How many {o} is that in total?"])
        return s.tidy(f"{both} {question}"), f"{x} and {y} together:", [f"{x} + {y} = {x + y}"], f"They have {x + y} {o} together.", x + y
    if form == 4:
        sign = "+" if rng.random() < 0.5 else "-"
        if sign == "-":
            x, y = big + 1, small
        r = x + y if sign == "+" else x - y
        than = f"{s.num(y)} {'more' if sign == '+' else rng.choice(('fewer', 'less'))}"
        text = rng.choice([f"{n_} {had} {s.num(x)} {o}. {s.m} {had} {than}.", f"{n_} {had} {s.num(x)} {o} and {s.m} {had} {than} than {n}.", f"{n_} {had} {s.num(x)} {o}. {s.m} {had} {than} {o} than {n}."])
        return s.tidy(f"{text} {rng.choice([f'How many {o} does {s.m} have?', f'How many does {s.m} have?'])}"), f"{s.m} has {y} {'more' if sign == '+' else 'less'} than {x}:", [f"{x} {sign} {y} = {r}"], f"{s.m} has {r} {o}.", r
    if form in (5, 6):
        times = {2: rng.choice(("twice", "2 times", "two times", "double")), 3: "three times", 4: "four times", 5: "5 times"}[k]
        as_many = f"{times} as many" if times != "double" else "twice as many"
        text = rng.choice([f"{n_} {had} {s.num(x)} {o}. {s.m} {had} {as_many}.", f"{n_} {had} {s.num(x)} {o} and {s.m} {had} {as_many}.", f"{n_} {had} {s.num(x)} {o}. {s.m} {had} {as_many} as {n}.",
                           f"{n_} {had} {s.num(x)} {o} and {s.m} {had} {as_many} {o}."])
        r = x * k
        if form == 5:
            return s.tidy(f"{text} {rng.choice([f'How many {o} does {s.m} have?', f'How many does {s.m} have?'])}"), f"{k} times {x}:", product_steps(x, k), f"{s.m} has {r} {o}.", r
        return (s.tidy(f"{text} {rng.choice([f'How many {o} do they have together?', 'How many do they have in total?', f'How many {o} do they have altogether?'])}"), f"{s.m} has {k} times {x}:",
                product_steps(x, k) + [f"{x} + {r} = {x + r}"], f"They have {x + r} {o} together.", x + r)
    if form == 7:
        x, y = min(x, 200), min(y, 200)
        z = k * 3 + 1
        third = pick(rng, NAMES, 0.1)
        text = rng.choice([f"{n_} {had} {x} {o}, {s.m} {had} {y} and {third} {had} {z}.", f"{n_} {had} {x} {o}. {s.m} {had} {y} {o}. {third} {had} {z} {o}."])
        return (f"{text} {rng.choice(['How many do they have together?', f'How many {o} do they have in total?', f'How many {o} are there altogether?'])}", f"{x}, {y} and {z} together:",
                [f"{x} + {y} = {x + y}", f"{x + y} + {z} = {x + y + z}"], f"They have {x + y + z} {o} together.", x + y + z)
    x *= 2
    text = f"{n_} {had} {s.num(x)} {o}. {s.m} {had} half as many{rng.choice(['', f' as {n}'])}. How many {rng.choice([o + ' ', ''])}does {s.m} have?"
    return s.tidy(text), f"Half of {x}:", [f"{x} / 2 = {x // 2}"], f"{s.m} has {x // 2} {o}.", x // 2


def money(rng, x):
    return rng.choice(["{x} dollars", "${x}", "{x} euros", "{x} dollars", "€{x}"]).format(x=x)


LEGS = [("spider", 8, "legs"), ("dog", 4, "legs"), ("cat", 4, "legs"), ("bird", 2, "legs"), ("ant", 6, "legs"), ("car", 4, "wheels"), ("bicycle", 2, "wheels"), ("tricycle", 3, "wheels"), ("hand", 5, "fingers"),
        ("triangle", 3, "sides"), ("square", 4, "sides"), ("octopus", 8, "arms"), ("chair", 4, "legs"), ("table", 4, "legs"), ("horse", 4, "legs"), ("cow", 4, "legs")]
UNITS = [("hour", "minutes", 60), ("minute", "seconds", 60), ("day", "hours", 24), ("week", "days", 7), ("year", "months", 12), ("dozen eggs", "eggs", 12), ("km", "m", 1000), ("meter", "cm", 100), ("dollar", "cents", 100), ("kg", "grams", 1000), ("year", "weeks", 52)]


def times(rng, split):
    """Groups of equal size, prices, speeds, units."""
    def make():
        form = rng.randrange(10)
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        if rng.random() < 0.4:
            b = rng.randrange(2, 100)
        if form == 5:
            b = rng.choice((30, 40, 50, 60, 70, 80, 90, 100, 120, 200, 45, 65, 75, 25, b))
        return ("times", form, a, b), (form, a, b)
    form, a, b = draw(split, make)
    s = Writer(rng)
    o, i = rng.choice(THINGS + FOOD), rng.choice(ITEMS)
    n = s.n if not s.me else "I"
    A, B, r = s.num(a), s.num(b), a * b
    have, buy, pay = ("have", "buy", "pay") if s.me else (("had", "bought", "pay") if s.past else ("has", "buys", "pay"))
    do = "do" if s.me else "does"
    pack = rng.choice(["box", "bag", "pack", "basket", "jar", "crate", "carton", "packet", "drawer", "shelf", "bucket", "tray"])
    packs = pack + "es" if pack.endswith("x") else "shelves" if pack == "shelf" else pack + "s"
    total = f"How many {o} {do} {s.n} have{rng.choice(['', ' in total', ' altogether', ' in all'])}?"
    if form in (0, 1):
        text = rng.choice([f"There are {A} {packs} with {B} {o} in each. How many {o} are there{rng.choice(['', ' in total', ' altogether'])}?", f"{s.cap(n)} {have} {A} {packs} of {o}. There are {B} {o} in each {pack}. {total}",
                           f"{s.cap(n)} {have} {A} {packs} with {B} {o} each. {total}", f"A {pack} contains {B} {o}. How many {o} are in {A} {packs}?", f"Each {pack} has {B} {o}. How many {o} are in {A} {packs}?",
                           f"If there are {B} {o} in a {pack}, how many {o} are in {A} {packs}?", f"{s.cap(n)} {buy} {A} {packs} of {B} {o}. {total}", f"One {pack} holds {B} {o}. How many {o} do {A} {packs} hold?",
                           f"{s.cap(n)} {buy} {A} {packs} with {B} {o} in each {pack}. {total}", f"How many {o} are in {A} {packs} of {B}?"])
        return text, f"{a} times {b}:", product_steps(b, a), f"There are {r} {o}.", r
    if form in (2, 3):
        p = money(rng, b)
        text = rng.choice([f"{s.cap(n)} {buy} {A} {i}s at {p} each. How much {do} {s.he} pay?", f"One {i} costs {p}. How much do {A} {i}s cost?", f"If one {i} costs {p}, how much do {A} {i}s cost?", f"A {i} costs {p}. What is the price of {A} {i}s?",
                           f"{s.cap(n)} {buy} {A} {i}s for {p} each. How much {do} {s.he} pay in total?", f"{s.cap(n)} {buy} {A} {i}s. Each {i} costs {p}. How much {do} {s.he} spend?", f"How much are {A} {i}s at {p} each?",
                           f"What do {A} {i}s cost if one costs {p}?", f"If {n} {buy} {A} {i}s at {p} each, how much {do} {s.he} pay?", f"Each {i} costs {p}. {s.cap(n)} {buy} {A}. What is the total cost?", f"A {i} is {p}. How much for {A}?"])
        return text, f"{a} at {b} each:", product_steps(b, a), f"The total is {r}.", r
    if form == 4:
        friends = rng.choice(["children", "friends", "students", "boys", "girls", "kids", "workers"])
        text = rng.choice([f"{A} {friends} have {B} {o} each. How many {o} do they have{rng.choice(['', ' in total', ' together'])}?", f"Each of {A} {friends} has {B} {o}. How many {o} are there?", f"There are {A} {friends}. Each has {B} {o}. How many {o} are there in total?",
                           f"{s.cap(n)} {'give' if s.me else 'gives'} {B} {o} to each of {A} {friends}. How many {o} is that?", f"{A} {friends} each get {B} {o}. How many {o} are needed?"])
        return text, f"{a} times {b}:", product_steps(b, a), f"There are {r} {o}.", r
    if form == 5:
        what, unit = rng.choice([("train", "km"), ("car", "km"), ("train", "miles"), ("bus", "km"), ("plane", "km"), ("bike", "km"), ("ship", "miles"), ("truck", "km")])
        speed = rng.choice([f"{b} {unit} per hour", f"{b} {unit} an hour", f"{b} {unit}/h"])
        text = rng.choice([f"A {what} travels at {speed}. How far does it travel in {A} hours?", f"If a {what} travels at {speed}, how far does it go in {A} hours?", f"A {what} drives {speed} for {A} hours. How far does it go?", f"A {what} moves at {speed}. How many {unit} does it go in {A} hours?",
                           f"How far does a {what} go in {A} hours at {speed}?", f"If a {what} goes {speed} for {A} hours, how far does it get?", f"A {what} goes {b} {unit} in one hour. How far does it go in {A} hours?", f"A {what} travels {speed} for {A} hours. What distance does it cover?"])
        return text, f"{a} hours at {b}:", product_steps(b, a), f"It goes {r} {unit}.", r
    if form == 6:
        what, b, parts = rng.choice(LEGS)
        r = a * b
        text = rng.choice([f"A {what} has {b} {parts}. How many {parts} do {A} {what}s have?", f"How many {parts} do {A} {what}s have?", f"If a {what} has {b} {parts}, how many {parts} do {A} {what}s have?", f"There are {A} {what}s. How many {parts} are there?"])
        return text.replace("octopuss", "octopuses"), f"{a} times {b}:", product_steps(b, a), f"They have {r} {parts}.", r
    if form == 7:
        one, many, b = rng.choice(UNITS)
        r = a * b
        ones = one if one.startswith(("dozen", "km", "kg")) else one + "s"
        text = rng.choice([f"How many {many} are in {A} {ones}?", f"How many {many} are there in {A} {ones}?", f"How many {many} do {A} {ones} have?", f"Convert {a} {ones} to {many}."])
        return text, f"{a} times {b}:", product_steps(b, a), f"That is {r} {many}.", r
    if form == 8:
        verb, thing = rng.choice([("reads", "pages"), ("earns", "dollars"), ("runs", "km"), ("makes", "cakes"), ("writes", "letters"), ("saves", "dollars"), ("plants", "trees"), ("sells", "tickets"), ("drinks", "cups"), ("learns", "words"), ("walks", "km"), ("solves", "problems")])
        unit = rng.choice(["day", "hour", "week", "month"])
        if unit == "day" and rng.random() < 0.25:
            a, A, span = 7, "7", "a week"
        else:
            span = f"{A} {unit}s"
        r = a * b
        n = s.n if not s.me else s.m
        he = s.he if not s.me else rng.choice(("he", "she"))
        do = "do" if he == "they" else "does"
        text = rng.choice([f"{s.cap(n)} {verb} {B} {thing} {rng.choice(['every', 'each', 'a', 'per'])} {unit}. How many {thing} in {span}?", f"{s.cap(n)} {verb} {B} {thing} every {unit}. How many {thing} {do} {he} {verb[:-1]} in {span}?",
                           f"If {n} {verb} {B} {thing} per {unit}, how many {thing} is that in {span}?", f"{s.cap(n)} {verb} {B} {thing} a {unit} for {span}. How many {thing} is that?"])
        return text, f"{a} times {b}:", product_steps(b, a), f"That is {r} {thing}.", r
    text = rng.choice([f"There are {A} rows with {B} {o} in each row. How many {o} are there?", f"A garden has {A} rows of {B} {o}. How many {o} is that?", f"{s.cap(n)} {'put' if s.me or s.past else 'puts'} {B} {o} in each of {A} {packs}. How many {o} are there?",
                       f"A room has {A} tables with {B} chairs each. How many chairs are there?", f"A rectangle is {a} cm wide and {b} cm long. What is its area?", f"A wall has {A} rows of {B} tiles. How many tiles are there?"])
    return text, f"{a} times {b}:", product_steps(b, a), f"The answer is {r}.", r


def share(rng, split):
    """Equal shares, groups, unit prices, travel times; some with a remainder."""
    def make():
        form = rng.randrange(8)
        d, q = rng.randrange(2, 11), rng.randrange(2, 13)
        if rng.random() < 0.35:
            q = rng.randrange(2, 50)
        rest = rng.randrange(1, d) if form == 7 and d > 1 else 0
        return ("share", form, d, q, rest), (form, d, q, rest)
    form, d, q, rest = draw(split, make)
    s = Writer(rng)
    p = d * q + rest
    o, i = rng.choice(THINGS + FOOD), rng.choice(ITEMS)
    n, P, D = s.n, s.num(p), s.num(d)
    v = lambda third, base, past: base if s.me else past if s.past else third
    group = rng.choice(["friends", "children", "people", "kids", "students", "boys", "girls", "brothers", "guests", "plates", "boxes", "bags"])
    among = rng.choice(["among", "between", "with"]) if group not in ("plates", "boxes", "bags") else "among"
    one = {"children": "child", "people": "person", "boxes": "box"}.get(group, group[:-1])
    steps = [f"{p} / {d} = {q}"]
    if form in (0, 1, 2):
        if among == "with":
            among = "among"
        text = rng.choice([f"{s.cap(n)} {v('shares', 'share', 'shared')} {P} {o} equally {among} {D} {group}. How many does each {one} get?", f"{s.cap(n)} {v('has', 'have', 'had')} {P} {o} and {v('shares', 'share', 'shared')} them equally {among} {D} {group}. How many {o} does each {one} get?",
                           f"{P} {o} are shared equally {among} {D} {group}. How many does each {one} get?", f"{D} {group} share {P} {o} equally. How many does each get?", f"{s.cap(n)} {v('divides', 'divide', 'divided')} {P} {o} {among} {D} {group}. How many {o} does each {one} get?",
                           f"If {D} {group} share {P} {o} equally, how many does each {one} get?", f"{s.cap(n)} {v('splits', 'split', 'split')} {P} {o} evenly {among} {D} {group}. How many does each one get?", f"{s.cap(n)} {v('wants', 'want', 'wanted')} to share {P} {o} with {D} friends equally. How many {o} does each friend get?",
                           f"{P} {o} are divided into {D} equal groups. How many {o} are in each group?", f"How many {o} does each {one} get if {D} {group} share {P} {o}?", f"{s.cap(n)} {v('puts', 'put', 'put')} {P} {o} into {D} boxes equally. How many {o} are in each box?"])
        return s.tidy(text), f"{p} shared by {d}:", steps, f"Each gets {q}.", q
    if form in (3, 4):
        text = rng.choice([f"{P} {o} are put into bags of {D}. How many bags are there?", f"How many groups of {D} can you make from {P} {o}?", f"{P} students are split into teams of {D}. How many teams are there?", f"{s.cap(n)} {v('has', 'have', 'had')} {P} {o} and {v('puts', 'put', 'put')} {D} in each box. How many boxes {'do' if s.me else 'does'} {s.he} need?",
                           f"A box holds {D} {o}. How many boxes are needed for {P} {o}?", f"There are {P} {o}. Each bag holds {D}. How many bags are needed?", f"{P} people ride in cars. {D} people fit in each car. How many cars are needed?", f"{s.cap(n)} {v('packs', 'pack', 'packed')} {P} {o} in packs of {D}. How many packs are there?"])
        return text, f"{p} in groups of {d}:", steps, f"The answer is {q}.", q
    if form == 5:
        m = money(rng, p)
        each = money(rng, d)
        text = rng.choice([f"{D} {i}s cost {m}. How much does one {i} cost?", f"If {D} {i}s cost {m}, how much is one {i}?", f"{s.cap(n)} {v('pays', 'pay', 'paid')} {m} for {D} {i}s. How much does each {i} cost?", f"{D} {i}s cost {m} in total. What is the price of one {i}?",
                           f"{s.cap(n)} {v('has', 'have', 'had')} {m}. One {i} costs {each}. How many {i}s can {s.he} buy?", f"How many {i}s can {'I' if s.me else n} buy with {m} if one costs {each}?", f"A {i} costs {each}. How many {i}s can you buy for {m}?"])
        return text, f"{p} by {d}:", steps, f"The answer is {q}.", q
    if form == 6:
        what, unit = rng.choice([("train", "km"), ("car", "km"), ("bus", "miles"), ("plane", "km"), ("bike", "km")])
        text = rng.choice([f"A {what} travels {p} {unit} in {D} hours. How fast is it?", f"A {what} goes {p} {unit} in {D} hours. What is its speed?", f"How long does it take a {what} to travel {p} {unit} at {d} {unit} per hour?", f"If a {what} drives {p} {unit} in {D} hours, what is its speed?",
                           f"A {what} drives {d} {unit} per hour. How many hours does it need for {p} {unit}?", f"{s.cap(s.m)} reads {d} pages a day. How many days does {s.m} need for {p} pages?", f"{s.cap(s.m)} earns {p} dollars in {D} hours. How much is that per hour?"])
        return text, f"{p} by {d}:", steps, f"The answer is {q}.", q
    text = rng.choice([f"{s.cap(n)} {v('shares', 'share', 'shared')} {P} {o} equally among {D} friends. How many does each friend get and how many are left over?", f"{P} {o} are shared equally by {D} children. How many does each get, and how many are left?",
                       f"{s.cap(n)} {v('has', 'have', 'had')} {P} {o} and {D} friends. How many {o} does each friend get and how many remain?", f"{P} {o} are put into boxes of {D}. How many boxes are full and how many {o} are left over?"])
    return text, f"{p} by {d}:", [f"{d} * {q} = {d * q}", f"{p} - {d * q} = {rest}"], f"The answer is {q}, with {rest} left over.", rest


def wallet(rng, split):
    """Spending, change, several prices, two steps with a product."""
    def make():
        form = rng.randrange(7)
        x, y, z = rng.randrange(5, 120), rng.randrange(1, 60), rng.randrange(1, 40)
        a, b = rng.randrange(2, 10), rng.randrange(2, 13)
        return ("wallet", form, x, y, z, a, b), (form, x, y, z, a, b)
    form, x, y, z, a, b = draw(split, make)
    s = Writer(rng)
    i, j = rng.sample(ITEMS, 2)
    o = rng.choice(THINGS + FOOD)
    sign = rng.choice(["{} dollars", "${}", "{} euros", "{} dollars", "€{}"]).format
    n, he = s.n, s.he
    v = lambda third, base, past: base if s.me else past if s.past else third
    do = "do" if he in ("I", "they") else "does"
    A, B = s.num(a), s.num(b)
    ab = a * b
    left = rng.choice([f"How much money {do} {he} have left?", "How much is left?", f"How much {do} {he} have left?", f"How much money is left?", f"How much {do} {he} still have?"])
    if form == 0:
        x += y
        text = rng.choice([f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)} and {v('spends', 'spend', 'spent')} {sign(y)}. {left}", f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)}. {s.cap(he)} {'buy' if he in ('I', 'they') and not s.past else 'bought' if s.past else 'buys'} a {i} for {sign(y)}. {left}",
                           f"A {i} costs {sign(y)}. {s.cap(n)} {v('pays', 'pay', 'paid')} with {sign(x)}. How much change {do} {he} get?", f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)} and {v('buys', 'buy', 'bought')} a {i} that costs {sign(y)}. {left}",
                           f"{s.cap(n)} {v('buys', 'buy', 'bought')} a {i} for {sign(y)} and {v('pays', 'pay', 'paid')} with a {sign(x)} bill. How much change {do} {he} get back?"])
        return s.tidy(text), f"{x} minus {y}:", [f"{x} - {y} = {x - y}"], f"{x - y} are left.", x - y
    if form == 1:
        text = rng.choice([f"{s.cap(n)} {v('buys', 'buy', 'bought')} a {i} for {sign(x)} and a {j} for {sign(y)}. How much {do} {he} spend?", f"A {i} costs {sign(x)} and a {j} costs {sign(y)}. How much do they cost together?", f"A {i} costs {sign(x)}, a {j} costs {sign(y)}. What is the total?",
                           f"{s.cap(n)} {v('spends', 'spend', 'spent')} {sign(x)} on a {i} and {sign(y)} on a {j}. How much is that in total?", f"{s.cap(n)} {v('earns', 'earn', 'earned')} {sign(x)} on Monday and {sign(y)} on Tuesday. How much in total?"])
        return s.tidy(text), f"{x} and {y} together:", [f"{x} + {y} = {x + y}"], f"The total is {x + y}.", x + y
    if form == 2:
        x += y + z
        text = rng.choice([f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)}. {s.cap(n)} {v('buys', 'buy', 'bought')} a {i} for {sign(y)} and a {j} for {sign(z)}. {left}", f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)}, {v('spends', 'spend', 'spent')} {sign(y)} on a {i} and {sign(z)} on a {j}. {left}"])
        return s.tidy(text), f"{x} minus {y} minus {z}:", [f"{x} - {y} = {x - y}", f"{x - y} - {z} = {x - y - z}"], f"{x - y - z} are left.", x - y - z
    if form == 3:
        text = rng.choice([f"{s.cap(n)} {v('buys', 'buy', 'bought')} {A} {i}s for {sign(b)} each and a {j} for {sign(y)}. How much {do} {he} pay?", f"{s.cap(n)} {v('buys', 'buy', 'bought')} {A} {i}s at {sign(b)} each and one {j} for {sign(y)}. What is the total cost?",
                           f"A {i} costs {sign(b)} and a {j} costs {sign(y)}. How much do {A} {i}s and one {j} cost?"])
        return s.tidy(text), f"{a} at {b} and {y}:", [f"{b} * {a} = {ab}", f"{ab} + {y} = {ab + y}"], f"The total is {ab + y}.", ab + y
    if form == 4:
        x = ab + x
        text = rng.choice([f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)} and {v('buys', 'buy', 'bought')} {A} {i}s for {sign(b)} each. {left}", f"{s.cap(n)} {v('buys', 'buy', 'bought')} {A} {i}s at {sign(b)} each and {v('pays', 'pay', 'paid')} with {sign(x)}. How much change {do} {he} get?",
                           f"{s.cap(n)} {v('has', 'have', 'had')} {sign(x)}. Each {i} costs {sign(b)}. {s.cap(n)} {v('buys', 'buy', 'bought')} {A}. {left}"])
        return s.tidy(text), f"{a} at {b}, from {x}:", [f"{b} * {a} = {ab}", f"{x} - {ab} = {x - ab}"], f"{x - ab} are left.", x - ab
    if form == 5:
        y = y % ab or 1
        text = rng.choice([f"{s.cap(n)} {v('has', 'have', 'had')} {A} boxes with {B} {o} each and {v('gives', 'give', 'gave')} {s.num(y)} to {s.m}. How many {o} are left?", f"{s.cap(n)} {v('buys', 'buy', 'bought')} {A} packs of {B} {o} and {v('uses', 'use', 'used')} {s.num(y)}. How many are left?",
                           f"There are {A} bags with {B} {o} in each. {s.cap(s.m)} takes {s.num(y)}. How many {o} remain?", f"{s.cap(n)} {v('makes', 'make', 'made')} {A} trays of {B} {o} and {v('sells', 'sell', 'sold')} {s.num(y)}. How many {o} are left?"])
        return s.tidy(text), f"{a} times {b} minus {y}:", [f"{b} * {a} = {ab}", f"{ab} - {y} = {ab - y}"], f"{ab - y} are left.", ab - y
    text = rng.choice([f"{s.cap(n)} {v('has', 'have', 'had')} {s.num(y)} {o} and {v('buys', 'buy', 'bought')} {A} packs of {B}. How many {o} {do} {he} have now?", f"{s.cap(n)} {v('has', 'have', 'had')} {s.num(y)} {o}. {s.m} {'gave' if s.past else 'gives'} {s.him} {A} boxes with {B} {o} each. How many {o} {do} {he} have?",
                       f"{s.cap(n)} {v('has', 'have', 'had')} {s.num(y)} {o} and {v('gets', 'get', 'got')} {A} bags of {B} {o}. How many {o} in total?"])
    return s.tidy(text), f"{y} plus {a} times {b}:", [f"{b} * {a} = {ab}", f"{y} + {ab} = {y + ab}"], f"{s.you} {s.have} {y + ab} {o}.", y + ab


def ages(rng, split):
    def make():
        form = rng.randrange(5)
        x, y = rng.randrange(12, 90), rng.randrange(1, 12)
        return ("ages", form, x, y), (form, x, y)
    form, x, y = draw(split, make)
    s = Writer(rng)
    n, m = (pick(rng, NAMES, 0.15) if s.it else s.n), s.m
    is_ = "am" if s.me else "is"
    N = s.cap(n)
    if form == 0:
        text = rng.choice([f"{N} {is_} {x} years old. How old will {s.he if s.he != 'it' else n} be in {y} years?", f"{N} {is_} {x}. How old will {n} be in {y} years?", f"If {n} {is_} {x} now, how old will {n} be in {y} years?"])
        return text, f"{x} plus {y}:", [f"{x} + {y} = {x + y}"], f"{s.you if n == s.n else n} will be {x + y} years old.", x + y
    if form == 1:
        text = rng.choice([f"{N} {is_} {x} years old. How old was {n} {y} years ago?", f"{N} {is_} {x}. How old {'was' if not s.me else 'was'} {n} {y} years ago?"])
        return text, f"{x} minus {y}:", [f"{x} - {y} = {x - y}"], f"The answer is {x - y}.", x - y
    sign = "+" if form in (2, 3) else "-"
    r = x + y if sign == "+" else x - y
    word = "older" if sign == "+" else "younger"
    text = rng.choice([f"{N} {is_} {x} years old. {m} is {y} years {word}. How old is {m}?", f"{N} {is_} {x} and {m} is {y} years {word}. How old is {m}?", f"{N} {is_} {x}. {m} is {y} years {word} than {n if not s.me else 'me'}. How old is {m}?",
                       f"{m} is {y} years {word} than {n if not s.me else 'me'}. {N} {is_} {x}. How old is {m}?", f"{m} is {y} years {word} than {n if not s.me else 'I am'}. If {n} {is_} {x}, how old is {m}?"])
    return text, f"{y} years {word} than {x}:", [f"{x} {sign} {y} = {r}"], f"{m} is {r} years old.", r


KINDS = [(story, 34), (scene, 14), (compare, 14), (times, 15), (share, 10), (wallet, 11), (ages, 3)]


def narrate(rng, split):
    return rng.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0](rng, split)
