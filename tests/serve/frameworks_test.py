"""Programs that are built on the official clients, against the server and the demo model: that they work through, not
how clever the answers are. And the API's description, tried by schemathesis.

Run by .ci/run in a virtual environment with packages/pypi-serve.txt.
"""
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # nothing is sent elsewhere
os.environ["LANGSMITH_TRACING"] = "false"

import agents
import codex_cli_bin
import langchain_core.messages
import langchain_core.tools
import langchain_openai
import openai
import pydantic_ai
import pydantic_ai.models.openai
import pydantic_ai.providers.openai

from server import ROOT, Server

QUESTION = "What is 17 + 25?"
NEWS_QUESTION = "What is new in music?"


def get_news(category: str) -> str:
    """Latest headlines."""
    get_news.asked.append(category)
    return "A new record is out."


class FrameworksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--served-model-name", "demo").wait_ready()
        cls.url = cls.server.url + "/v1"

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.lines)

    def setUp(self):
        get_news.asked = []

    def test_langchain(self):
        model = langchain_openai.ChatOpenAI(base_url=self.url, api_key="none", model="demo", max_retries=0,
                                            extra_body={"enable_thinking": False})
        self.assertIn("42", model.invoke(QUESTION).content)
        pieces = list(model.stream(QUESTION))
        self.assertGreater(len(pieces), 2)
        self.assertIn("42", "".join(piece.content for piece in pieces))
        tool = langchain_core.tools.tool(get_news)
        messages = [langchain_core.messages.HumanMessage(NEWS_QUESTION)]
        answer = model.bind_tools([tool]).invoke(messages)
        self.assertEqual([(call["name"], call["args"]) for call in answer.tool_calls], [("get_news", {"category": "music"})])
        messages += [answer, tool.invoke(answer.tool_calls[0])]
        self.assertTrue(model.bind_tools([tool]).invoke(messages).content)
        self.assertEqual(get_news.asked, ["music"])
        responses = langchain_openai.ChatOpenAI(base_url=self.url, api_key="none", model="demo", max_retries=0,
                                                use_responses_api=True)
        self.assertIn("42", responses.invoke(QUESTION).text)

    def test_agents(self):
        client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)

        async def run(model):
            settings = agents.ModelSettings(max_tokens=300, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
            agent = agents.Agent(name="demo", instructions="Be concise.", model=model, model_settings=settings,
                                 tools=[agents.function_tool(get_news)])
            result = await agents.Runner.run(agent, NEWS_QUESTION)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            events = [event async for event in streamed.stream_events()]
            return result, streamed, events
        for model in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            result, streamed, events = asyncio.run(run(model(model="demo", openai_client=client)))
            self.assertEqual(get_news.asked, ["music"])
            get_news.asked = []
            self.assertTrue(result.final_output)
            self.assertIn("tool_call_output_item", [item.type for item in result.new_items])
            self.assertIn("42", streamed.final_output)
            self.assertIn("raw_response_event", {event.type for event in events})
            client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)  # of the next event loop

    def test_pydantic_ai(self):
        provider = pydantic_ai.providers.openai.OpenAIProvider(base_url=self.url, api_key="none")
        for kind in (pydantic_ai.models.openai.OpenAIChatModel, pydantic_ai.models.openai.OpenAIResponsesModel):
            get_news.asked = []
            agent = pydantic_ai.Agent(kind("demo", provider=provider), tools=[get_news], retries=3,
                                      model_settings={"max_tokens": 300,
                                                      "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}})
            result = agent.run_sync(NEWS_QUESTION)
            self.assertEqual(get_news.asked, ["music"])
            self.assertTrue(result.output)
            self.assertGreater(result.usage().output_tokens if callable(result.usage) else result.usage.output_tokens, 0)

    def test_codex(self):
        """The command-line agent, in a home and a directory of its own: it asks, and shows what comes. Its prompt is longer
        than the demo model's context, so that the model says of itself that it has more positions."""
        with tempfile.TemporaryDirectory() as home:
            model = os.path.join(home, "model")
            shutil.copytree(os.path.join(ROOT, "models/demo"), model)
            with open(os.path.join(model, "config.json")) as file:
                config = json.load(file)
            (config.get("text_config") or config)["max_position_embeddings"] = 32768
            with open(os.path.join(model, "config.json"), "w") as file:
                json.dump(config, file)
            server = Server(model, "--served-model-name", "demo", "--max-num-seqs", "2", "--max-model-len", "13312").wait_ready()
            try:
                os.mkdir(os.path.join(home, ".codex"))
                with open(os.path.join(home, ".codex/config.toml"), "w") as file:
                    file.write(f"""
model = "demo"
model_provider = "local"
model_context_window = 13312
[model_providers.local]
name = "local"
base_url = "{server.url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""")
                binary = os.path.join(os.path.dirname(codex_cli_bin.__file__), "bin/codex")
                run = subprocess.run(
                    [binary, "exec", "--skip-git-repo-check", "--json", "--sandbox", "read-only", QUESTION],
                    cwd=home, env={"HOME": home, "PATH": os.environ["PATH"]}, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
            finally:
                self.assertEqual(server.stop(), 0)
        asked = [line for line in server.log() if line["path"] == "/v1/responses"]
        self.assertTrue(asked, run.stdout + run.stderr)
        self.assertEqual({line["status"] for line in asked}, {200}, run.stdout + run.stderr)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        events = [json.loads(line) for line in run.stdout.splitlines()]
        self.assertEqual(events[-1]["type"], "turn.completed", run.stdout)
        self.assertGreater(events[-1]["usage"]["output_tokens"], 0)

    def test_lm_eval(self):
        """By the prompt's log-probabilities, with the server's own tokenizer: right sums are more likely than wrong ones."""
        with tempfile.TemporaryDirectory() as directory:
            run = subprocess.run(
                [os.path.join(os.path.dirname(sys.executable), "lm_eval"), "run", "--model", "local-completions", "--model_args",
                 f"model=demo,base_url={self.url}/completions,tokenizer_backend=remote,num_concurrent=4,max_length=4096",
                 "--include_path", "tests/serve/lm_eval", "--tasks", "sums", "--output_path", directory],
                cwd=ROOT, env={**os.environ, "HOME": directory, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
            self.assertEqual(run.returncode, 0, run.stdout[-8000:])
            found = [os.path.join(place, name) for place, _, names in os.walk(directory) for name in names
                     if name.startswith("results")]
            with open(found[0]) as file:
                results = json.load(file)["results"]["sums"]
        self.assertEqual(results["sample_len"] if "sample_len" in results else 20, 20)
        self.assertGreaterEqual(results["acc,none"], 0.9)

    def test_description(self):
        """Requests made from /openapi.json, right ones and wrong ones: answers are as it says."""
        server = Server("--max-model-len", "256").wait_ready()  # short answers, however many tokens are asked for
        with tempfile.TemporaryDirectory() as directory:  # it leaves notes where it runs
            run = subprocess.run(
                [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", server.url + "/openapi.json",
                 "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
                             "negative_data_rejection,unsupported_method",
                 "-H", "x-request-timeout: 3600", "--request-timeout", "300", "--phases", "coverage,fuzzing",
                 "--max-examples", "20", "--seed", "1", "--generation-deterministic", "--no-color", "--workers", "1"],
                cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(run.returncode, 0, run.stdout[-8000:])


if __name__ == "__main__":
    unittest.main()
