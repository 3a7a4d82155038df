"""Records what transformers makes of generated conversations with the templates of the tests.

Writes tests/text/data/template_cases.jsonl: one line per case, {"t": template, "r": request, "o": rendered text} or, where
the template or transformers refuses, {"t": ..., "r": ..., "e": its message}. Needs `pip install transformers jinja2`
(no torch). Run from anywhere:

    python3 tools/goldens_text/make_templates.py [--conversations N] [--templates DIR] [--out FILE] [--seed S]

`request` holds messages, tools, documents, add_generation_prompt and template variables, as `fourfold render` reads them.
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

from conversations import conversation  # noqa: E402


def render(template, request):
    """apply_chat_template without a tokenizer: the same preparation of messages and the same renderer."""
    request = dict(request)
    messages = [{k: v for k, v in message.items() if v is not None} for message in request.pop("messages")]
    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=request.pop("tools", None),
        documents=request.pop("documents", None),
        chat_template=template,
        add_generation_prompt=request.pop("add_generation_prompt", False),
        **request,
    )
    return rendered[0]


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    data = root / "tests/text/data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=80, help="conversations for each template (default 80)")
    parser.add_argument("--templates", type=pathlib.Path, default=data / "templates", help="folder of *.jinja")
    parser.add_argument("--out", type=pathlib.Path, default=data / "template_cases.jsonl", help="output file")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the conversations (default 0)")
    options = parser.parse_args()
    counts = {"rendered": 0, "refused": 0}
    with open(options.out, "w", encoding="utf-8") as file:
        for number, path in enumerate(sorted(options.templates.glob("*.jinja"))):
            template = path.read_text(encoding="utf-8")
            count = 12 if path.stem == "odds_and_ends" else options.conversations
            for i in range(count):
                request = conversation(options.seed + number * 100000 + i)
                case = {"t": path.stem, "r": request}
                try:
                    case["o"] = render(template, request)
                    counts["rendered"] += 1
                except Exception as error:  # whatever Python raises, the template cannot be rendered
                    case["e"] = f"{type(error).__name__}: {error}"
                    counts["refused"] += 1
                file.write(json.dumps(case, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
