"""Facts of any kind: "My NOUN is VALUE", facts about people in the question itself, and text to repeat."""
from . import words as w
from .split import draw

NOUNS = """favourite book;favourite movie;favourite song;favourite animal;favourite game;favourite place;favourite fruit;favourite number;favourite word;favourite teacher;favourite band;favourite season;
wifi password;password;username;user name;phone number;license plate;order number;ticket number;seat;PIN;secret word;magic word;secret code;access code;account number;booking code;flight number;team;school;street;
company;boss;neighbour;teacher;doctor;cousin;aunt;uncle;mother;father;grandmother;grandfather;son;daughter;wife;husband;horse;hamster;parrot;goldfish;rabbit;boat;robot;computer;laptop;phone;band;website;email;
server;file;key;project;team name;nickname;last name;first name;middle name;shoe size;height;weight;birthday;locker;hotel;table number;customer number;street name;home town;country;language;star sign;house number;
bicycle;guitar;plant;favorite book;favorite movie;favorite song;favorite animal;favorite fruit;best friend;girlfriend;boyfriend;roommate;tutor;coach;dentist""".replace("\n", "").split(";")


def value_for(rng, noun):
    kind = rng.random()
    if noun in ("shoe size", "height", "weight", "favourite number", "house number", "table number", "PIN", "seat") or kind < 0.1:
        return str(rng.randrange(1, 10 ** rng.choice((1, 2, 3, 4))))
    if kind < 0.55:
        return w.odd(rng)
    return w.pick(rng, rng.choice((w.NAMES, w.CITIES, w.PETS, w.COLOURS, w.FOODS, w.ANIMALS, w.SONGS, w.PRODUCTS, w.THINGS)), 0.5)


def any_fact(rng, split, thinking, filler):
    def make():
        nouns = rng.sample(NOUNS, rng.choices((1, 2, 3, 4), (40, 30, 20, 10))[0])
        values = [value_for(rng, n) for n in nouns]
        asked = rng.randrange(len(nouns))
        return ("anyfact", nouns[asked], values[asked]), (nouns, values, asked)
    nouns, values, asked = draw(split, make)
    tell = ["My {n} is {v}.", "My {n} is {v}.", "my {n} is {v}", "Remember that my {n} is {v}.", "Please remember: my {n} is {v}.", "The name of my {n} is {v}.", "My {n} is called {v}.", "Remember this: my {n} is {v}", "I have to tell you that my {n} is {v}.",
            "Note that my {n} is {v}.", "Hi, my {n} is {v}."]
    told = [rng.choice(tell).format(n=n, v=v) for n, v in zip(nouns, values)]
    n, v = nouns[asked], values[asked]
    question = rng.choice(["What is my {n}?", "What is my {n}?", "What's my {n}?", "what is my {n}", "Do you remember my {n}?", "Can you tell me my {n}?", "Tell me my {n}.", "What was my {n}?", "What did I say my {n} is?", "whats my {n}?"]).format(n=n)
    answer = f"Your {n} is {v}."
    if rng.random() < 0.08:
        question = rng.choice(["What is my {n}?", "What's my {n}?"]).format(n=rng.choice([m for m in NOUNS if m not in nouns and m[:4] != n[:4]]))
        answer = "You have not told me that yet."
    turns = []
    reasoning = f"The user said: {told[asked]}" if answer[0:4] == "Your" else "I look for this in what the user told me. It was not said."
    if rng.random() < 0.25:  # told and asked in one message
        return dict(history=[], user=" ".join(told) + " " + question, reasoning=reasoning, content=answer, expect={"kind": "text", "value": answer})
    for text, noun, value in zip(told, nouns, values):
        turns.append((text, f"I will remember that your {noun} is {value}."))
        while rng.random() < 0.2:
            turns.append(filler(rng))
    return dict(history=turns, user=question, reasoning=reasoning, content=answer, expect={"kind": "text", "value": answer})


def told_fact(rng, thinking):
    noun = rng.choice(NOUNS)
    value = value_for(rng, noun)
    text = rng.choice(["My {n} is {v}.", "my {n} is {v}", "Remember that my {n} is {v}.", "Please remember: my {n} is {v}.", "My {n} is called {v}.", "The name of my {n} is {v}."]).format(n=noun, v=value)
    reply = f"I will remember that your {noun} is {value}."
    return dict(user=text, reasoning="The user tells me something. I confirm it.", content=reply, expect={"kind": "text", "value": reply})


# statement, question by subject, answer, question by value, value maker
ABOUT = [
    ("{n} lives in {v}.", "Where does {n} live?", "{n} lives in {v}.", "Who lives in {v}?", lambda r: w.pick(r, w.CITIES, 0.3)),
    ("{n} is a {v}.", "What is {n}'s job?", "{n} is a {v}.", "Who is the {v}?", lambda r: r.choice(w.JOBS)),
    ("{n} likes {v}.", "What does {n} like?", "{n} likes {v}.", "Who likes {v}?", lambda r: w.pick(r, w.FOODS + w.HOBBIES, 0.15)),
    ("{n} has a {v}.", "What does {n} have?", "{n} has a {v}.", "Who has the {v}?", lambda r: r.choice(w.ANIMALS + w.ITEMS)),
    ("{n} plays the {v}.", "What does {n} play?", "{n} plays the {v}.", "Who plays the {v}?", lambda r: r.choice(w.INSTRUMENTS)),
    ("{n} is {v} years old.", "How old is {n}?", "{n} is {v} years old.", "Who is {v} years old?", lambda r: r.randrange(5, 90)),
    ("{n}'s favourite colour is {v}.", "What is {n}'s favourite colour?", "{n}'s favourite colour is {v}.", "Whose favourite colour is {v}?", lambda r: r.choice(w.COLOURS)),
    ("{n}'s dog is called {v}.", "What is {n}'s dog called?", "{n}'s dog is called {v}.", "Whose dog is called {v}?", lambda r: w.pick(r, w.PETS, 0.4)),
    ("{n} drinks {v}.", "What does {n} drink?", "{n} drinks {v}.", "Who drinks {v}?", lambda r: r.choice(w.DRINKS)),
    ("{n} works in {v}.", "Where does {n} work?", "{n} works in {v}.", "Who works in {v}?", lambda r: w.pick(r, w.CITIES, 0.3)),
    ("The {n} is in the {v}.", "Where is the {n}?", "The {n} is in the {v}.", "What is in the {v}?", lambda r: r.choice(w.ROOMS)),
    ("The {n} is {v}.", "What colour is the {n}?", "The {n} is {v}.", "What is {v}?", lambda r: r.choice(w.COLOURS)),
    ("The {n} costs {v} dollars.", "How much does the {n} cost?", "The {n} costs {v} dollars.", "What costs {v} dollars?", lambda r: r.randrange(2, 500)),
]


def reading(rng, split, thinking):
    """Statements about people or things and a question about one of them, in one message or two."""
    def make():
        form = rng.choice(ABOUT)
        thing = form[0].startswith("The")
        count = rng.choices((1, 2, 3, 4), (15, 40, 30, 15))[0]
        names, values = [], []
        while len(names) < count:
            n = w.pick(rng, w.ITEMS, 0.1) if thing else w.pick(rng, w.NAMES, 0.3)
            v = form[4](rng)
            if n not in names and v not in values:
                names.append(n)
                values.append(v)
        return ("reading", form[0], names[0], values[0]), (form, names, values)
    form, names, values = draw(split, make)
    order = list(range(len(names)))
    rng.shuffle(order)
    lines = [form[0].format(n=names[i], v=values[i]) for i in order]
    extra = rng.random()
    if extra < 0.2:
        other = rng.choice([f for f in ABOUT if f[0][:4] == form[0][:4] and f is not form and f[1].split()[0] + f[1].split()[-1] != form[1].split()[0] + form[1].split()[-1]] or [form])
        if other is not form:
            lines.insert(rng.randrange(len(lines) + 1), other[0].format(n=names[order[0]], v=other[4](rng)))
    by_value = rng.random() < 0.35
    question = form[3 if by_value else 1].format(n=names[0], v=values[0])
    said = form[0].format(n=names[0], v=values[0])
    answer = form[2].format(n=names[0], v=values[0])
    text = " ".join(lines)
    if rng.random() < 0.15 and len(lines) == 2:
        text = lines[0][:-1] + " and " + (lines[1][0].lower() + lines[1][1:] if lines[1].startswith("The") else lines[1])
    history, user = [], f"{text} {question}"
    if rng.random() < 0.25:
        history, user = [(text, "Thank you, I will remember all of that." if len(lines) > 1 else "Thank you, I will remember that.")], question
    return dict(history=history, user=user, reasoning=f"The user said: {said}", content=answer, expect={"kind": "text", "value": answer})


def repeat(rng, split, thinking):
    """Text to write again, and letters of a word."""
    def make():
        pieces = [w.odd(rng) if rng.random() < 0.6 else w.pick(rng, rng.choice((w.COLOURS, w.NAMES, w.FOODS, w.ANIMALS, w.MESSAGES, w.PHRASES, w.OBJECTS)), 0.2) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
        return ("repeat", " ".join(pieces)), " ".join(pieces)
    text = draw(split, make)
    if rng.random() < 0.15:
        text = text.replace(" ", ", ")
    user = rng.choice(["Repeat: {t}", "Repeat after me: {t}", "Say: {t}", "Say {t}", "Write: {t}", "Repeat this: {t}", "repeat {t}", "Please repeat: {t}", "Copy this text: {t}", 'Say "{t}"', 'Repeat "{t}"', "Write this: {t}", "Echo {t}", "Can you say {t}?",
                       "Copy: {t}", "Type {t}"]).format(t=text)
    return dict(history=[], user=user, reasoning=f"I write: {text}", content=text, expect={"kind": "text", "value": text})


def fact(rng, split, thinking, filler):
    kind = rng.random()
    if kind < 0.5:
        return any_fact(rng, split, thinking, filler)
    return reading(rng, split, thinking) if kind < 0.8 else repeat(rng, split, thinking)
