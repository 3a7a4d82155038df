"""A little small talk, and honest answers to what the model cannot do."""
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
REASON_NO = "The user asks for something I cannot do. I say what I can do."


def out_of_scope(rng, thinking):
    import words as w
    text = rng.choice(OUT_OF_SCOPE).format(c=w.pick(rng, w.COUNTRIES, 0.1), t=rng.choice(w.TOPICS), a=rng.choice(w.ANIMALS),
                                           l=rng.choice(w.LANGUAGES), f=rng.choice(w.FOODS))
    if rng.random() < 0.3:
        text = text.lower().rstrip(".?")
    elif rng.random() < 0.15:
        text = "Please " + text[0].lower() + text[1:] if not text.endswith("?") else "Tell me: " + text
    return dict(user=text, reasoning=REASON_NO, content=CANNOT, expect={"kind": "text", "value": CANNOT})


def small_talk(rng, split, thinking):
    if rng.random() < 0.35:
        return out_of_scope(rng, thinking)
    asks, reply, reason = rng.choice(TALK)
    text = rng.choice(asks)
    return dict(user=text, reasoning=reason, content=reply, expect={"kind": "text", "value": reply})
