"""The official clients against the server and the demo model, and what a user of them would notice.

Run by .ci/run in a virtual environment with packages/pypi-serve.txt.
"""
import json
import os
import random
import re
import socket
import threading
import time
import unittest

import anthropic
import openai
from prometheus_client.parser import text_string_to_metric_families

from server import QUESTION, ROOT, Server, demo_task


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--max-num-seqs", "4").wait_ready()
        cls.openai = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=cls.server.url, api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.lines)

    def error(self, status, param, path, body, words=""):
        found, text, _ = self.server.post(path, body)
        self.assertEqual(found, status, text)
        error = json.loads(text)["error"]
        self.assertEqual(error["param"], param, text)
        self.assertIn(words, error["message"])
        return error

    # ---- chat

    def test_chat(self):
        answer = self.openai.chat.completions.create(model="demo", messages=QUESTION)
        choice = answer.choices[0]
        self.assertIn("42", choice.message.content)
        self.assertEqual(choice.finish_reason, "stop")
        self.assertTrue(choice.message.reasoning)
        self.assertEqual(choice.message.reasoning, choice.message.reasoning_content)
        self.assertGreater(answer.usage.completion_tokens_details.reasoning_tokens, 0)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_chat_stream_is_the_whole_answer(self):
        whole = self.openai.chat.completions.create(model="demo", messages=QUESTION)
        stream = self.openai.chat.completions.create(
            model="demo", messages=QUESTION, stream=True, stream_options={"include_usage": True})
        reasoning = content = ""
        usage = finish = None
        for chunk in stream:
            if chunk.usage:
                usage = chunk.usage
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                content += choice.delta.content or ""
                finish = choice.finish_reason or finish
        self.assertEqual(content, whole.choices[0].message.content)
        self.assertEqual(reasoning, whole.choices[0].message.reasoning)
        self.assertEqual(finish, "stop")
        self.assertEqual(usage.completion_tokens, whole.usage.completion_tokens)

    def test_thinking_off(self):
        answer = self.openai.chat.completions.create(
            model="demo", messages=QUESTION, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        self.assertIsNone(answer.choices[0].message.reasoning)
        self.assertIn("42", answer.choices[0].message.content)
        self.assertEqual(answer.usage.completion_tokens_details.reasoning_tokens, 0)

    def test_thinking_budget(self):
        for budget in (0, 5):
            answer = self.openai.chat.completions.create(
                model="demo", messages=QUESTION, max_tokens=100, n=2, temperature=1, seed=1,
                extra_body={"thinking_token_budget": budget})
            for choice in answer.choices:
                self.assertTrue(choice.message.content)
            self.assertLessEqual(answer.usage.completion_tokens_details.reasoning_tokens, 2 * (budget + 3))

    def test_tools(self):
        task = demo_task("tool_call")
        wanted = task["expect"]["calls"][0]
        answer = self.openai.chat.completions.create(
            model="demo", messages=task["messages"], tools=task["tools"], tool_choice="auto")
        self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
        call = answer.choices[0].message.tool_calls[0]
        self.assertEqual(call.function.name, wanted["name"])
        self.assertEqual(json.loads(call.function.arguments), wanted["arguments"])
        with self.openai.chat.completions.stream(model="demo", messages=task["messages"], tools=task["tools"]) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        self.assertEqual([(c.function.name, c.function.arguments) for c in streamed],
                         [(c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls])
        # The conversation goes on as clients send it: no content, arguments as text, the result behind it.
        messages = task["messages"] + [
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": call.id, "type": "function",
                             "function": {"name": call.function.name, "arguments": call.function.arguments}}]},
            {"role": "tool", "tool_call_id": call.id, "content": "{\"status\": \"ok\"}"}]
        self.assertTrue(self.openai.chat.completions.create(
            model="demo", messages=messages, tools=task["tools"], max_tokens=50).choices)
        # Without the choice of a tool there is none.
        answer = self.openai.chat.completions.create(
            model="demo", messages=task["messages"], tools=task["tools"], tool_choice="none", max_tokens=100)
        self.assertFalse(answer.choices[0].message.tool_calls)

    def test_system_messages_anywhere_and_parts(self):
        def prompt(messages):
            return json.loads(self.server.post("/tokenize", {"messages": messages})[1])["tokens"]
        plain = prompt([{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "xy"}])
        self.assertEqual(plain, prompt([
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {"role": "developer", "content": "b"}]))
        self.assertEqual(plain, prompt([
            {"role": "system", "content": "x-anthropic-billing-header: cch=1;\na\n\nb"}, {"role": "user", "content": "xy"}]))

    def test_several_answers_and_seeds(self):
        def texts(**more):
            answer = self.openai.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Tell me a story."}], n=3, temperature=6, seed=7,
                max_tokens=20, extra_body={"enable_thinking": False}, **more)
            return [c.message.content for c in answer.choices]
        first = texts()
        self.assertEqual(first, texts())
        self.assertGreater(len(set(first)), 1)

    def test_stops(self):
        def content(**fields):
            answer = self.openai.chat.completions.create(
                model="demo", messages=QUESTION, extra_body={"enable_thinking": False, **fields.pop("extra", {})}, **fields)
            return answer.choices[0]
        self.assertEqual(content().message.content, "17 + 25 = 42")
        stopped = content(stop=[" = "])
        self.assertEqual((stopped.message.content, stopped.finish_reason, stopped.stop_reason), ("17 + 25", "stop", " = "))
        token = json.loads(self.server.post("/tokenize", {"prompt": " ="})[1])["tokens"][-1]
        stopped = content(extra={"stop_token_ids": [token]})
        self.assertEqual((stopped.message.content, stopped.stop_reason), ("17 + 25", token))
        self.assertEqual(content(max_tokens=3).finish_reason, "length")
        longer = content(max_tokens=40, extra={"ignore_eos": True})
        self.assertEqual(longer.finish_reason, "length")
        longer = self.openai.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=60, extra_body={"enable_thinking": False, "min_tokens": 30})
        self.assertGreaterEqual(longer.usage.completion_tokens, 30)

    def test_logprobs(self):
        answer = self.openai.chat.completions.create(
            model="demo", messages=QUESTION, logprobs=True, top_logprobs=2, extra_body={"enable_thinking": False})
        entries = answer.choices[0].logprobs.content
        self.assertEqual("".join(e.token for e in entries), "17 + 25 = 42")
        for entry in entries:
            self.assertEqual(len(entry.top_logprobs), 2)
            self.assertLessEqual(entry.logprob, 0)
            self.assertEqual(bytes(entry.bytes).decode(), entry.token)

    def test_prefix_cache_is_told_of(self):
        messages = [{"role": "user", "content": "A long question. " * 60 + "What is 3 + 4?"}]
        self.openai.chat.completions.create(model="demo", messages=messages, max_tokens=4)
        again = self.openai.chat.completions.create(model="demo", messages=messages, max_tokens=4)
        self.assertGreater(again.usage.prompt_tokens_details.cached_tokens, 0)
        salted = self.openai.chat.completions.create(
            model="demo", messages=messages, max_tokens=4, extra_body={"cache_salt": "another"})
        self.assertEqual(salted.usage.prompt_tokens_details.cached_tokens, 0)

    # ---- completions

    def test_completions(self):
        answer = self.openai.completions.create(model="demo", prompt=["The capital", [71, 319]], max_tokens=6, n=2)
        self.assertEqual([c.index for c in answer.choices], [0, 1, 2, 3])
        self.assertEqual(answer.choices[0].text, answer.choices[1].text)
        stream = self.openai.completions.create(model="demo", prompt="The capital", max_tokens=6, stream=True)
        self.assertEqual("".join(c.choices[0].text for c in stream if c.choices), answer.choices[0].text)

    def test_echo_has_the_prompts_logprobs(self):
        prompt = "What is 17 + 25?"
        answer = self.openai.completions.create(model="demo", prompt=prompt, max_tokens=3, echo=True, logprobs=1).choices[0]
        self.assertTrue(answer.text.startswith(prompt))
        log = answer.logprobs
        self.assertIsNone(log.token_logprobs[0])
        self.assertTrue(all(value <= 0 for value in log.token_logprobs[1:]))
        ending = ["<|im_end|>"] if answer.finish_reason == "stop" else []
        self.assertEqual("".join(log.tokens), answer.text + "".join(ending))
        for token, offset in zip(log.tokens[:len(log.tokens) - len(ending)], log.text_offset):
            self.assertEqual(answer.text[offset:offset + len(token)], token)
        alone = self.openai.completions.create(model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=1).choices[0]
        self.assertEqual(alone.text, prompt)
        self.assertEqual(alone.logprobs.token_logprobs, log.token_logprobs[:len(alone.logprobs.tokens)])

    def test_logprobs_of_the_token_that_ends(self):
        """As many as completion_tokens, so that whoever scores a prompt can take the answer's off its end (lm-eval does)."""
        prompt = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n17 + 25 = 42"
        for stream in (False, True):
            for echo in (False, True):
                answer = self.openai.completions.create(model="demo", prompt=prompt, max_tokens=4, echo=echo, logprobs=1,
                                                        stream=stream, extra_body={"stream_options": {"include_usage": True}}
                                                        if stream else {})
                pieces = list(answer) if stream else [answer]
                choices = [piece.choices[0] for piece in pieces if piece.choices]
                tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
                values = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
                usage = pieces[-1].usage
                self.assertEqual(choices[-1].finish_reason, "stop")
                self.assertEqual("".join(choice.text for choice in choices), prompt if echo else "")
                self.assertEqual(usage.completion_tokens, 1)
                self.assertEqual(len(tokens), usage.total_tokens if echo else 1)
                self.assertEqual(tokens[-1], "<|im_end|>")
                self.assertGreater(values[-1], -0.1)

    # ---- responses

    def test_responses(self):
        whole = self.openai.responses.create(model="demo", input="What is 17 + 25?", instructions="Be brief.")
        self.assertEqual([item.type for item in whole.output], ["reasoning", "message"])
        self.assertIn("42", whole.output_text)
        self.assertEqual(whole.status, "completed")
        self.assertGreater(whole.usage.output_tokens_details.reasoning_tokens, 0)
        with self.openai.responses.stream(model="demo", input="What is 17 + 25?", instructions="Be brief.") as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        self.assertEqual([e.sequence_number for e in events if hasattr(e, "sequence_number")], list(range(len(events))))
        self.assertEqual(streamed.output_text, whole.output_text)
        self.assertEqual(streamed.output[0].content[0].text, whole.output[0].content[0].text)
        cut = self.openai.responses.create(model="demo", input="What is 17 + 25?", max_output_tokens=3)
        self.assertEqual((cut.status, cut.incomplete_details.reason), ("incomplete", "max_output_tokens"))

    def test_responses_go_on(self):
        first = self.openai.responses.create(model="demo", input="What is 17 + 25?")
        more = self.openai.responses.create(model="demo", input="What is 3 + 4?", previous_response_id=first.id)
        # The same as when the client sends the conversation.
        items = [{"role": "user", "content": "What is 17 + 25?"}] + [i.model_dump(exclude_none=True) for i in first.output]
        again = self.openai.responses.create(
            model="demo", input=items + [{"role": "user", "content": [{"type": "input_text", "text": "What is 3 + 4?"}]}])
        self.assertEqual(more.output_text, again.output_text)
        self.assertEqual(more.usage.input_tokens, again.usage.input_tokens)
        # Types that may be null, and a refusal that another model gave.
        refused = [{"role": "user", "content": "a", "type": None},
                   {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"role": "user", "content": "b"}]
        said = self.openai.chat.completions.create(model="demo", max_tokens=1, messages=[
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "b"}])
        self.assertEqual(self.openai.responses.create(model="demo", input=refused, max_output_tokens=1).usage.input_tokens,
                         said.usage.prompt_tokens)
        self.assertEqual(self.openai.responses.retrieve(first.id).output_text, first.output_text)
        self.openai.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            self.openai.responses.create(model="demo", input="a", previous_response_id=first.id)
        unstored = self.openai.responses.create(model="demo", input="a", max_output_tokens=2, store=False)
        with self.assertRaises(openai.NotFoundError):
            self.openai.responses.retrieve(unstored.id)

    def test_responses_tools(self):
        task = demo_task("tool_call")
        wanted = task["expect"]["calls"][0]
        tools = [{"type": "function", **t["function"]} for t in task["tools"]]
        tools += [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]
        status, text, _ = self.server.post("/v1/responses", {"input": task["messages"], "tools": tools})
        self.assertEqual(status, 200, text)
        call = json.loads(text)["output"][-1]
        self.assertEqual((call["type"], call["name"], json.loads(call["arguments"])),
                         ("function_call", wanted["name"], wanted["arguments"]))
        status, text, _ = self.server.post("/v1/responses", {
            "tools": tools, "input": task["messages"] + [
                call, {"type": "function_call_output", "call_id": call["call_id"], "output": "{\"status\": \"ok\"}"}]})
        self.assertEqual(status, 200, text)
        self.error(400, "tool_choice", "/v1/responses", {"input": "a", "tools": tools, "tool_choice": "all"})
        self.error(400, "input[0]", "/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]})
        self.error(400, "input", "/v1/responses", {"input": []})

    # ---- messages

    def test_messages(self):
        whole = self.anthropic.messages.create(model="demo", max_tokens=300, messages=QUESTION)
        self.assertEqual([block.type for block in whole.content], ["thinking", "text"])
        self.assertIn("42", whole.content[1].text)
        self.assertEqual(whole.stop_reason, "end_turn")
        with self.anthropic.messages.stream(model="demo", max_tokens=300, messages=QUESTION) as stream:
            streamed = stream.get_final_message()
        self.assertEqual([block.type for block in streamed.content], ["thinking", "text"])
        self.assertEqual(streamed.content[0].thinking, whole.content[0].thinking)
        self.assertEqual(streamed.content[1].text, whole.content[1].text)
        self.assertTrue(streamed.content[0].signature)
        self.assertEqual(streamed.usage.output_tokens, whole.usage.output_tokens)
        # The answer comes back, thinking included, and the conversation goes on.
        more = self.anthropic.messages.create(
            model="demo", max_tokens=300,
            messages=QUESTION + [{"role": "assistant", "content": [b.model_dump() for b in streamed.content]},
                                 {"role": "user", "content": [{"type": "text", "text": "What is 3 + 4?"}]}])
        self.assertIn("7", more.content[-1].text)

    def test_messages_thinking_and_stops(self):
        answer = self.anthropic.messages.create(
            model="demo", max_tokens=100, messages=QUESTION, thinking={"type": "disabled"}, stop_sequences=[" = "])
        self.assertEqual([(block.type, block.text) for block in answer.content], [("text", "17 + 25")])
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("stop_sequence", " = "))
        cut = self.anthropic.messages.create(
            model="demo", max_tokens=3, messages=QUESTION, thinking={"type": "disabled"})
        self.assertEqual(cut.stop_reason, "max_tokens")

    def test_messages_tools(self):
        task = demo_task("tool_call")
        wanted = task["expect"]["calls"][0]
        tools = [{"name": t["function"]["name"], "description": t["function"].get("description", ""),
                  "input_schema": t["function"]["parameters"]} for t in task["tools"]]
        tools.append({"type": "web_search_20250305", "name": "web_search"})
        asked = {"model": "demo", "max_tokens": 300, "messages": task["messages"], "tools": tools}
        whole = self.anthropic.messages.create(**asked)
        self.assertEqual(whole.stop_reason, "tool_use")
        call = whole.content[-1]
        self.assertEqual((call.name, call.input), (wanted["name"], wanted["arguments"]))
        events = list(self.anthropic.messages.create(stream=True, **asked))
        opened = None
        blocks, joined = 0, ""
        for event in events:
            if event.type == "content_block_start":
                self.assertIsNone(opened)
                self.assertEqual(event.index, blocks)
                opened, blocks = event.content_block.type, blocks + 1
            elif event.type == "content_block_delta":
                self.assertIn(event.delta.type, {"thinking": ("thinking_delta", "signature_delta"), "text": ("text_delta",),
                                                 "tool_use": ("input_json_delta",)}[opened])
                if event.delta.type == "input_json_delta":
                    joined += event.delta.partial_json
            elif event.type == "content_block_stop":
                opened = None
        self.assertIsNone(opened)
        self.assertEqual(json.loads(joined), wanted["arguments"])
        self.assertEqual([e.type for e in events][0], "message_start")
        self.assertEqual([e.type for e in events][-2:], ["message_delta", "message_stop"])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "{\"status\": \"ok\"}"}]}
        more = self.anthropic.messages.create(**{**asked, "messages": task["messages"] + [
            {"role": "assistant", "content": [b.model_dump() for b in whole.content]},
            {"role": "user", "content": [result]}]})
        self.assertTrue(more.content)

    def test_message_threads(self):
        """The server holds the conversation: what goes on is what it would be with all of it sent again."""
        task = demo_task("tool_call")
        tools = [{"name": t["function"]["name"], "description": t["function"].get("description", ""),
                  "input_schema": t["function"]["parameters"]} for t in task["tools"]]
        beta = self.anthropic.beta.messages
        asked = {"model": "demo", "max_tokens": 300, "messages": task["messages"], "tools": tools, "system": "Be brief."}
        first = beta.create(**asked, thread={"type": "create"})
        results = [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": b.id, "content": "{\"status\": \"ok\"}"}
            for b in first.content if b.type == "tool_use"]}]
        self.assertTrue(results[0]["content"])
        sent = asked["messages"] + [{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]}] + results
        again = beta.create(**{**asked, "messages": sent})

        def onward(message, messages, **more):
            return beta.create(model="demo", max_tokens=300, messages=messages,
                               thread={"type": "continue", "previous_message_id": message.id}, **more)

        def prompt(message):
            return message.usage.input_tokens + message.usage.cache_read_input_tokens
        second = onward(first, results)
        self.assertEqual([b.text for b in second.content if b.type == "text"], [b.text for b in again.content if b.type == "text"])
        self.assertEqual(prompt(second), prompt(again))
        with beta.stream(model="demo", max_tokens=300, messages=QUESTION,
                         thread={"type": "continue", "previous_message_id": second.id}) as stream:
            third = stream.get_final_message()
        self.assertIn("42", third.content[-1].text)
        self.assertGreater(prompt(third), prompt(second))
        self.assertIn("7", onward(third, [{"role": "user", "content": "What is 3 + 4?"}]).content[-1].text)
        # It may go on from the same message twice.
        self.assertEqual(prompt(onward(first, results)), prompt(second))

        for fields in ({"tools": tools}, {"system": "Be brief."}):
            with self.assertRaises(anthropic.BadRequestError):
                onward(first, results, **fields)
        with self.assertRaises(anthropic.BadRequestError):
            onward(first, [])
        unkept = beta.create(**asked)
        for unknown in (unkept.id, "msg_none"):
            with self.assertRaises(anthropic.NotFoundError) as caught:
                beta.create(model="demo", max_tokens=3, messages=results,
                            thread={"type": "continue", "previous_message_id": unknown})
            self.assertEqual(caught.exception.body["error"]["details"], {"error_code": "thread_not_found"})
        with self.assertRaises(anthropic.BadRequestError):
            beta.create(**asked, thread={"type": "fork"})

    def test_tool_runner(self):
        """The client's own loop around calls, which keeps the conversation on the server."""
        asked = []

        @anthropic.beta_tool
        def get_news(category: str) -> str:
            """Latest headlines."""
            asked.append(category)
            return "A new record is out."
        runner = self.anthropic.beta.messages.tool_runner(
            model="demo", max_tokens=300, tools=[get_news], messages=[{"role": "user", "content": "What is new in music?"}])
        kinds = [[block.type for block in message.content] for message in runner]
        self.assertEqual(asked, ["music"])
        self.assertEqual(len(kinds), 2)
        self.assertEqual((kinds[0][-1], kinds[1][-1]), ("tool_use", "text"))

    def test_messages_are_counted_as_they_are_read(self):
        system = [{"type": "text", "text": "x-anthropic-billing-header: cch=12345;"}, {"type": "text", "text": "Be brief."}]
        count = self.anthropic.messages.count_tokens(model="demo", messages=QUESTION, system=system).input_tokens
        answer = self.anthropic.messages.create(model="demo", max_tokens=1, messages=QUESTION, system="Be brief.")
        self.assertEqual(count, answer.usage.input_tokens + answer.usage.cache_read_input_tokens)
        status, text, _ = self.server.post("/v1/messages/count_tokens?beta=true", {"messages": QUESTION})
        self.assertEqual(status, 200, text)

    def test_messages_are_refused_in_their_form(self):
        for fields, word in (({"messages": []}, "messages"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
                             ({"temperature": 11}, "temperature"), ({"n": 2}, "n is not supported"),
                             ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
                             ({"messages": [{"role": "user", "content": "word " * 5000}]}, "prompt is too long")):
            status, text, _ = self.server.post("/v1/messages", {"messages": QUESTION, "max_tokens": 5, **fields})
            self.assertEqual(status, 400, text)
            error = json.loads(text)
            self.assertEqual((error["type"], error["error"]["type"]), ("error", "invalid_request_error"))
            self.assertIn(word, error["error"]["message"])

    # ---- refusals

    def test_fields_are_refused_by_name(self):
        chat, text = "/v1/chat/completions", "/v1/completions"
        for field, value in {"temperature": 11, "top_p": 0, "top_k": -2, "min_p": 1, "n": 0, "max_tokens": 0, "seed": "a",
                             "presence_penalty": 11, "stop": 5, "logit_bias": {"x": 1}, "top_logprobs": 21,
                             "tool_choice": "required", "tools": [{"type": "code"}], "response_format": {"type": "xml"},
                             "stop_token_ids": [-1], "messages": [], "chat_template": "x", "guided_json": 5,
                             "reasoning_effort": 1, "stream_options": {"include_usage": True}}.items():
            error = self.error(400, self.place(field, value), chat, {"messages": QUESTION, field: value})
            self.assertIn(field, error["message"])
        self.error(400, "suffix", text, {"prompt": "a", "suffix": "b"})
        self.error(400, "prompt", text, {})
        self.error(400, "prompt[1]", text, {"prompt": [1, 999999]})
        self.error(400, "messages[0].content[0]", chat,
                   {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image")
        self.error(404, "model", chat, {"messages": QUESTION, "model": "gpt-4"})
        error = self.error(400, "messages", chat, {"messages": [{"role": "user", "content": "word " * 5000}]})
        self.assertEqual(error["code"], "context_length_exceeded")
        self.assertIn("maximum context length", error["message"])
        # In the words of each API, and nothing of where the server's files are.
        self.error(400, "prompt", text, {"prompt": "word " * 5000}, "too long")
        self.error(400, "input", "/v1/responses", {"input": "word " * 5000}, "too long")
        for path, field, body in ((chat, "messages", {"messages": [{"role": "system", "content": "a"}]}),
                                  ("/v1/responses", "input", {"input": [{"role": "assistant", "content": "a"}]})):
            error = self.error(400, field, path, body, "no user query")
            self.assertTrue(error["message"].startswith(field + ": chat_template.jinja: line "), error)
        picture = {"type": "input_image", "image_url": "x"}
        for i, item in enumerate(({"role": "user", "content": [picture]}, {"role": "assistant", "content": [picture]},
                                  {"type": "function_call_output", "call_id": "a", "output": [picture]})):
            place = f"input[1].{'output' if i == 2 else 'content'}[0]"
            self.error(400, place, "/v1/responses", {"input": [{"role": "user", "content": "a"}, item]}, "image")
        self.error(400, "metadata", "/v1/responses", {"input": "a", "metadata": 5})

    def test_the_ends_of_ranges_are_in_them(self):
        for field, value in {"top_p": 1e-300, "repetition_penalty": 1e-300, "min_p": 1 - 1e-12, "temperature": 1e-300,
                             "logit_bias": {"0": 100, "2047": -100}, "n": 64, "seed": -2 ** 63, "priority": -1000000,
                             "max_tokens": 2 ** 31, "top_k": -1, "stop": [""], "modalities": ["text"]}.items():
            body = {"prompt": "1 + 1 =", "max_tokens": 1, "temperature": 1, field: value}
            if field in ("max_tokens", "stop"):
                body["stop"] = ["", "2", " ", "1"]
            if field == "modalities":
                body = {"messages": QUESTION, "max_tokens": 1, field: value}
            status, text, _ = self.server.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
            self.assertEqual(status, 200, f"{field}: {text}")

    @staticmethod
    def place(field, value):
        return {"tools": "tools[0]", "stop_token_ids": "stop_token_ids[0]", "response_format": "response_format.type"}.get(field, field)

    def test_unknown_fields_are_named(self):
        status, _, headers = self.server.post(
            "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "user": "u", "made_up": 1, "stop": None})
        self.assertEqual(status, 200)
        self.assertEqual(headers["x-fourfold-ignored"], "user, made_up")

    def test_bad_bodies(self):
        for body in (b"", b"{", b"[]", b"nul", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100000, b'{"a":' * 1000):
            status, text, _ = self.server.post("/v1/chat/completions", body)
            self.assertEqual(status, 400, text)
        self.assertEqual(self.server.post("/v1/chat/completions", {}, {"content-type": "text/plain"})[0], 415)
        self.assertEqual(self.server.get("/v1/chat/completions")[0], 405)
        self.assertEqual(self.server.get("/nothing")[0], 404)

    def test_mutated_bodies(self):
        """Requests with values replaced, lost and doubled: never a crash, never a 500."""
        random_values = [None, True, False, 0, -1, 1, 2 ** 63, 1e308, -0.5, "", "auto", "\ud800", "a" * 5000, [], [[]], {},
                         {"type": "text"}, {"a": {"b": []}}, [{}], ["x", 1], {"type": "function", "function": {}}]
        chooser = random.Random(11)
        task = demo_task("tool_call")
        anthropic_tools = [{"name": "a", "input_schema": {"type": "object"}}]
        seeds = {
            "/v1/chat/completions": {
                "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
                             {"role": "assistant", "content": None, "reasoning": "c", "tool_calls": [
                                 {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                             {"role": "tool", "tool_call_id": "1", "content": "d"}],
                "tools": task["tools"], "tool_choice": "auto", "max_tokens": 1, "temperature": 1, "stop": ["x"], "n": 1,
                "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 1, "response_format": {"type": "text"},
                "chat_template_kwargs": {"enable_thinking": False}, "stream": True, "stream_options": {"include_usage": True}},
            "/v1/completions": {"prompt": [[1, 2], "a"], "max_tokens": 1, "echo": True, "logprobs": 1, "n": 1, "stop": "a"},
            "/v1/messages": {
                "system": [{"type": "text", "text": "a"}], "tools": anthropic_tools, "tool_choice": {"type": "auto"},
                "thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 1, "stop_sequences": ["x"],
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "a"}, {"type": "tool_use", "id": "1", "name": "a", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a"}]}]},
            "/v1/responses": {
                "instructions": "a", "tools": [{"type": "function", "name": "f", "parameters": {}}], "max_output_tokens": 1,
                "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"},
                "input": [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []},
                          {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                          {"type": "function_call_output", "call_id": "1", "output": "a"}]},
            "/tokenize": {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "/detokenize": {"tokens": [1, 2, 3]},
        }

        def places(value, path=()):
            yield path
            for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
                yield from places(value[key], path + (key,))

        def copy(value):
            return json.loads(json.dumps(value))

        def mutate(value):
            value = copy(value)
            for _ in range(chooser.randint(1, 3)):
                path = chooser.choice([p for p in places(value) if p])
                parent = value
                for key in path[:-1]:
                    parent = parent[key]
                action = chooser.randrange(3)
                if action == 0 and isinstance(parent, (dict, list)):
                    del parent[path[-1]]
                elif action == 1 and isinstance(parent, list):
                    parent.append(copy(parent[path[-1]]))
                else:
                    parent[path[-1]] = copy(chooser.choice(random_values))
                if not value:
                    break
            return value

        for path, seed in seeds.items():
            self.assertEqual(self.server.post(path, seed)[0], 200, path)
        statuses = {}
        for _ in range(400):
            path = chooser.choice(list(seeds))
            body = mutate(seeds[path])
            for field in ("max_tokens", "max_output_tokens"):
                if path.startswith("/v1") and field in seeds[path]:
                    body[field] = 1
            status, text, _ = self.server.post(path, body)
            statuses[status] = statuses.get(status, 0) + 1
            self.assertIn(status, (200, 400, 404), f"{path} {json.dumps(body)[:2000]} {text[:500]}")
            if status != 200:
                self.assertTrue(json.loads(text)["error"]["message"])
        self.assertGreater(statuses[200], 20)
        self.assertGreater(statuses[400], 100)
        self.assertEqual(self.server.get("/health")[0], 200)

    # ---- the server

    def test_models_and_its_kind(self):
        model = self.openai.models.list().data[0]
        self.assertEqual((model.id, model.max_model_len, model.meta["n_ctx_train"]), ("demo", 4096, 4096))
        self.assertIn("models", json.loads(self.server.get("/v1/models")[1]))
        self.assertEqual(self.openai.models.retrieve("demo"), model)
        self.assertEqual(self.server.get("/v1/models/%64emo")[0], 200)
        with self.assertRaises(openai.NotFoundError):
            self.openai.models.retrieve("no/such")
        self.assertEqual(json.loads(self.server.get("/props")[1])["n_ctx"], 4096)
        for path in ("/health", "/ready", "/live", "/version", "/get_server_info", "/get_model_info"):
            self.assertEqual(self.server.get(path)[0], 200, path)

    def test_tokenize(self):
        _, text, _ = self.server.post("/tokenize", {"prompt": "héllo <think>", "return_token_strs": True})
        answer = json.loads(text)
        self.assertEqual(answer["count"], len(answer["tokens"]))
        self.assertEqual(answer["token_strs"][-1], "<think>")
        _, text, _ = self.server.post("/detokenize", {"tokens": answer["tokens"]})
        self.assertEqual(json.loads(text)["prompt"], "héllo <think>")
        _, text, _ = self.server.post("/tokenize", {"content": "héllo", "with_pieces": True})
        pieces = [token["piece"] for token in json.loads(text)["tokens"]]
        self.assertEqual(b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces), "héllo".encode())
        self.assertTrue(any(isinstance(piece, list) for piece in pieces), pieces)

    def test_metrics(self):
        before = self.server.metric("vllm:generation_tokens_total")
        self.openai.completions.create(model="demo", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})
        self.assertEqual(self.server.metric("vllm:generation_tokens_total"), before + 5)
        text = self.server.get("/metrics")[1]
        families = {family.name: family for family in text_string_to_metric_families(text)}
        # The reader drops the end of a counter's name, and calls what it cannot place unknown.
        said = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        self.assertEqual(said, {name + "_total" * (family.type == "counter"): family.type for name, family in families.items()})
        samples = {sample.name for family in families.values() for sample in family.samples}
        histograms = 0
        for name, family in families.items():
            # What promtool would say, but for the colon in vLLM's names.
            self.assertRegex(name, r"^(vllm:|fourfold_|process_)[a-z_0-9]+$")
            self.assertFalse(name.endswith("_total"), name)
            self.assertTrue(family.documentation, name)
            self.assertTrue(all(sample.labels["model_name"] == "demo" for sample in family.samples), name)
            if family.type == "histogram":
                histograms += 1
                bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name == name + "_bucket"]
                counts = [sample.value for sample in family.samples if sample.name == name + "_bucket"]
                count, = (sample.value for sample in family.samples if sample.name == name + "_count")
                self.assertEqual((bounds, counts), (sorted(set(bounds)), sorted(counts)), name)
                self.assertEqual((bounds[-1], counts[-1]), (float("inf"), count), name)
                self.assertIn(name + "_sum", samples)
        self.assertEqual(histograms, 9)
        with open(os.path.join(ROOT, "packages/grafana.json")) as file:
            shown = set(re.findall(r"\b(?:vllm:|fourfold_|process_)[a-z_0-9]+", file.read()))
        self.assertGreater(len(shown), 20)
        self.assertEqual(shown - samples, set(), "on the dashboard, and not in /metrics")

    def test_clients_that_vanish_cancel(self):
        for stream in (False, True):
            before = self.server.metric("vllm:request_success_total")
            body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}).encode()
            client = socket.create_connection(("127.0.0.1", self.server.port))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
            for _ in range(200):
                if self.server.metric("vllm:num_requests_running") == 1:
                    break
                time.sleep(0.01)
            self.assertEqual(self.server.metric("vllm:num_requests_running"), 1)
            client.close()
            end = time.monotonic() + 2
            while self.server.metric("vllm:num_requests_running") > 0 and time.monotonic() < end:
                time.sleep(0.01)
            self.assertEqual(self.server.metric("vllm:num_requests_running"), 0)
            self.assertEqual(self.server.metric("vllm:request_success_total"), before + 1)

    def test_many_at_once(self):
        answers = [None] * 24

        def ask(i):
            answers[i] = self.openai.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": f"What is {i} + {i}?"}],
                extra_body={"enable_thinking": False}).choices[0].message.content
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(answers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone = [self.openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": f"What is {i} + {i}?"}],
            extra_body={"enable_thinking": False}).choices[0].message.content for i in (0, 11, 23)]
        self.assertEqual([answers[i] for i in (0, 11, 23)], alone)
        self.assertTrue(all(answers))


if __name__ == "__main__":
    unittest.main()
