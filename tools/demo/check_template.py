"""Compares conversations/rendering.py with models/demo/chat_template.jinja on generated conversations; exits 1 at the first difference.

  python3 tools/demo/check_template.py        needs jinja2
"""
import os

import jinja2

import data
from conversations.rendering import dump, prompt_text


def main():
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda v: dump(v)

    def refuse(message):
        raise jinja2.TemplateError(message)
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "../../models/demo/chat_template.jinja")) as f:
        template = env.from_string(f.read())
    count = 0
    for sample in data.stream(seed=5, split="train", count=3000):
        want = template.render(messages=sample["messages"], tools=sample.get("tools"), add_generation_prompt=True,
                               enable_thinking=sample["thinking"], raise_exception=refuse)
        got = prompt_text(sample["messages"], sample.get("tools"), sample["thinking"])
        if want != got:
            print("template:", repr(want), "\nrendering: ", repr(got))
            raise SystemExit(1)
        count += 1
    print(f"{count} conversations render the same")


if __name__ == "__main__":
    main()
