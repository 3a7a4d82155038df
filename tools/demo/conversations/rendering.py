"""Renders conversations exactly as models/demo/chat_template.jinja does, in plain Python (fast enough to make training data)."""
import json

INSTRUCTIONS = ("\n</tools>\n\nTo call one, write:\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
                "</function>\n</tool_call>")
END = "<|im_end|>"


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def calls_text(calls):
    out = []
    for call in calls:
        rows = [f"<tool_call>\n<function={call['name']}>\n"]
        for key, value in call["arguments"].items():
            rows.append(f"<parameter={key}>\n{value if isinstance(value, str) else dump(value)}\n</parameter>\n")
        rows.append("</function>\n</tool_call>")
        out.append("".join(rows))
    return "\n".join(out)


def prompt_text(messages, tools, thinking):
    """The text the model reads before it answers (system and tools block, turns, generation prompt)."""
    out = []
    has_system = messages[0]["role"] == "system"
    system = messages[0]["content"].strip() if has_system else ""
    if tools:
        out.append("<|im_start|>system\n# Tools\n\nThese functions can be called:\n\n<tools>")
        for tool in tools:
            out.append("\n" + dump(tool))
        out.append(INSTRUCTIONS)
        if system:
            out.append("\n\n" + system)
        out.append(END + "\n")
    elif has_system:
        out.append(f"<|im_start|>system\n{system}{END}\n")
    last_query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        content = (m.get("content") or "").strip()
        if m["role"] == "user":
            out.append(f"<|im_start|>user\n{content}{END}\n")
        elif m["role"] == "assistant":
            out.append("<|im_start|>assistant\n")
            if i > last_query:
                out.append(f"<think>\n{(m.get('reasoning_content') or '').strip()}\n</think>\n\n")
            out.append(content)
            if m.get("tool_calls"):
                out.append(("\n\n" if content else "") + calls_text([c["function"] for c in m["tool_calls"]]))
            out.append(END + "\n")
        elif m["role"] == "tool":
            if messages[i - 1]["role"] != "tool":
                out.append("<|im_start|>user")
            out.append(f"\n<tool_response>\n{content}\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                out.append(END + "\n")
    out.append("<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n"))
    return "".join(out)


def completion_text(sample):
    """What the model must write: thinking (when on), content, tool calls, end of turn."""
    text = sample["content"]
    if sample.get("calls"):
        text += ("\n\n" if text else "") + calls_text(sample["calls"])
    if sample["thinking"]:
        text = sample["reasoning"] + "\n</think>\n\n" + text
    return text + END
