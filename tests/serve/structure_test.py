"""Answers under a schema, a pattern, a choice or a grammar, and calls that are forced, by the demo model at temperatures at
which it says anything: each is what was asked for, in every API, alone and beside others, with drafts, streamed and whole.

Run by .ci/run beside clients_test.py.
"""
import concurrent.futures
import json
import os
import random
import re
import subprocess
import unittest
from typing import Literal, Optional, Union

import anthropic
import jsonschema
import openai
from pydantic import BaseModel, Field

from server import BINARY, Server

TOOL = os.path.join(os.path.dirname(BINARY), "../tests/structure/structure_tool")
OFF = {"chat_template_kwargs": {"enable_thinking": False}}

SCHEMAS = {
    "nested": {"type": "object", "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 500},
        "inner": {"type": "object", "properties": {"x": {"type": "number", "exclusiveMinimum": -1, "maximum": 2.5}, "y": {"type": "boolean"}},
                  "required": ["x"], "additionalProperties": False}}, "required": ["id", "inner"], "additionalProperties": False},
    "enums": {"type": "array", "items": {"enum": ["red", "gr\"ün", 3, 2.5, None, True, {"a": [1]}, "日本", "<b>"]}, "minItems": 2, "maxItems": 4},
    "choices": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"},
                          {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}]},
    "recursive": {"$defs": {"tree": {"type": "object", "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "required": ["v", "kids"], "additionalProperties": False}},
        "$ref": "#/$defs/tree"},
    "strings": {"type": "object", "properties": {
        "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}, "day": {"type": "string", "format": "date"},
        "mail": {"type": "string", "format": "email"}, "key": {"type": "string", "format": "uuid"},
        "short": {"type": "string", "minLength": 2, "maxLength": 5}},
        "required": ["code", "day", "mail", "key", "short"], "additionalProperties": False},
    "empty": {"type": "object", "properties": {}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
             "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "pairs": {"type": "array", "prefixItems": [{"const": "point"}, {"type": "number", "minimum": 0, "maximum": 1}], "items": False, "minItems": 2},
    "tagged": {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer", "maximum": -5, "minimum": -90}}, "required": ["kind", "n"]},
        {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}]},
    "joined": {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
                         {"properties": {"a": {"maximum": 7}, "b": {"type": "boolean"}}}]},
    "kinds": {"type": ["integer", "null", "boolean"], "minimum": 10, "maximum": 99},
    "unicode": {"type": "object", "properties": {"naïve ключ": {"enum": ["ü\n", "\u0000", "\\", "\""]}}, "required": ["naïve ключ"]},
}
CHECK = jsonschema.Draft202012Validator.FORMAT_CHECKER
FUNCTIONS = [
    {"name": "book", "parameters": {"type": "object", "properties": {
        "room": {"type": "integer", "minimum": 1, "maximum": 40}, "note": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["single", "double"]}, "guest": {"$ref": "#/$defs/guest"},
        "until": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}},
        "required": ["room", "kind", "guest", "until"], "additionalProperties": False,
        "$defs": {"guest": {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
                            "required": ["age"], "additionalProperties": False}}}},
    {"name": "list_rooms", "parameters": {"type": "object", "properties": {"free": {"type": "boolean"}}, "required": ["free"]}}]
TOOLS = [{"type": "function", "function": f} for f in FUNCTIONS]


def ask(text="Say something."):
    return [{"role": "user", "content": text}]


def validate(value, schema):
    jsonschema.Draft202012Validator(schema, format_checker=CHECK).validate(value)


class Structure(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--max-num-seqs", "8").wait_ready()
        cls.openai = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=cls.server.url, api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.openai.close()
        cls.anthropic.close()
        assert cls.server.stop() == 0
        assert not any("assert" in line for line in cls.server.lines), cls.server.lines

    def post(self, path, body, server=None):
        status, text, _ = (server or self.server).post(path, body)
        self.assertEqual(status, 200, text)
        return json.loads(text)

    def error(self, field, path, body):
        status, text, _ = self.server.post(path, body)
        self.assertEqual(status, 400, text)
        error = json.loads(text)["error"]
        if path == "/v1/messages":
            self.assertIn(field, error["message"])
        else:
            self.assertEqual(error["param"], field, error["message"])
        return error["message"]

    @staticmethod
    def body(schema, seed, **more):
        return {"messages": ask(), "temperature": 1.7, "seed": seed, "max_tokens": 500, **OFF,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, **more}

    def answer(self, body, server=None):
        choice = self.post("/v1/chat/completions", body, server)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    # ---- schemas

    def test_answers_validate(self):
        whole = 0
        for name, schema in SCHEMAS.items():
            for seed in range(4):
                with self.subTest(schema=name, seed=seed):
                    text, finish = self.answer(self.body(schema, seed))
                    if finish == "length":
                        continue
                    whole += 1
                    validate(json.loads(text), schema)
        self.assertGreater(whole, 3 * len(SCHEMAS))

    def test_behind_reasoning(self):
        """Reasoning is free; the form begins behind it, whether it ends by itself or by its budget."""
        for budget in (0, 1, 25):
            for name in ("nested", "enums", "tagged"):
                body = self.body(SCHEMAS[name], budget, thinking_token_budget=budget, chat_template_kwargs={"enable_thinking": True})
                message = self.post("/v1/chat/completions", body)["choices"][0]
                if message["finish_reason"] != "length":
                    validate(json.loads(message["message"]["content"]), SCHEMAS[name])
                self.assertNotIn("</think>", message["message"]["reasoning"] or "")

    def test_json_object(self):
        for seed in range(4):
            text, finish = self.answer({"messages": ask(), "temperature": 1.2, "seed": seed, "max_tokens": 300, **OFF,
                                        "response_format": {"type": "json_object"}})
            self.assertTrue(text.startswith("{"))
            if finish != "length":
                self.assertIsInstance(json.loads(text), dict)

    def test_a_cut_answer_is_its_beginning(self):
        text, finish = self.answer(self.body(SCHEMAS["strings"], 1, max_tokens=5))
        self.assertEqual(finish, "length")
        whole, _ = self.answer(self.body(SCHEMAS["strings"], 1))
        self.assertTrue(whole.startswith(text), (text, whole))

    def test_patterns_choices_and_grammars(self):
        more = {"messages": ask(), "temperature": 2, "max_tokens": 200, **OFF}
        for form in ("structured_outputs", "guided"):
            def fields(kind, value):
                return {"structured_outputs": {kind: value}} if form == "structured_outputs" else {"guided_" + kind: value}
            for seed in range(3):
                text, _ = self.answer({**more, "seed": seed, **fields("regex", "(\\+49|0)[1-9]\\d{2,4}/\\d{3}")})
                self.assertRegex(text, "^(\\+49|0)[1-9]\\d{2,4}/\\d{3}$")
                text, _ = self.answer({**more, "seed": seed, **fields("choice", ["yes", "no", "perhaps é"])})
                self.assertIn(text, ["yes", "no", "perhaps é"])
                text, _ = self.answer({**more, "seed": seed, **fields("grammar", 'root ::= "SELECT " name (", " name){0,2}\nname ::= [a-z]{1,3}')})
                self.assertRegex(text, "^SELECT [a-z]{1,3}(, [a-z]{1,3}){0,2}$")
                text, _ = self.answer({**more, "seed": seed, **fields("json", SCHEMAS["kinds"])})
                validate(json.loads(text), SCHEMAS["kinds"])
        answer = self.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "temperature": 2, "guided_choice": ["x", "yz"], "max_tokens": 20})
        self.assertEqual([c["index"] for c in answer["choices"]], [0, 1, 2, 3])
        self.assertLessEqual({c["text"] for c in answer["choices"]}, {"x", "yz"})

    # ---- the same alone, beside others, with drafts, streamed

    def bodies(self):
        names = ["nested", "strings", "tagged", "enums", "recursive", "joined"]
        out = [self.body(SCHEMAS[name], seed, max_tokens=120) for seed in range(2) for name in names]
        out += [{"messages": ask(), "seed": s, "temperature": 1.5, "max_tokens": 60, **OFF} for s in range(3)]  # and without
        out += [{"messages": ask(), "seed": s, "temperature": 1.5, "max_tokens": 200, **OFF, "tools": TOOLS, "tool_choice": "required"} for s in range(3)]
        return out

    @staticmethod
    def said(message):
        return message["content"], [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]

    def all(self, server, workers):
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda body: self.said(self.post("/v1/chat/completions", body, server)["choices"][0]["message"]), self.bodies()))

    def test_the_same_alone_and_beside_others_and_with_drafts(self):
        alone = self.all(self.server, 1)
        self.assertEqual(self.all(self.server, 8), alone)
        drafting = Server("--max-num-seqs", "8", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}').wait_ready()
        try:
            self.assertEqual(self.all(drafting, 8), alone)
        finally:
            self.assertEqual(drafting.stop(), 0)

    def test_streamed(self):
        body = self.body(SCHEMAS["nested"], 5)
        text, _ = self.answer(body)
        pieces = [chunk.choices[0].delta.content or "" for chunk in self.openai.chat.completions.create(
            model="demo", stream=True, extra_body=OFF, **{k: v for k, v in body.items() if k != "chat_template_kwargs"})]
        self.assertEqual("".join(pieces), text)

    # ---- calls

    def check_call(self, name, arguments):
        validate(arguments, next(f["parameters"] for f in FUNCTIONS if f["name"] == name))

    def test_forced_calls(self):
        for choice, names in (("required", {"book", "list_rooms"}), ({"type": "function", "function": {"name": "book"}}, {"book"})):
            for thinking in (False, True):
                for seed in range(3):
                    answer = self.post("/v1/chat/completions", {
                        "messages": ask(), "tools": TOOLS, "tool_choice": choice, "temperature": 1.5, "seed": seed, "max_tokens": 600,
                        "parallel_tool_calls": False, "thinking_token_budget": 20, "chat_template_kwargs": {"enable_thinking": thinking}})["choices"][0]
                    if answer["finish_reason"] == "length":
                        continue
                    self.assertEqual(answer["finish_reason"], "tool_calls")
                    self.assertEqual(answer["message"]["content"] or "", "")
                    (call,) = answer["message"]["tool_calls"]
                    self.assertIn(call["function"]["name"], names)
                    self.check_call(call["function"]["name"], json.loads(call["function"]["arguments"]))

    def test_forced_calls_of_responses(self):
        tools = [{"type": "web_search"}] + [{"type": "function", **f} for f in FUNCTIONS]
        for choice in ("required", {"type": "function", "name": "list_rooms"}):
            answer = self.post("/v1/responses", {"input": "Say something.", "tools": tools, "tool_choice": choice, "temperature": 1.5, "seed": 3,
                                                 "parallel_tool_calls": False, "max_output_tokens": 600, **OFF})
            self.assertEqual(answer["status"], "completed")
            call = answer["output"][-1]
            self.assertEqual(call["type"], "function_call")
            self.check_call(call["name"], json.loads(call["arguments"]))

    def test_forced_calls_of_messages(self):
        tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "list_rooms", "disable_parallel_tool_use": True}):
            answer = self.anthropic.messages.create(model="demo", max_tokens=600, messages=ask(), tools=tools, tool_choice=choice,
                                                    extra_body={"temperature": 1, "seed": 1}, thinking={"type": "disabled"})
            self.assertEqual(answer.stop_reason, "tool_use")
            self.check_call(answer.content[-1].name, answer.content[-1].input)

    def test_calls_that_are_only_offered(self):
        """With strict tools a call, where there is one, fits; beside a schema the answer is a call or fits."""
        strict = [{"type": "function", "function": {**f, "strict": True}} for f in FUNCTIONS]
        for seed in range(3):
            body = {"messages": ask("Book a room."), "tools": strict, "temperature": 1.3, "seed": seed, "max_tokens": 300, **OFF}
            for more in ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["nested"]}}}):
                answer = self.post("/v1/chat/completions", {**body, **more})["choices"][0]
                if answer["finish_reason"] == "length":
                    continue
                calls = answer["message"].get("tool_calls") or []
                for call in calls:
                    self.check_call(call["function"]["name"], json.loads(call["function"]["arguments"]))
                if more and not calls:
                    validate(json.loads(answer["message"]["content"]), SCHEMAS["nested"])

    # ---- clients

    def test_parse(self):
        class Leg(BaseModel):
            to: Literal["Rome", "Oslo"]
            km: int = Field(ge=1, le=9999)

        class Trip(BaseModel):
            title: str = Field(max_length=20)
            legs: list[Leg] = Field(min_length=1, max_length=3)
            price: Optional[float] = Field(default=None, ge=0, le=1000)
            back: Union[bool, None]

        done = self.openai.chat.completions.parse(model="demo", messages=ask(), response_format=Trip, temperature=1.2, seed=1, max_tokens=800, extra_body=OFF)
        self.assertIsInstance(done.choices[0].message.parsed, Trip)
        response = self.openai.responses.parse(model="demo", input="Say something.", text_format=Trip, temperature=1.2, max_output_tokens=800, extra_body={"seed": 2, **OFF})
        self.assertIsInstance(response.output_parsed, Trip)
        answer = self.post("/v1/messages", {"messages": ask(), "max_tokens": 800, "temperature": 1, "seed": 4, "thinking": {"type": "disabled"},
                                            "output_config": {"format": {"type": "json_schema", "schema": Trip.model_json_schema()}}})
        Trip.model_validate_json(answer["content"][-1]["text"])

    # ---- refusals

    def test_refusals_name_the_field(self):
        chat = "/v1/chat/completions"
        place = "response_format.json_schema.schema"
        self.error(place + ".properties.a.uniqueItems", chat, self.body({"properties": {"a": {"type": "array", "uniqueItems": True}}}, 1))
        self.error(place + ".not", chat, self.body({"not": {}}, 1))
        self.error("text.format.schema.if", "/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"if": {}}}}})
        self.error("output_config.format.schema.if", "/v1/messages", {
            "messages": ask(), "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {"if": {}}}}})
        self.error("guided_regex", chat, {"messages": ask(), "guided_regex": "(a)\\1"})
        self.error("guided_grammar", chat, {"messages": ask(), "guided_grammar": "root ::= nothing"})
        self.error("guided_choice", chat, {"messages": ask(), "guided_choice": []})
        self.error("structured_outputs", chat, {"messages": ask(), "structured_outputs": {}})
        self.error("guided_regex", chat, {"messages": ask(), "guided_json": {}, "guided_regex": "a"})
        self.error("ignore_eos", chat, {"messages": ask(), "guided_regex": "a", "ignore_eos": True})
        self.error("min_tokens", chat, {"messages": ask(), "guided_regex": "a", "min_tokens": 5})
        self.error("tool_choice.function.name", chat, {"messages": ask(), "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}})
        bad = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
        self.error("tools[0].function.parameters.properties.a.contains", chat, {
            "messages": ask(), "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": bad}}]})
        self.error("tools[0].input_schema.properties.a.contains", "/v1/messages", {
            "messages": ask(), "max_tokens": 5, "tool_choice": {"type": "any"}, "tools": [{"name": "f", "input_schema": bad}]})

    def test_hostile_schemas(self):
        """Refused or answered, and nobody else waits: the server lives, and answers others."""
        deep = {"type": "integer"}
        for _ in range(60):
            deep = {"anyOf": [deep, {"type": "array", "items": deep}]} if len(json.dumps(deep)) < 100_000 else {"type": "array", "items": deep}
        hostile = [
            deep,
            {"type": "array", "items": {"type": "array", "items": {"type": "string", "maxLength": 10_000}, "maxItems": 10_000}, "maxItems": 10_000},
            {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,200}$"} for i in range(400)}},
            {"enum": ["x" * 200 + str(i) for i in range(2000)]},
            {"type": "object", "additionalProperties": True, "properties": {"".join(random.Random(i).choices("ab", k=60)): {} for i in range(300)}},
            {"type": "string", "pattern": "(" * 5000},
            {"type": "string", "pattern": "(((a|b|c|d|e){50}){50}){50}"},
            {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(40)]},
        ]
        for schema in hostile:
            status, text, _ = self.server.post("/v1/chat/completions", self.body(schema, 1, max_tokens=3))
            self.assertIn(status, (200, 400), text)
        text, _ = self.answer(self.body(SCHEMAS["kinds"], 1))
        validate(json.loads(text), SCHEMAS["kinds"])


@unittest.skipUnless(os.path.exists(TOOL), "structure_tool is not built")
class Grammars(unittest.TestCase):
    """Without a model: texts drawn byte by byte from the grammars of schemas, which visits more of them."""

    def test_texts_validate(self):
        with open(os.path.join(os.path.dirname(__file__), "schemas.jsonl")) as lines:
            schemas = list(SCHEMAS.values()) + [json.loads(line) for line in lines]
        done = subprocess.run([TOOL, "texts", "25"], input="".join(json.dumps(s) + "\n" for s in schemas), capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), len(schemas), done.stderr)
        for schema, line in zip(schemas, lines):
            texts = json.loads(line)
            self.assertIsInstance(texts, list, (schema, texts))
            self.assertTrue(texts, schema)
            for text in texts:
                with self.subTest(schema=schema, text=text):
                    validate(json.loads(text), schema)


if __name__ == "__main__":
    unittest.main()
