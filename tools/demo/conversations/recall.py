"""Multi-turn recall: facts told earlier in the conversation, changed, mixed with other talk, and asked for later."""
from . import words as w
from .split import draw

# kind: (value maker, ways to tell it, acknowledgement, ways to ask, answer). {v} is the value.
FACTS = {
    "name": (lambda r: w.pick(r, w.NAMES, 0.4), ["My name is {v}.", "I am {v}.", "Hi, I'm {v}.", "Hello, my name is {v}.", "my name is {v}",
             "You can call me {v}."], "Nice to meet you, {v}.", ["What is my name?", "Who am I?", "Do you remember my name?", "whats my name",
             "Can you tell me my name?"], "Your name is {v}."),
    "colour": (lambda r: r.choice(w.COLOURS), ["My favourite colour is {v}.", "My favorite color is {v}.", "I like the colour {v} best.",
               "my favorite color is {v}"], "I will remember that your favourite colour is {v}.", ["What is my favourite colour?",
               "What is my favorite color?", "Which colour do I like best?", "whats my favorite color"], "Your favourite colour is {v}."),
    "city": (lambda r: w.pick(r, w.CITIES, 0.3), ["I live in {v}.", "I am from {v}.", "My home is in {v}.", "i live in {v}", "I moved to {v}."],
             "I will remember that you live in {v}.", ["Where do I live?", "Which city do I live in?", "Do you know where I live?",
             "What city am I from?"], "You live in {v}."),
    "age": (lambda r: r.randrange(9, 90), ["I am {v} years old.", "My age is {v}.", "I'm {v} years old.", "I just turned {v}."],
            "I will remember that you are {v} years old.", ["How old am I?", "What is my age?", "Do you remember how old I am?"],
            "You are {v} years old."),
    "dog": (lambda r: w.pick(r, w.PETS, 0.4), ["My dog is called {v}.", "My dog's name is {v}.", "I have a dog named {v}.", "my dog is called {v}"],
            "I will remember that your dog is called {v}.", ["What is my dog called?", "What is the name of my dog?", "What's my dog's name?"],
            "Your dog is called {v}."),
    "cat": (lambda r: w.pick(r, w.PETS, 0.4), ["My cat is called {v}.", "My cat's name is {v}.", "I have a cat named {v}."],
            "I will remember that your cat is called {v}.", ["What is my cat called?", "What is the name of my cat?", "What's my cat's name?"],
            "Your cat is called {v}."),
    "sister": (lambda r: w.pick(r, w.NAMES, 0.4), ["My sister is called {v}.", "My sister's name is {v}.", "I have a sister named {v}."],
               "I will remember that your sister is called {v}.", ["What is my sister called?", "What is my sister's name?",
               "Do you know the name of my sister?"], "Your sister is called {v}."),
    "brother": (lambda r: w.pick(r, w.NAMES, 0.4), ["My brother is called {v}.", "My brother's name is {v}.", "I have a brother named {v}."],
                "I will remember that your brother is called {v}.", ["What is my brother called?", "What is my brother's name?",
                "Do you know the name of my brother?"], "Your brother is called {v}."),
    "friend": (lambda r: w.pick(r, w.NAMES, 0.4), ["My best friend is {v}.", "My best friend is called {v}."],
               "I will remember that your best friend is {v}.", ["Who is my best friend?", "What is my best friend called?"],
               "Your best friend is {v}."),
    "job": (lambda r: r.choice(w.JOBS), ["I work as a {v}.", "My job is {v}.", "I am a {v}.", "I have a job as a {v}."],
            "I will remember that your job is {v}.", ["What is my job?", "What do I do for work?", "What do I work as?"], "Your job is {v}."),
    "food": (lambda r: r.choice(w.FOODS), ["My favourite food is {v}.", "My favorite food is {v}.", "I love to eat {v}.", "The food I like best is {v}."],
             "I will remember that your favourite food is {v}.", ["What is my favourite food?", "What food do I like best?",
             "What is my favorite food?"], "Your favourite food is {v}."),
    "drink": (lambda r: r.choice(w.DRINKS), ["My favourite drink is {v}.", "I like to drink {v}.", "My favorite drink is {v}."],
              "I will remember that your favourite drink is {v}.", ["What is my favourite drink?", "What do I like to drink?",
              "What is my favorite drink?"], "Your favourite drink is {v}."),
    "hobby": (lambda r: r.choice(w.HOBBIES), ["My hobby is {v}.", "In my free time I enjoy {v}.", "I like {v} in my free time."],
              "I will remember that your hobby is {v}.", ["What is my hobby?", "What do I do in my free time?"], "Your hobby is {v}."),
    "sport": (lambda r: r.choice(w.SPORTS), ["My favourite sport is {v}.", "I play {v}.", "The sport I play is {v}."],
              "I will remember that your sport is {v}.", ["What sport do I play?", "Which sport do I like?", "What is my sport?"],
              "Your sport is {v}."),
    "instrument": (lambda r: r.choice(w.INSTRUMENTS), ["I play the {v}.", "My instrument is the {v}.", "I am learning the {v}."],
                   "I will remember that your instrument is the {v}.", ["Which instrument do I play?", "What instrument am I learning?",
                   "What is my instrument?"], "Your instrument is the {v}."),
    "month": (lambda r: r.choice(w.MONTHS), ["My birthday is in {v}.", "I was born in {v}.", "I have my birthday in {v}."],
              "I will remember that your birthday is in {v}.", ["When is my birthday?", "In which month is my birthday?",
              "What month was I born in?"], "Your birthday is in {v}."),
    "code": (lambda r: "".join(r.choice("0123456789") for _ in range(r.choice((3, 4, 4, 5, 6)))), ["My locker code is {v}.", "The code for my locker is {v}.",
             "Remember my locker code: {v}.", "Please remember the code {v}."], "I will remember the code {v}.", ["What is my locker code?",
             "What was the code?", "What is the code for my locker?", "Tell me the code again."], "The code is {v}."),
    "number": (lambda r: r.randrange(2, 1000), ["My lucky number is {v}.", "My favourite number is {v}.", "Remember the number {v}."],
               "I will remember the number {v}.", ["What is my lucky number?", "What number did I tell you?", "What was my number?"],
               "The number is {v}."),
    "room": (lambda r: r.randrange(100, 999), ["My room number is {v}.", "I am staying in room {v}.", "I am in room {v}."],
             "I will remember that your room is {v}.", ["What is my room number?", "Which room am I in?"], "Your room is {v}."),
    "car": (lambda r: r.choice(w.COLOURS), ["My car is {v}.", "I drive a {v} car.", "The colour of my car is {v}."],
            "I will remember that your car is {v}.", ["What colour is my car?", "What is the colour of my car?", "What color is my car?"],
            "Your car is {v}."),
    "meeting": (lambda r: f"{r.choice(w.DAYS)} at {r.randrange(1, 13)} {r.choice(('am', 'pm'))}", ["My meeting is on {v}.", "I have a meeting on {v}.",
                "Remember that my meeting is on {v}."], "I will remember that your meeting is on {v}.", ["When is my meeting?",
                "What time is my meeting?", "When do I have the meeting?"], "Your meeting is on {v}."),
    "trip": (lambda r: w.pick(r, w.CITIES, 0.3), ["I am going on a trip to {v}.", "My next trip is to {v}.", "I will travel to {v} soon."],
             "I will remember that your trip is to {v}.", ["Where is my trip to?", "Where am I going on my trip?", "Where will I travel to?"],
             "Your trip is to {v}."),
    "project": (lambda r: w.made_up(r), ["My project is called {v}.", "I work on a project named {v}.", "The name of my project is {v}."],
                "I will remember that your project is called {v}.", ["What is my project called?", "What is the name of my project?"],
                "Your project is called {v}."),
}
KINDS = list(FACTS)
UNKNOWN = "You have not told me that yet."


def recall(rng, split, thinking, filler):
    """`filler(rng)` returns one unrelated exchange [user, assistant]."""
    def make():
        count = rng.choices((1, 2, 3, 4, 5), (20, 28, 26, 16, 10))[0]
        kinds = rng.sample(KINDS, count)
        asked = rng.choice(kinds)
        values = {kind: FACTS[kind][0](rng) for kind in kinds}
        return ("recall", asked, values[asked], tuple(sorted(kinds))), (kinds, asked, values)
    kinds, asked, values = draw(split, make)
    count = len(kinds)
    turns, source = [], {}
    grouped = list(kinds)
    while grouped:
        take = min(len(grouped), rng.choices((1, 2, 3), (70, 22, 8))[0])
        group, grouped = grouped[:take], grouped[take:]
        told = [rng.choice(FACTS[k][1]).format(v=values[k]) for k in group]
        for k, text in zip(group, told):
            source[k] = text
        reply = FACTS[group[0]][2].format(v=values[group[0]]) if take == 1 else "Thank you, I will remember all of that."
        turns.append((" ".join(told), reply))
        while rng.random() < 0.3:
            turns.append(filler(rng))
    if rng.random() < 0.12:  # a fact changes: the latest one counts
        new = FACTS[asked][0](rng)
        values[asked] = new
        text = rng.choice(["Actually, ", "Sorry, I was wrong: ", "Correction: ", "Wait. "]) + rng.choice(FACTS[asked][1]).format(v=new)
        source[asked] = text
        turns.append((text, FACTS[asked][2].format(v=new)))
    while rng.random() < 0.25:
        turns.append(filler(rng))
    if rng.random() < 0.1:
        missing = rng.choice([k for k in KINDS if k not in kinds])
        question, answer = rng.choice(FACTS[missing][3]), UNKNOWN
        reasoning = "I look for this in what the user told me. It was not said."
    elif count > 1 and rng.random() < 0.15:
        other = rng.choice([k for k in kinds if k != asked])
        question = f"{rng.choice(FACTS[asked][3])} {rng.choice(FACTS[other][3])}"
        answer = f"{FACTS[asked][4].format(v=values[asked])} {FACTS[other][4].format(v=values[other])}"
        reasoning = f"The user said: {source[asked]} And: {source[other]}"
    else:
        question, answer = rng.choice(FACTS[asked][3]), FACTS[asked][4].format(v=values[asked])
        reasoning = f"The user said: {source[asked]}"
    if rng.random() < 0.3:
        question = rng.choice(["Now tell me: ", "One question. ", "Do you remember? ", "So, ", "Tell me, "]) + question
    return dict(history=turns, user=question, reasoning=reasoning, content=answer, expect={"kind": "text", "value": answer})


def telling(rng, thinking):
    """The user states a fact; the answer acknowledges it."""
    kind = rng.choice(KINDS)
    value = FACTS[kind][0](rng)
    text = rng.choice(FACTS[kind][1]).format(v=value)
    reply = FACTS[kind][2].format(v=value)
    return dict(user=text, reasoning="The user tells me something. I confirm it.", content=reply, expect={"kind": "text", "value": reply})


def telling_many(rng, thinking):
    kinds = rng.sample(KINDS, rng.choice((2, 3)))
    told = [rng.choice(FACTS[k][1]).format(v=FACTS[k][0](rng)) for k in kinds]
    reply = "Thank you, I will remember all of that."
    return dict(user=" ".join(told), reasoning="The user tells me several things. I confirm them.", content=reply,
                expect={"kind": "text", "value": reply})
