"""Tools: pick one of several from the system block, fill its arguments, answer from its response.

Function and parameter names vary (and are sometimes made up), so that the model has to read them from the tools block."""
from . import invented_tools
from . import words as w
from .rendering import dump
from .split import draw


def clock(r):
    return f"{r.randrange(0, 24):02d}:{r.choice(('00', '15', '30', '45'))}"


def person(r):
    return w.pick(r, w.NAMES, 0.3)


def city(r):
    return w.pick(r, w.CITIES, 0.3)


def tracking(r):
    return "".join(r.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(2)) + "".join(r.choice("0123456789") for _ in range(r.choice((4, 5, 6))))


S, I, N, B = "string", "integer", "number", "boolean"
# name: (function names, descriptions, parameters [(slot, key names, type, description, maker)], requests, response maker, answer).
# A request names every slot it needs; slots that a request does not name are optional and stay out of the call.
TOOLS = {
    "weather": (["get_weather", "weather", "current_weather", "weather_lookup", "forecast"], ["Get the weather for a city.", "Current weather in a place.",
                "Look up the weather."], [("c", ["city", "location", "place", "town"], S, "The city", city)],
                ["What is the weather in {c}?", "How is the weather in {c}?", "Is it raining in {c}?", "weather in {c}", "Tell me the weather in {c}.",
                 "Do I need an umbrella in {c}?", "How warm is it in {c}?", "What's the weather like in {c} today?"],
                lambda r, a: {"temperature": r.randrange(-9, 38), "condition": r.choice(w.WEATHER)}, "It is {condition} in {c} with {temperature} degrees."),
    "time": (["get_time", "current_time", "local_time", "world_clock"], ["Get the current time in a city.", "Local time of a place."],
             [("c", ["city", "place", "location", "timezone"], S, "The city", city)],
             ["What time is it in {c}?", "Tell me the time in {c}.", "time in {c}", "What is the local time in {c}?", "How late is it in {c}?"],
             lambda r, a: {"time": clock(r)}, "It is {time} in {c}."),
    "timer": (["set_timer", "start_timer", "timer", "countdown"], ["Start a timer.", "Set a countdown timer."],
              [("m", ["minutes", "duration", "length"], I, "Minutes", lambda r: r.randrange(1, 120))],
              ["Set a timer for {m} minutes.", "Start a {m} minute timer.", "timer {m} minutes", "Remind me in {m} minutes.", "Please count down {m} minutes."],
              lambda r, a: {"status": "ok"}, "The timer is set for {m} minutes."),
    "alarm": (["set_alarm", "create_alarm", "alarm", "wake_up_call"], ["Set an alarm.", "Set an alarm clock."],
              [("t", ["time", "at", "clock"], S, "The time", clock)],
              ["Set an alarm for {t}.", "Wake me up at {t}.", "alarm at {t}", "I need an alarm at {t}.", "Please wake me at {t}."],
              lambda r, a: {"status": "ok"}, "The alarm is set for {t}."),
    "email": (["send_email", "email", "write_email", "mail"], ["Send an email.", "Send an email to a person."],
              [("n", ["to", "recipient", "receiver"], S, "Who gets it", person), ("s", ["subject", "topic", "about"], S, "The subject", lambda r: r.choice(w.THINGS) if r.random() < 0.7 else w.odd(r))],
              ["Send an email to {n} about the {s}.", "Write an email to {n} about the {s}.", "Email {n} about the {s}.", "Please mail {n} about the {s}."],
              lambda r, a: {"status": "sent"}, "I sent an email to {n} about the {s}."),
    "message": (["send_message", "text_message", "send_sms", "message"], ["Send a text message.", "Send a short message to someone."],
                [("n", ["to", "person", "contact", "recipient"], S, "Who gets it", person), ("x", ["text", "message", "body"], S, "The text", lambda r: r.choice(w.MESSAGES) if r.random() < 0.75 else w.odd(r))],
                ["Send a message to {n}: {x}", "Tell {n}: {x}", "Text {n} this: {x}", "Write to {n}: {x}", "Message {n}: {x}"],
                lambda r, a: {"status": "sent"}, "I sent the message to {n}."),
    "call": (["call_person", "make_call", "phone_call", "dial"], ["Call a person.", "Make a phone call."],
             [("n", ["name", "person", "contact"], S, "Who to call", person)],
             ["Call {n}.", "Phone {n} please.", "Please call {n}.", "I want to talk to {n} on the phone.", "Give {n} a call."],
             lambda r, a: {"status": r.choice(("connected", "busy"))}, "The call to {n} is {status}."),
    "convert": (["convert_currency", "exchange", "currency_converter", "money_convert"], ["Convert money.", "Convert an amount to another currency."],
                [("a", ["amount", "value", "sum"], I, "The amount", lambda r: r.randrange(2, 1000)), ("f", ["from", "source", "from_currency"], S, "From", lambda r: r.choice(w.CURRENCIES)),
                 ("z", ["to", "target", "to_currency"], S, "To", lambda r: r.choice(w.CURRENCIES))],
                ["Convert {a} {f} to {z}.", "How much is {a} {f} in {z}?", "{a} {f} in {z}", "Change {a} {f} into {z}.", "What are {a} {f} in {z}?"],
                lambda r, a: {"result": r.randrange(2, 2000)}, "{a} {f} are {result} {z}."),
    "translate": (["translate", "translate_text", "translator", "translation"], ["Translate text.", "Translate a text into another language."],
                  [("x", ["text", "phrase", "sentence"], S, "The text", lambda r: r.choice(w.PHRASES)), ("l", ["language", "target", "to"], S, "The language", lambda r: r.choice(w.LANGUAGES))],
                  ["Translate {x} into {l}.", "How do you say {x} in {l}?", "Translate to {l}: {x}", "What is {x} in {l}?"],
                  lambda r, a: {"translation": " ".join(w.made_up(r, False) for _ in range(r.choice((1, 2, 3))))}, "In {l} it is: {translation}"),
    "song": (["play_song", "play_music", "music", "player"], ["Play a song.", "Play music."],
             [("s", ["title", "song", "track", "name"], S, "The song", lambda r: r.choice(w.SONGS) if r.random() < 0.7 else w.odd(r))],
             ["Play {s}.", "Play the song {s}.", "I want to hear {s}.", "Put on {s}.", "Please play {s}."],
             lambda r, a: {"status": "playing"}, "Now playing {s}."),
    "shopping": (["add_to_list", "shopping_list", "add_item", "add_grocery"], ["Add an item to the shopping list.", "Put something on the shopping list."],
                 [("i", ["item", "product", "name"], S, "The item", lambda r: w.pick(r, w.GROCERIES, 0.2)), ("q", ["quantity", "count", "amount"], I, "How many", lambda r: r.randrange(1, 30))],
                 ["Add {i} to my shopping list.", "Put {q} {i} on the shopping list.", "Add {q} {i} to the list.", "I need to buy {i}.", "Put {i} on my list."],
                 lambda r, a: {"status": "added"}, "I added {i} to your list."),
    "event": (["create_event", "add_event", "schedule", "calendar_add"], ["Create a calendar event.", "Put an event in the calendar."],
              [("e", ["title", "event", "name"], S, "The title", lambda r: r.choice(w.EVENTS)), ("d", ["day", "date"], S, "The day", lambda r: r.choice(w.DAYS)),
               ("t", ["time", "start", "at"], S, "The time", clock)],
              ["Schedule a {e} on {d} at {t}.", "Add a {e} to my calendar on {d} at {t}.", "Create an event: {e}, {d}, {t}.", "I have a {e} on {d} at {t}, put it in the calendar.",
               "Put a {e} on {d} at {t} in my calendar."], lambda r, a: {"status": "created"}, "The {e} is in your calendar on {d} at {t}."),
    "stock": (["get_stock_price", "stock_price", "stock", "share_price"], ["Get the price of a stock.", "Look up a share price."],
              [("s", ["symbol", "ticker", "company"], S, "The symbol", lambda r: "".join(r.choice("ABCDEFGHIKLMNOPRSTUVXZ") for _ in range(r.choice((3, 4)))))],
              ["What is the stock price of {s}?", "How is {s} doing on the stock market?", "stock price {s}", "Give me the share price of {s}.", "What is {s} trading at?"],
              lambda r, a: {"price": r.randrange(5, 900)}, "{s} is at {price} dollars."),
    "table": (["book_table", "reserve_table", "restaurant_booking", "make_reservation"], ["Book a table in a restaurant.", "Reserve a restaurant table."],
              [("r", ["restaurant", "place", "name"], S, "The restaurant", lambda r: r.choice(w.RESTAURANTS)), ("k", ["people", "guests", "persons", "party_size"], I, "How many people", lambda r: r.randrange(2, 13)),
               ("t", ["time", "at"], S, "The time", clock)],
              ["Book a table for {k} at {r} at {t}.", "Reserve a table at {r} for {k} people at {t}.", "I want a table for {k} in {r} at {t}.", "Table for {k}, {r}, {t}."],
              lambda r, a: {"status": r.choice(("confirmed", "full"))}, "The table at {r} for {k} at {t} is {status}."),
    "route": (["get_directions", "route", "directions", "navigate"], ["Get directions between two places.", "Find a route."],
              [("f", ["from", "start", "origin"], S, "Start", city), ("z", ["to", "end", "destination"], S, "End", city)],
              ["How do I get from {f} to {z}?", "Give me directions from {f} to {z}.", "route from {f} to {z}", "Navigate from {f} to {z}.", "How far is it from {f} to {z}?"],
              lambda r, a: {"distance_km": r.randrange(5, 2000)}, "It is {distance_km} km from {f} to {z}."),
    "define": (["define_word", "dictionary", "definition", "lookup_word"], ["Look up the meaning of a word.", "Dictionary lookup."],
               [("x", ["word", "term"], S, "The word", lambda r: w.pick(r, w.GROCERIES + w.HOBBIES, 0.5))],
               ["What does {x} mean?", "Define {x}.", "Look up the word {x}.", "What is the meaning of {x}?", "definition of {x}"],
               lambda r, a: {"meaning": r.choice(("a kind of food", "something people do", "a small thing", "a very old word", "a game"))}, "{x} means {meaning}."),
    "random": (["random_number", "roll", "pick_number", "random_integer"], ["Pick a random number.", "Give a random number in a range."],
               [("a", ["min", "low", "start", "from"], I, "Lowest", lambda r: r.randrange(0, 20)), ("b", ["max", "high", "end", "to"], I, "Highest", lambda r: r.randrange(20, 1000))],
               ["Give me a random number between {a} and {b}.", "Pick a number from {a} to {b}.", "random number {a} to {b}", "Choose a number between {a} and {b}."],
               lambda r, a: {"number": r.randrange(int(a["a"]), int(a["b"]) + 1)}, "The number is {number}."),
    "units": (["convert_units", "unit_converter", "units", "measure_convert"], ["Convert units.", "Convert a length or weight to another unit."],
              [("v", ["value", "amount", "number"], N, "The value", lambda r: r.randrange(1, 500) if r.random() < 0.6 else r.randrange(11, 999) / 10), ("f", ["from", "from_unit", "source"], S, "From unit", lambda r: r.choice(("km", "miles", "feet", "cm"))),
               ("z", ["to", "to_unit", "target"], S, "To unit", lambda r: r.choice(("m", "yards", "inches", "mm")))],
              ["Convert {v} {f} to {z}.", "How many {z} are {v} {f}?", "{v} {f} in {z}", "What is {v} {f} in {z}?"],
              lambda r, a: {"result": r.randrange(1, 9000)}, "{v} {f} are {result} {z}."),
    "light": (["turn_light", "set_light", "light_switch", "lights"], ["Turn a light on or off.", "Switch the light in a room."],
              [("r", ["room", "place", "where"], S, "The room", lambda r: r.choice(w.ROOMS)), ("o", ["on", "state", "enabled"], B, "On or off", lambda r: r.random() < 0.5)],
              ["Turn {o} the light in the {r}.", "Switch {o} the {r} light.", "{r} light {o}", "Please turn the light in the {r} {o}."],
              lambda r, a: {"status": "ok"}, "The light in the {r} is {o}."),
    "heat": (["set_temperature", "thermostat", "heating", "set_heating"], ["Set the temperature of a room.", "Control the heating."],
             [("r", ["room", "place", "zone"], S, "The room", lambda r: r.choice(w.ROOMS)), ("d", ["degrees", "temperature", "value"], I, "Degrees", lambda r: r.randrange(14, 28))],
             ["Set the {r} to {d} degrees.", "Make the {r} {d} degrees.", "Heat the {r} to {d} degrees.", "I want {d} degrees in the {r}."],
             lambda r, a: {"status": "ok"}, "The {r} is set to {d} degrees."),
    "news": (["get_news", "news", "headlines", "news_search"], ["Get news about a topic.", "Latest headlines."],
             [("x", ["topic", "subject", "category"], S, "The topic", lambda r: r.choice(w.TOPICS))],
             ["What is new in {x}?", "Show me news about {x}.", "news about {x}", "Give me the latest {x} news.", "Any headlines about {x}?"],
             lambda r, a: {"headline": r.choice(("new record", "big changes", "a quiet day", "prices rise", "experts meet", "a surprise win"))}, "The news about {x}: {headline}."),
    "search": (["web_search", "search", "search_web", "find_online"], ["Search the web.", "Search the internet for something."],
               [("x", ["query", "q", "text", "terms"], S, "What to search", lambda r: f"{r.choice(w.COLOURS)} {r.choice(w.PRODUCTS)}" if r.random() < 0.6 else w.pick(r, w.TOPICS, 0.5))],
               ["Search for {x}.", "Search the web for {x}.", "Find {x} online.", "Look for {x} on the internet.", "google {x}"],
               lambda r, a: {"results": r.randrange(1, 900)}, "I found {results} results for {x}."),
    "hotel": (["find_hotel", "book_hotel", "hotel_search", "hotels"], ["Find a hotel in a city.", "Search hotels."],
              [("c", ["city", "place", "location"], S, "The city", city), ("k", ["nights", "duration", "stay"], I, "Nights", lambda r: r.randrange(1, 15))],
              ["Find a hotel in {c} for {k} nights.", "I need a hotel in {c} for {k} nights.", "hotel {c}, {k} nights", "Book me a room in {c} for {k} nights."],
              lambda r, a: {"hotel": r.choice(w.RESTAURANTS), "price": r.randrange(40, 300)}, "{hotel} in {c} costs {price} dollars per night."),
    "order": (["order_food", "food_order", "delivery", "place_order"], ["Order food.", "Order a meal for delivery."],
              [("f", ["dish", "food", "meal", "item"], S, "The dish", lambda r: r.choice(w.FOODS)), ("q", ["quantity", "count", "portions"], I, "How many", lambda r: r.randrange(1, 12))],
              ["Order {q} portions of {f}.", "I want to order {q} {f}.", "Please order {f} for me, {q} portions.", "Get me {q} {f} delivered."],
              lambda r, a: {"minutes": r.randrange(15, 90)}, "Your {f} arrives in {minutes} minutes."),
    "package": (["track_package", "package_status", "tracking", "parcel"], ["Track a package.", "Find out where a parcel is."],
                [("i", ["tracking_number", "id", "code", "number"], S, "The number", tracking)],
                ["Where is my package {i}?", "Track package {i}.", "track {i}", "What is the status of parcel {i}?", "When does {i} arrive?"],
                lambda r, a: {"status": r.choice(("on the way", "delivered", "delayed", "in customs"))}, "Package {i} is {status}."),
    "flight": (["flight_status", "get_flight", "flight_info", "check_flight"], ["Get the status of a flight.", "Look up a flight."],
               [("i", ["flight", "flight_number", "number", "id"], S, "The flight", lambda r: tracking(r)[:5])],
               ["Is flight {i} on time?", "What is the status of flight {i}?", "flight {i}", "When does flight {i} leave?", "Check flight {i}."],
               lambda r, a: {"status": r.choice(("on time", "delayed", "cancelled", "boarding"))}, "Flight {i} is {status}."),
    "user": (["get_user", "find_user", "user_info", "lookup_user"], ["Get a user by id.", "Look up a user record."],
             [("i", ["id", "user_id", "number"], I, "The id", lambda r: r.randrange(1, 99999))],
             ["Who is user {i}?", "Look up user {i}.", "Get the user with id {i}.", "Show me user {i}.", "user {i}"],
             lambda r, a: {"name": w.pick(r, w.NAMES, 0.4), "city": w.pick(r, w.CITIES, 0.3)}, "User {i} is {name} from {city}."),
    "note": (["save_note", "add_note", "write_note", "note"], ["Save a note.", "Write down a note."],
             [("x", ["text", "note", "content"], S, "The note", lambda r: r.choice(w.MESSAGES) if r.random() < 0.75 else w.odd(r))],
             ["Save a note: {x}", "Note this: {x}", "Write down: {x}", "Take a note: {x}", "Please note: {x}"],
             lambda r, a: {"status": "saved"}, "I saved the note."),
    "calc": (["calculator", "calculate", "compute", "evaluate"], ["Calculate an expression.", "A calculator for large numbers."],
             [("e", ["expression", "formula", "input"], S, "The expression", lambda r: f"{r.randrange(1000, 99999)} {r.choice('+-*')} {r.randrange(1000, 99999)}")],
             ["Use the calculator: {e}", "Calculate {e} with the tool.", "What does the calculator say for {e}?", "Let the calculator compute {e}."],
             lambda r, a: {"result": r.randrange(1000, 99999999)}, "The result is {result}."),
}
# Kinds whose requests could be answered by either; never offered together.
CLASH = [{"song", "search"}, {"convert", "units"}, {"email", "message", "call"}, {"news", "search"}, {"define", "search"}, {"define", "translate"}, {"note", "message"},
         {"timer", "alarm"}, {"shopping", "order", "note"}]
NO_TOOL = "I do not have a tool for that."


def declare(rng, kind):
    """One OpenAI tool object with drawn names, and {slot: key}."""
    names, descriptions, params = TOOLS[kind][:3]
    name = rng.choice(names)
    style = rng.random()
    if style < 0.08:
        name = f"{w.made_up(rng, False)}_{name}"
    elif style < 0.14:
        name = f"{name}_{rng.choice(('v2', 'api', 'tool', 'service', 'fn'))}"
    elif style < 0.26:
        name = invented_tools.gibberish(rng)
    elif style < 0.3:
        first, *rest = name.split("_")
        name = first + "".join(r.capitalize() for r in rest)
    keys, used = {}, set()
    properties = {}
    for slot, options, type_, text, _ in params:
        key = rng.choice([o for o in options if o not in used])
        strange = rng.random()
        if strange < 0.05:
            key = w.made_up(rng, False) + "_" + key
        elif strange < 0.15:
            key = invented_tools.gibberish(rng)
        used.add(key)
        keys[slot] = key
        spec = {"type": type_}
        if 0.05 <= strange < 0.15 or rng.random() < 0.5:
            spec["description"] = text
        properties[key] = spec
    requests = TOOLS[kind][3]
    required = [keys[p[0]] for p in params if all("{" + p[0] + "}" in q for q in requests)]
    schema = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.15:
        del schema["required"]
    function = {"name": name, "description": rng.choice(descriptions), "parameters": schema}
    return {"type": "function", "function": function}, keys


def clashes(kind, chosen):
    return any(kind in group and group & set(chosen) for group in CLASH)


def menu(rng, first=None):
    """Two to five tools in random order: [(kind, tool, keys)]; `first` is among them when given."""
    kinds = [first] if first else []
    want = rng.choices((1, 2, 3, 4, 5), (8, 22, 34, 24, 12))[0]
    while len(kinds) < want:
        kind = rng.choice(list(TOOLS))
        if kind not in kinds and not clashes(kind, kinds):
            kinds.append(kind)
    rng.shuffle(kinds)
    entries, names = [], set()
    for kind in kinds:
        tool, keys = declare(rng, kind)
        while tool["function"]["name"] in names:
            tool, keys = declare(rng, kind)
        names.add(tool["function"]["name"])
        entries.append((kind, tool, keys))
    return entries


def shown(value):
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def fill(rng, kind, split):
    """A request with its slot values; the combination decides the split."""
    _, _, params, requests, _, _ = TOOLS[kind]

    def make():
        index = rng.randrange(len(requests))
        values = {p[0]: p[4](rng) for p in params if "{" + p[0] + "}" in requests[index]}
        return ("tool", kind, index, tuple(values.values())), (requests[index], values)
    return draw(split, make)


def request(rng, split):
    kind = rng.choice(list(TOOLS))
    entries = menu(rng, kind)
    _, tool, keys = next(e for e in entries if e[0] == kind)
    text, values = fill(rng, kind, split)
    call = {"name": tool["function"]["name"], "arguments": {keys[s]: v for s, v in sorted(values.items(), key=lambda p: list(keys).index(p[0]))}}
    user = text.format(**{s: shown(v) for s, v in values.items()})
    return kind, entries, tool, keys, user, values, call


def reason(call):
    text = f"I call {call['name']}"
    if call["arguments"]:
        text += " with " + ", ".join(f"{k} = {v if isinstance(v, str) else dump(v)}" for k, v in call["arguments"].items())
    return text + "."


def tool_call(rng, split, thinking):
    """The answer is one call (or two of the same tool)."""
    if rng.random() < 0.38:
        tools, user, call = invented_tools.request(rng, split)
        return dict(tools=tools, user=user, reasoning=reason(call), content="", calls=[call], expect={"kind": "tool_call", "calls": [call]})
    kind, entries, tool, keys, user, values, call = request(rng, split)
    calls = [call]
    if kind in ("weather", "time", "stock") and rng.random() < 0.35:
        slot = list(values)[0]
        second = dict(values)
        while second[slot] == values[slot]:
            second[slot] = TOOLS[kind][2][0][4](rng)
        calls.append({"name": call["name"], "arguments": {keys[slot]: second[slot]}})
        ask = {"weather": "the weather", "time": "the time", "stock": "the stock price"}[kind]
        word = "of" if kind == "stock" else "in"
        user = rng.choice([f"What is {ask} {word} {values[slot]} and {second[slot]}?", f"Tell me {ask} {word} {values[slot]} and {word} {second[slot]}."])
    if rng.random() < 0.12:
        user = rng.choice(["Please: ", "Hi! ", "Hello, ", "One thing: "]) + user
    return dict(tools=[e[1] for e in entries], user=user, reasoning=" ".join(reason(c) for c in calls), content="", calls=calls,
                expect={"kind": "tool_call", "calls": calls})


def tool_answer(rng, split, thinking):
    """The call was made; the answer comes from the response."""
    kind, entries, tool, keys, user, values, call = request(rng, split)
    _, _, _, _, respond, answer = TOOLS[kind]
    missing = [s for s in keys if "{" + s + "}" in answer and s not in values]
    if missing:
        return tool_answer(rng, split, thinking)
    response = respond(rng, values)
    text = answer.format(**{s: shown(v) for s, v in values.items()}, **response)
    shape = rng.random()
    content = dump(response) if shape < 0.8 else ", ".join(f"{k}: {v}" for k, v in response.items())
    steps = [{"role": "assistant", "content": "", "reasoning_content": reason(call) if thinking else "",
              "tool_calls": [{"type": "function", "function": call}]}, {"role": "tool", "content": content}]
    think = "The tool says " + ", ".join(f"{k}: {v}" for k, v in response.items()) + "."
    return dict(tools=[e[1] for e in entries], user=user, after=steps, reasoning=think, content=text, expect={"kind": "text", "value": text})


def no_tool(rng, split, thinking):
    """None of the tools fits the request."""
    kind = rng.choice([k for k in TOOLS if k not in ("define", "search", "calc")])
    entries = menu(rng)
    while any(e[0] in (kind, "search") or clashes(kind, [e[0]]) for e in entries):
        entries = menu(rng)
    text, values = fill(rng, kind, split)
    user = text.format(**{s: shown(v) for s, v in values.items()})
    return dict(tools=[e[1] for e in entries], user=user, reasoning="I look at the tools. None of them fits.", content=NO_TOOL,
                expect={"kind": "text", "value": NO_TOOL})
