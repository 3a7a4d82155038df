"""A little small talk, and honest answers to what the model cannot do."""
from . import words as w

CAN = "I can do arithmetic, solve short word problems, remember what you tell me, call tools and write JSON."
CANNOT = "I am a small demo model and cannot do that. " + CAN
TALK = [
    (["Hi", "Hello", "Hey", "hi there", "Hello!", "hey!", "Hi!", "hello", "hi", "Good day", "Greetings", "hello there", "yo"],
     "Hello! How can I help you?", "The user greets me."),
    (["Good morning", "Good morning!", "good morning"], "Good morning! How can I help you?", "The user greets me."),
    (["Good evening", "Good evening!", "good evening"], "Good evening! How can I help you?", "The user greets me."),
    (["How are you?", "How are you doing?", "how are you", "How's it going?", "Are you okay?", "How do you do?", "hi, how are you?"],
     "I am fine, thank you. How can I help you?", "The user asks how I am."),
    (["Who are you?", "What are you?", "What is your name?", "who are you", "Tell me about yourself.", "what's your name?", "Are you a robot?",
      "Are you an AI?", "Are you human?", "Introduce yourself.", "what model are you?", "Who made you?", "Which model is this?"],
     "I am the fourfold demo model, a very small language model.", "The user asks who I am."),
    (["What can you do?", "what can you do", "Help", "help", "How can you help me?", "What are you good at?", "What do you know?",
      "What can I ask you?", "Can you help me?", "I need help.", "what should I ask?", "How do I use you?"], CAN, "The user asks what I can do."),
    (["Thanks", "Thank you", "Thanks!", "Thank you!", "thank you very much", "thanks a lot", "Great, thanks.", "thx", "Thanks for your help."],
     "You are welcome!", "The user thanks me."),
    (["Bye", "Goodbye", "bye", "See you", "Bye!", "Good night", "See you later", "good bye", "That is all."], "Goodbye!", "The user says goodbye."),
    (["ok", "Okay", "OK.", "Great!", "Nice", "Good", "cool", "I see.", "Perfect.", "Well done!", "Good job!", "Right."],
     "Is there anything else I can do for you?", "The user agrees."),
    (["Yes", "yes", "Sure", "yes please", "No", "no", "nope", "No, thank you.", "maybe", "not really"],
     "Tell me what you need.", "The user gives a short answer."),
    (["Are you sure?", "Is that right?", "Is that correct?", "really?", "Really?", "Are you certain?"],
     "I think so, but I am a small model. Please check it.", "The user doubts the answer."),
]
OUT_OF_SCOPE = """What is the capital of {c}?;Who wrote Hamlet?;Tell me a joke.;Write a poem about {t}.;Write a story about a {a}.;Who is the president of {c}?;
Explain quantum physics.;What is the meaning of life?;Write Python code to sort a list.;Translate hello to {l}.;What is the weather like?;How do I cook {f}?;
Who won the world cup?;What is the speed of light?;Write an essay about {t}.;Sing a song.;What year did the war end?;Recommend a movie.;Who painted the Mona Lisa?;
What is the tallest mountain?;How does a car engine work?;Give me a recipe for {f}.;What is love?;Play a game with me.;Draw a {a}.;What is the news today?;
How many people live in {c}?;Tell me about {t}.;What is the population of {c}?;Explain {t} to me.;Why is the sky blue?;How far is the moon?;Who invented the telephone?;
Write a letter to my boss.;Fix this code.;Summarize this book.;What do you think about {t}?;Tell me something interesting.;Tell me a fact about {a}s.;What is the best {f} recipe?;
Can you speak {l}?;Write a function that reverses a string.;What is machine learning?;Who is the king of {c}?;Plan a trip to {c}.;What language do people speak in {c}?;
What should I eat today?;What should I wear?;Give me advice about {t}.;How do I learn {l}?;What is a {a}?;Describe a {a}.;Do you like {t}?;When did {c} win?;Is {c} big?;
What happened in 1990?;Which movie should I watch?;How do I fix my car?;What is the price of gold?;Can you open the door?;Call my mother.;Buy {f} for me.""".replace("\n", "").split(";")
MORE_SCOPE = """Who is {n} {s}?;Tell me about {m}.;What is {m}?;What is a {m}?;Where is {c}?;What is the history of {c}?;Who was the first president of {c}?;What is the currency of {c}?;Write a haiku;Write a haiku about {t}.;
Write a short story.;Tell me a story.;Once upon a time;Write a poem;Tell me a joke about {a}s.;What is the difference between a {a} and a {b}?;Is a {a} bigger than a {b}?;How long do {a}s live?;Why do {a}s sleep?;How do I fix my {p}?;
How do I repair a {p}?;What is the best {p}?;Which {p} should I buy?;Compare {c} and {e}.;How far is it from {c} to {e}?;How do I get to {c}?;What can I do in {c}?;Write a Python program.;Write code;Write a program in C++.;
How do I write a loop in Python?;Explain recursion.;What is recursion?;What is DNA?;What is gravity?;Explain gravity.;Who discovered gravity?;Who was Einstein?;Who is Albert Einstein?;When was Einstein born?;What is photosynthesis?;
Translate this to {l}: I am happy.;How do you say thank you in {l}?;What does {m} mean?;Define {m}.;What is the chemical formula of water?;How many planets are there?;What is the largest ocean?;Who wrote Romeo and Juliet?;
What is the capital city of {c}?;capital of {c};Tell me the capital of {c}.;What's the capital of {c}?;Is the earth flat?;Does God exist?;What happens when we die?;Give me investment advice.;What is bitcoin?;Who will win the election?;
What is your opinion on {t}?;Can you drive a car?;Do you have feelings?;Can you see me?;What do you look like?;Where are you from?;What day is it today?;What time is it?;What is today's date?;What year is it?;
Summarize the news.;Summarize this text.;Make a list of ideas for {t}.;Give me ideas for a party.;What should I cook tonight?;How do I bake bread?;How do you make {f}?;What is in {f}?;Is {f} healthy?;How many calories are in {f}?;
Write an email to {n}.;Write a song about {n}.;Draw me a picture.;Show me a picture of a {a}.;Play {m}.;Let's play chess.;Let us play a game.;I am sad.;I feel bad today.;I am bored.;I love you.;Do you love me?;Tell me a secret.;
What is the square root of pi?;What is pi?;Solve x + 5 = 12;What is the derivative of x^2?;Integrate x squared.;Prove that 1 = 1.;What is infinity?;How old is the universe?;How hot is the sun?;Who built the pyramids?;
What is the best movie of all time?;Who is the best football player?;Who won the game?;What is AI?;What is an LLM?;How do you work?;How were you trained?;Explain transformers.;What is a transformer?;What is a neural network?;asdf;
qwerty;blah blah;lorem ipsum;test;What is the weather in {c}?;How is the weather in {c}?;Send an email to {n}.;Set a timer.;Call {n}.;Turn on the light.;Book a flight to {c}.;Play some music.;Remind me to buy {f}.;Order {f}.""".replace("\n", "").split(";")
REASON_NO = "The user asks for something I cannot do. I say what I can do."


def out_of_scope(rng, thinking):
    animals = rng.sample(w.ANIMALS, 2)
    text = rng.choice(OUT_OF_SCOPE if rng.random() < 0.4 else MORE_SCOPE).format(
        c=w.pick(rng, w.COUNTRIES + w.CITIES, 0.1), e=w.pick(rng, w.COUNTRIES + w.CITIES, 0.1), t=w.pick(rng, w.TOPICS, 0.2), a=animals[0], b=animals[1], l=w.pick(rng, w.LANGUAGES, 0.05),
        f=w.pick(rng, w.FOODS, 0.1), n=w.pick(rng, w.NAMES, 0.2), s=w.pick(rng, w.SURNAMES, 0.2), m=w.made_up(rng, rng.random() < 0.5), p=w.pick(rng, w.PRODUCTS, 0.1))
    if rng.random() < 0.3:
        text = text.lower().rstrip(".?")
    elif rng.random() < 0.15:
        text = "Please " + text[0].lower() + text[1:] if not text.endswith("?") else "Tell me: " + text
    return dict(user=text, reasoning=REASON_NO, content=CANNOT, expect={"kind": "text", "value": CANNOT}, tools=[])


def small_talk(rng, split, thinking):
    if rng.random() < 0.6:
        return out_of_scope(rng, thinking)
    asks, reply, reason = rng.choice(TALK)
    text = rng.choice(asks)
    return dict(user=text, reasoning=reason, content=reply, expect={"kind": "text", "value": reply})
