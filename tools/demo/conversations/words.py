"""Word lists the task generators draw from, and made-up words so that the model must copy what it has never seen."""
NAMES = """Mia Tom Anna Ben Lena Paul Sara Max Nina Leo Emma Jack Ella Sam Zoe Adam Ivy Noah Ruth Omar Lucy Hugo Maya Finn Rosa Karl
Amir Jane Peter Maria David Laura Kevin Alice Bob Carol Diana Frank Grace Henry Irene Julia Liam Nora Oscar Petra Simon Tina Victor
Wendy John Mary Lisa Eric Olga Ravi Priya Chen Yuki Ahmed Fatima Carlos Elena Ivan Sofia Daniel Hannah Sarah Michael James Robert
Linda Emily Jessica Sophie Chloe Lily Ethan Mason Lucas Logan Jacob William Oliver George Harry Charlie Thomas Mark Steve Mike Jim Bill
Joe Dan Kate Amy Rachel Rebecca Amanda Megan Jennifer Susan Karen Nancy Betty Claire Ali Hassan Mohammed Aisha Wei Mei Jun Hiro Kenji
Andrew Matthew Joshua Ryan Nathan Tyler Brian Jason Justin Aaron Timmy Johnny Billy Jenny Annie Ellie Ann Zack""".split()
SURNAMES = """Smith Brown Miller Lopez Garcia Novak Weber Rossi Silva Kim Tanaka Patel Singh Khan Meyer Olsen Berg Costa Moreau Young
Walker Hall King Green Baker Hill Wood Stone""".split()
CITIES = """Paris London Berlin Rome Madrid Oslo Tokyo Lisbon Vienna Prague Dublin Boston Chicago Seattle Delhi Cairo Lima Athens Warsaw
Zurich Munich Milan Kyoto Sydney Toronto Denver Austin Helsinki Budapest Hamburg Geneva Porto Nairobi Bogota Seoul Lyon Florence
Amsterdam Brussels Copenhagen Stockholm Istanbul Mumbai Singapore""".split()
COLOURS = "red blue green yellow purple orange black white brown pink grey teal violet silver gold turquoise".split()
ANIMALS = "dog cat rabbit horse parrot hamster turtle goldfish pony lizard".split()
PETS = """Rex Luna Bella Milo Coco Rocky Daisy Simba Nala Bruno Ginger Felix Oreo Pepper Shadow Sunny Buddy Biscuit Whiskers Snowy""".split()
FOODS = """pizza sushi pasta soup curry salad rice tacos lasagne pancakes noodles chocolate cheese bread ramen falafel
dumplings stew risotto burgers""".split()
JOBS = """teacher nurse pilot baker farmer lawyer doctor writer painter engineer plumber driver chef dentist gardener waiter
scientist carpenter journalist electrician""".split()
HOBBIES = """chess painting swimming running cooking reading hiking sailing dancing gardening cycling singing fishing knitting
photography climbing""".split()
SPORTS = "tennis football basketball hockey rugby golf volleyball cricket baseball judo".split()
INSTRUMENTS = "piano guitar violin drums flute cello trumpet harp saxophone ukulele".split()
DRINKS = "tea coffee water juice milk lemonade cocoa cola".split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LANGUAGES = "French German Spanish Italian Polish Dutch Japanese Korean Arabic Hindi Greek Turkish Danish Finnish Czech".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK NOK CAD AUD INR".split()
COUNTRIES = "France Germany Spain Italy Poland Japan Korea Egypt India Greece Turkey Denmark Finland Norway Brazil Chile Kenya Peru".split()
OBJECTS = """apples pears books coins pens marbles stickers cards shells stamps balloons cookies oranges bananas pencils toys
eggs flowers candies tickets buttons stones cups plates keys nuts cherries lemons crayons beads magnets postcards""".split()
ITEMS = """book pen lamp chair ticket shirt hat bag cup plate phone ball toy mug poster notebook umbrella candle blanket clock""".split()
PRODUCTS = """laptop keyboard monitor printer tablet camera headphones backpack desk sofa jacket boots kettle toaster bicycle helmet
guitar tent mirror fan charger""".split()
ROOMS = "kitchen bedroom bathroom garage office hallway basement attic garden".split()
WEATHER = "sunny cloudy rainy windy snowy foggy stormy clear".split()
GROCERIES = "milk eggs bread butter cheese apples rice tomatoes onions sugar flour coffee yoghurt potatoes carrots salt".split()
TOPICS = """football science politics music health space energy climate history travel fashion art business cars gaming""".split()
THINGS = "report invoice contract photo budget plan meeting trip project party lesson order package garden exam".split()
EVENTS = """meeting lunch dinner concert workshop party interview lecture picnic exam training wedding conference
rehearsal checkup""".split()
SONGS = """Yellow River;Blue Moon;Summer Rain;Night Train;Golden Sky;Little Star;Broken Wings;Silver Lining;Slow Dance;Paper Boats;
Wild Horses;Morning Light;City Lights;Winter Song;Lost Roads;Open Water""".replace("\n", "").split(";")
MESSAGES = """I am late;see you soon;call me back;the train is late;I am at home;dinner is ready;happy birthday;thank you for the help;
good luck today;please bring the keys;the meeting is moved;I will be there at noon;do not wait for me""".replace("\n", "").split(";")
PHRASES = """good morning;thank you;where is the station;I am hungry;see you tomorrow;how much is it;the book is red;my name is Tom;
I like tea;the water is cold;good night;happy birthday;I need help;where do you live""".replace("\n", "").split(";")
RESTAURANTS = """Bella Vista;Golden Dragon;Green Olive;Blue Lagoon;La Piazza;Old Mill;Red Lantern;Sea Breeze;The Corner;Little Garden;
Casa Luna;Royal Spice""".replace("\n", "").split(";")

_ONSETS = "b c d f g h j k l m n p r s t v w z br cr dr fr gr kr pr st tr bl cl fl gl pl sl sh ch th".split()
_VOWELS = "a e i o u a e i o u ai ea ee io ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "nd", "rt", "ck"]


def made_up(rng, capital=True):
    """A pronounceable word that is in no list."""
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3))))
    return word.capitalize() if capital else word


_LOWER, _DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"


def odd(rng):
    """A string nobody can guess: letters, digits, marks, words, in many shapes."""
    kind = rng.randrange(11)
    run = lambda letters, low, high: "".join(rng.choice(letters) for _ in range(rng.randrange(low, high + 1)))
    if kind == 0:
        return run(_LOWER, 2, 8)
    if kind == 1:
        return run(_LOWER.upper(), 2, 7)
    if kind == 2:
        return run(_LOWER + _LOWER.upper() + _DIGITS, 3, 9)
    if kind == 3:
        return f"{run(_LOWER.upper(), 1, 3)}{rng.choice(('-', '', '_', '/'))}{run(_DIGITS, 1, 5)}"
    if kind == 4:
        return f"{made_up(rng, False)}{rng.choice(('-', '_', '.', ''))}{run(_DIGITS + _LOWER, 1, 4)}"
    if kind == 5:
        return made_up(rng, rng.random() < 0.5)
    if kind == 6:
        return f"{made_up(rng, rng.random() < 0.5)} {made_up(rng, rng.random() < 0.5)}"
    if kind == 7:
        return f"{rng.choice((made_up(rng, False), 'report', 'data', 'photo', 'notes'))}{rng.choice(('', '_' + run(_DIGITS, 1, 2)))}.{rng.choice('txt pdf csv py png json'.split())}"
    if kind == 8:
        return run(_DIGITS, 2, 8)
    if kind == 9:
        return f"{rng.choice(COLOURS)} {rng.choice((rng.choice(OBJECTS), made_up(rng, False)))}"
    return f"{run(_LOWER.upper(), 1, 1)}{run(_LOWER, 2, 9)}"


def pick(rng, words, novelty=0.3):
    """One of `words`, or with probability `novelty` a made-up word (sometimes of random letters) in the same letter case."""
    if rng.random() < novelty:
        if rng.random() < 0.25:
            word = "".join(rng.choice(_LOWER) for _ in range(rng.randrange(2, 9)))
            return word.capitalize() if words[0][0].isupper() else word
        return made_up(rng, words[0][0].isupper())
    return rng.choice(words)


_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen""".split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(n, hyphen=True):
    """0..99 in English words."""
    if n < 20:
        return _ONES[n]
    tens, ones = divmod(n, 10)
    return _TENS[tens] + ((("-" if hyphen else " ") + _ONES[ones]) if ones else "")
