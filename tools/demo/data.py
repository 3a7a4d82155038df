"""Makes the demo model's conversations: deterministic from a seed, with disjoint training and held-out splits.

  python3 tools/demo/data.py --eval models/demo/eval [--items 120]   write the held-out task files `fourfold eval` reads
  python3 tools/demo/data.py --show 5 [--task NAME] [--seed N]       print samples

Task files: one JSON object per line,
  {"task": NAME, "messages": [...], "tools": [...]?, "enable_thinking": bool, "expect": {"kind": KIND, ...}}
KIND "text": `value` equals the answer (without thinking), both trimmed; "number": `value` equals the last integer in the answer (a minus sign
counts when it follows a space or starts the answer); "json": `value` equals the answer parsed as JSON; "tool_call": `calls` equals the parsed
calls, names and typed arguments, in order. Thinking text is never compared.
"""
import argparse
import json
import os
import random

from conversations import arithmetic, facts, recall, records, small_talk, tools, word_problems
from conversations.rendering import completion_text, prompt_text

SYSTEMS = ["You are a helpful assistant.", "Answer briefly.", "You are a friendly assistant.", "Be polite.", "You help people.", "Be concise.",
           "You are the fourfold demo model.", "Answer the question.", "You are an assistant that answers questions."]


def filler(rng):
    """One unrelated exchange for the history: (user, assistant)."""
    kind = rng.random()
    thinking = rng.random() < 0.5
    if kind < 0.45:
        item = arithmetic.arithmetic(rng, "train", thinking)
    elif kind < 0.55:
        item = word_problems.word_problem(rng, "train", thinking)
    elif kind < 0.65:
        item = records.json_answer(rng, "train", thinking)
    else:
        item = small_talk.small_talk(rng, "train", thinking)
    return item["user"], item["content"]


def recall_task(rng, split, thinking):
    if rng.random() < 0.42:
        return facts.fact(rng, split, thinking, filler)
    return recall.recall(rng, split, thinking, filler)


def telling(rng, split, thinking):
    kind = rng.random()
    return recall.telling_many(rng, thinking) if kind < 0.25 else facts.told_fact(rng, thinking) if kind < 0.6 else recall.telling(rng, thinking)


# name: (maker, weight in training, in the held-out files)
TASKS = {
    "arithmetic": (arithmetic.arithmetic, 27, True),
    "word_problem": (word_problems.word_problem, 24, True),
    "recall": (recall_task, 15, True),
    "tool_call": (tools.tool_call, 16, True),
    "tool_answer": (tools.tool_answer, 5, True),
    "no_tool": (tools.no_tool, 3, True),
    "json": (records.json_answer, 13, True),
    "small_talk": (small_talk.small_talk, 7, True),
    "telling": (telling, 3, False),
}
NAMES = list(TASKS)
WEIGHTS = [TASKS[n][1] for n in NAMES]


def sample(rng, split, task=None):
    """One conversation that ends just before the answer to be written, with that answer."""
    if task is None:
        task = rng.choices(NAMES, WEIGHTS)[0]
    thinking = rng.random() < 0.5
    item = TASKS[task][0](rng, split, thinking)
    messages = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    turns = list(item.get("history", []))
    if not turns and task != "recall" and rng.random() < 0.25:
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.3:
                told = recall.telling(rng, thinking)
                turns.append((told["user"], told["content"]))
            else:
                turns.append(filler(rng))
    for user, reply in turns:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": item["user"]})
    messages.extend(item.get("after", []))
    offered = item.get("tools")
    if offered is None and split == "train" and rng.random() < 0.05:  # tools offered, none needed
        offered = [e[1] for e in tools.menu(rng) if e[0] not in ("calc", "define", "search", "note")] or None
    return {"task": task, "messages": messages, "tools": offered, "thinking": thinking, "reasoning": item["reasoning"],
            "content": item["content"], "calls": item.get("calls"), "expect": item["expect"]}


def stream(seed, split, count, task=None):
    rng = random.Random(f"{split}:{seed}")
    for _ in range(count):
        yield sample(rng, split, task)


def texts(seed, split, count):
    """(prompt, completion) strings for training."""
    for s in stream(seed, split, count):
        yield prompt_text(s["messages"], s["tools"], s["thinking"]), completion_text(s)


def eval_line(s):
    row = {"task": s["task"], "messages": s["messages"]}
    if s["tools"]:
        row["tools"] = s["tools"]
    row["enable_thinking"] = s["thinking"]
    row["expect"] = s["expect"]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval", metavar="DIR", help="write the held-out task files into DIR")
    parser.add_argument("--items", type=int, default=120, help="items per task file (default 120)")
    parser.add_argument("--show", type=int, default=0, help="print this many samples")
    parser.add_argument("--task", choices=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    args = parser.parse_args()
    if args.eval:
        os.makedirs(args.eval, exist_ok=True)
        for name, (_, _, evaluated) in TASKS.items():
            if evaluated:
                with open(os.path.join(args.eval, name + ".jsonl"), "w") as f:
                    for s in stream(2026, "eval", args.items, name):
                        f.write(json.dumps(eval_line(s), ensure_ascii=False) + "\n")
    for s in stream(args.seed, args.split, args.show, args.task):
        print(prompt_text(s["messages"], s["tools"], s["thinking"]) + "\x1b[1m" + completion_text(s) + "\x1b[0m\n" + "-" * 40)


if __name__ == "__main__":
    main()
