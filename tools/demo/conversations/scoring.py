"""Compares a generated answer with a task's `expect` (the rules are in data.py)."""
import json
import re


def convert(text, type_):
    if type_ in ("integer", "number"):
        try:
            value = float(text)
            return int(value) if value.is_integer() else value
        except ValueError:
            return text
    if type_ == "boolean":
        return text.strip().lower() == "true"
    return text


def parse_calls(text, tools):
    types = {t["function"]["name"]: t["function"]["parameters"].get("properties", {}) for t in tools or []}
    calls = []
    for name, body in re.findall(r"<tool_call>\s*<function=([^>]+)>(.*?)</function>\s*</tool_call>", text, re.S):
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>]+)>\n(.*?)\n</parameter>", body, re.S):
            arguments[key] = convert(value, types.get(name, {}).get(key, {}).get("type", "string"))
        calls.append({"name": name, "arguments": arguments})
    return calls


def answer_of(text, thinking):
    """The answer without the thinking and without the end-of-turn mark; None when the thinking or the turn never ended."""
    if not text.endswith("<|im_end|>"):
        return None
    text = text[:-len("<|im_end|>")]
    if thinking:
        if "</think>" not in text:
            return None
        text = text.split("</think>", 1)[1]
    return text.strip()


def correct(text, thinking, expect, tools):
    answer = answer_of(text, thinking)
    if answer is None:
        return False
    kind = expect["kind"]
    if kind == "text":
        return answer == expect["value"].strip()
    if kind == "number":
        found = re.findall(r"(?:(?<=\s)-|^-)?\d+", answer)
        return bool(found) and int(found[-1]) == expect["value"]
    if kind == "json":
        try:
            return json.loads(answer) == expect["value"]
        except ValueError:
            return False
    return parse_calls(answer, tools) == expect["calls"]
