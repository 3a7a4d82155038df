"""Conversations for chat templates, from a seeded generator. Used by the scripts beside it; not run on its own."""

import json
import random

from strings import Strings

NAMES = ["get_weather", "search", "add_numbers", "send_mail", "convert", "look_up_word"]
CITIES = ["Rome", "Zürich", "東京", "São Paulo", "New York"]


def schema(r, depth=0):
    kind = r.choice(["string", "string", "integer", "number", "boolean", "array", "object", "enum", "union", "oneOf"])
    out = {}
    if kind == "enum":
        out = {"type": "string", "enum": r.sample(["a", "b", "it's", "<d>"], 2)}
    elif kind == "array":
        out = {"type": "array"}
        if r.random() < 0.8:
            out["items"] = schema(r, depth + 1) if depth < 2 else {"type": "string"}
    elif kind == "object":
        out = {"type": "object"}
        if depth < 2 and r.random() < 0.8:
            out["properties"] = {name: schema(r, depth + 1) for name in r.sample(["x", "y", "zeta", "Alpha"], r.randint(1, 3))}
            out["required"] = list(out["properties"])[:1]
    elif kind == "union":
        out = {"type": ["string", "null"]}
    elif kind == "oneOf":
        out = {"oneOf": [{"type": "string", "description": "a name"}, {"type": "integer"}]}
    else:
        out = {"type": kind}
    if r.random() < 0.5:
        out["description"] = r.choice(["What to do", "Two\nlines", "Größe in \"cm\"", "<b>bold</b> & more"])
    if r.random() < 0.2:
        out["default"] = r.choice(["x", 3, None, True, [1]])
    if r.random() < 0.1:
        out["nullable"] = True
    return out


def tool(r, name):
    properties = {p: schema(r) for p in r.sample(["city", "unit", "count", "flag", "Text", "options", "tags"], r.randint(0, 4))}
    function = {
        "name": name,
        "description": r.choice(["Does a thing.", "Looks up “quotes” & 'more'.", "", "多言語の説明"]),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)[: r.randint(0, 2)]},
    }
    if r.random() < 0.15:
        del function["parameters"]
    if r.random() < 0.1:
        function["return"] = {"type": "string"}
    return {"type": "function", "function": function}


def value(r, strings, depth=0):
    kind = r.random()
    if kind < 0.4:
        return strings.string(r.randint(1, 4)) if r.random() < 0.5 else r.choice(CITIES)
    if kind < 0.6:
        return r.choice([0, 7, -3, 123456789012, 1.5, -0.25, 1e21, 3.0, 1e-9])
    if kind < 0.75:
        return r.choice([True, False, None])
    if depth >= 2:
        return []
    if kind < 0.88:
        return [value(r, strings, depth + 1) for _ in range(r.randint(0, 3))]
    return {k: value(r, strings, depth + 1) for k in r.sample(["k", "päth", "2", "it's"], r.randint(0, 3))}


def call(r, strings, as_string):
    arguments = {k: value(r, strings) for k in r.sample(["city", "unit", "n", "f", "opts", "text"], r.randint(0, 4))}
    return {
        "id": "".join(r.choice("abcdefgh0123456789") for _ in range(9)),
        "type": "function",
        "function": {
            "name": r.choice(NAMES),
            "arguments": json.dumps(arguments, ensure_ascii=False) if as_string else arguments,
        },
    }


def text(r, strings):
    kind = r.random()
    if kind < 0.5:
        return strings.sentence()
    if kind < 0.6:
        return "  " + strings.sentence() + " \n"
    if kind < 0.65:
        return ""
    return strings.string(r.randint(1, 8))


def conversation(seed):
    """One request: messages and perhaps tools, documents and template variables."""
    r = random.Random(seed)
    strings = Strings(seed, ["<think>", "</think>", "<|im_end|>", "<tool_call>", "{{ x }}", "{% if %}", "</tool_response>"])
    request = {}
    messages = []
    if r.random() < 0.45:
        messages.append({"role": "system", "content": text(r, strings)})
    with_tools = r.random() < 0.5
    as_string = r.random() < 0.25
    for _ in range(r.randint(1, 4)):
        content = text(r, strings)
        if r.random() < 0.12:
            content = [{"type": "text", "text": content}, {"type": "text", "text": "second"}]
            if r.random() < 0.3:
                content.insert(1, {"type": "image", "url": "x"})
        messages.append({"role": "user", "content": content})
        if r.random() < 0.15:
            break
        rounds = r.randint(1, 2) if with_tools and r.random() < 0.6 else 0
        for _ in range(rounds):
            message = {"role": "assistant", "content": r.choice([None, "", text(r, strings)])}
            if r.random() < 0.4:
                message[r.choice(["reasoning_content", "reasoning", "thinking"])] = text(r, strings)
            message["tool_calls"] = [call(r, strings, as_string) for _ in range(r.choice([1, 1, 1, 2, 3]))]
            if r.random() < 0.1:
                message["content"] = None
            messages.append(message)
            for one in message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"],
                                 "content": r.choice([text(r, strings), json.dumps(value(r, strings))])})
        message = {"role": "assistant", "content": text(r, strings)}
        thinking = r.random()
        if thinking < 0.3:
            message["reasoning_content"] = text(r, strings)
        elif thinking < 0.5:
            message["content"] = "<think>\n" + text(r, strings) + "\n</think>\n\n" + message["content"]
        messages.append(message)
    if r.random() < 0.06:
        messages.append({"role": r.choice(["nobody", "system", "tool"]), "content": "?"})
    if r.random() < 0.5 and messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": text(r, strings)})
    request["messages"] = messages
    if with_tools:
        request["tools"] = [tool(r, name) for name in r.sample(NAMES, r.randint(1, 3))]
    if r.random() < 0.1:
        request["documents"] = [{"title": "T", "text": text(r, strings)}]
    if r.random() < 0.7:
        request["add_generation_prompt"] = r.random() < 0.8
    for name, choices in {
        "enable_thinking": [True, False],
        "thinking": [True, False],
        "preserve_thinking": [True],
        "reasoning_effort": ["low", "high"],
        "date_string": ["26 Jul 2024"],
        "tools_in_user_message": [False],
        "builtin_tools": [["search", "interpreter"]],
        "bos_token": ["<s>", "<|begin|>"],
        "eos_token": ["</s>", "<|end|>"],
    }.items():
        if r.random() < (0.96 if name.endswith("_token") else 0.25):
            request[name] = r.choice(choices)
    return request
