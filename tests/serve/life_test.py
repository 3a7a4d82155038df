"""The server from its start to its end: flags, keys, overload, TLS, what is logged."""
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

import msgpack
import openai
import yaml
import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from server import BINARY, QUESTION, ROOT, Server


def make_certificate(directory):
    """Of a machine named 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
                   .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
                   .not_valid_after(now + datetime.timedelta(days=1))
                   .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
                   .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
                   .sign(key, hashes.SHA256()))
    paths = [os.path.join(directory, name) for name in ("certificate.pem", "key.pem")]
    with open(paths[0], "wb") as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
    with open(paths[1], "wb") as file:
        file.write(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                     serialization.NoEncryption()))
    return paths


class LifeTest(unittest.TestCase):
    def test_keys(self):
        server = Server("--api-key", "first-key", "--api-key", "second-key", "--served-model-name", "a", "b").wait_ready()
        try:
            self.assertEqual(server.get("/v1/models")[0], 401)
            self.assertEqual(server.get("/v1/models", {"authorization": "Bearer first-ke"})[0], 401)
            self.assertEqual(server.get("/v1/models", {"authorization": "Bearer second-key"})[0], 200)
            self.assertEqual(server.get("/v1/models", {"x-api-key": "first-key"})[0], 200)
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="first-key", max_retries=0)
            self.assertEqual([m.id for m in client.models.list().data], ["a", "b"])
            with self.assertRaises(openai.AuthenticationError):
                openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0).models.list()
        finally:
            self.assertEqual(server.stop(), 0)

    def test_keys_of_a_file_have_limits(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
            file.write("plain-key name=plain\n# a comment\nsmall-key name=small requests-per-minute=2 priority=5\n")
            file.flush()
            server = Server("--api-key-file", file.name).wait_ready()
        body = {"prompt": "a", "max_tokens": 1}
        try:
            def ask(key):
                return server.post("/v1/completions", body, {"authorization": "Bearer " + key})
            self.assertEqual([ask("small-key")[0] for _ in range(2)], [200, 200])
            status, text, headers = ask("small-key")
            self.assertEqual((status, json.loads(text)["error"]["code"]), (429, "rate_limit_exceeded"))
            self.assertGreaterEqual(int(headers["retry-after"]), 1)
            self.assertEqual([ask("plain-key")[0] for _ in range(4)], [200] * 4)
            self.assertEqual(server.post("/v1/completions", body)[0], 401)
            status, text, _ = server.post("/v1/messages", {"messages": QUESTION, "max_tokens": 1}, {"x-api-key": "small-key"})
            self.assertEqual((status, json.loads(text)["error"]["type"]), (429, "rate_limit_error"))
        finally:
            self.assertEqual(server.stop(), 0)
        keys = [line.get("key") for line in server.log() if line["path"] == "/v1/completions"]
        self.assertEqual(keys, ["small"] * 3 + ["plain"] * 4 + [None])
        self.assertNotIn("small-key", "".join(server.lines))

    def test_tls(self):
        with tempfile.TemporaryDirectory() as directory:
            certificate, key = make_certificate(directory)
            server = Server("--ssl-certfile", certificate, "--ssl-keyfile", key)
            context = ssl.create_default_context(cafile=certificate)
            run = subprocess.run([BINARY, "serve", "--port", "0", "--ssl-certfile", certificate, "--ssl-keyfile", certificate],
                                 stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(run.returncode, 2)
            self.assertIn("--ssl-keyfile", run.stderr)
        server.tls = context
        server.wait_ready()
        try:
            self.assertTrue(server.url.startswith("https://"))
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0,
                                   http_client=openai.DefaultHttpxClient(verify=context))
            stream = client.chat.completions.create(model="demo", messages=QUESTION, stream=True,
                                                    extra_body={"enable_thinking": False})
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            self.assertEqual(text, "17 + 25 = 42")
            # Large bodies in both directions.
            prompt = "word " * 100_000
            status, text, _ = server.post("/tokenize", {"prompt": prompt, "return_token_strs": True})
            self.assertEqual(status, 200)
            tokens = json.loads(text)["tokens"]
            self.assertEqual(json.loads(server.post("/detokenize", {"tokens": tokens})[1])["prompt"], prompt)
            with socket.create_connection(("127.0.0.1", server.port)) as plain:
                plain.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                self.assertNotIn(b"HTTP", plain.recv(1000))
        finally:
            self.assertEqual(server.stop(), 0)

    def test_unix_socket(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "socket")
            server = Server("--uds", path)

            def ask(request):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
                    client.sendall(request)
                    answer = b""
                    while piece := client.recv(65536):
                        answer += piece
                return answer
            health = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            for _ in range(600):
                if b" 200 OK" in ask(health):
                    break
                time.sleep(0.05)
            body = b'{"prompt": "a", "max_tokens": 2}'
            answer = ask(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                         b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            self.assertIn(b" 200 OK", answer)
            self.assertEqual(server.stop(), 0)
            self.assertFalse(os.path.exists(path))

    def test_options_of_a_file(self):
        with tempfile.TemporaryDirectory() as directory:
            def write(text):
                path = os.path.join(directory, "serve.yaml")
                with open(path, "w") as file:
                    file.write(text)
                return path
            with open("/proc/net/if_inet6") if os.path.exists("/proc/net/if_inet6") else open(os.devnull) as file:
                host = "::1" if "0" * 31 + "1 " in file.read() else "127.0.0.1"
            path = write(f"# as vLLM's\nhost: '{host}'\nport: 1\nmax-model-len: 1024\nserved-model-name: [a, b]\nmax_num_seqs: 3\n"
                         "enable-prefix-caching: true\nenable-log-requests: false\n"
                         "speculative-config:\n  method: mtp\n  num_speculative_tokens: 1\n")
            server = Server("--config", path, "--max-num-seqs", "2").wait_ready()
            try:
                models = json.loads(server.get("/v1/models")[1])["data"]
                self.assertEqual([(m["id"], m["max_model_len"]) for m in models], [("a", 1024), ("b", 1024)])
                self.assertEqual(json.loads(server.get("/props")[1])["total_slots"], 2)
                server.post("/v1/completions", {"prompt": "1 2 3", "max_tokens": 20, "ignore_eos": True})
                self.assertGreater(server.metric("vllm:spec_decode_num_draft_tokens_total"), 0)
            finally:
                self.assertEqual(server.stop(), 0)
            for text, words in (("max-model-len: 1024\nno-such: 1\n", "line 2: there is no option no-such"),
                                ("max-model-len: [1, 2]\n", "line 1: max-model-len takes one value"),
                                ("max-model-len: x\n", "max-model-len"), ("a: [\n", "serve.yaml line"),
                                ("enable-prefix-caching: 3\n", "true or false"), ("- a\n", "mapping"),
                                ("port: 1\nport: 2\n", "twice"), ("config: x\n", "no option config")):
                run = subprocess.run([BINARY, "serve", "--port", "0", "--config", write(text)], stderr=subprocess.PIPE, text=True,
                                     timeout=60)
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn(words, run.stderr)

    def test_the_manifest(self):
        """packages/kubernetes.yaml: its arguments start a server, its probes are answered by it, its names fit together."""
        with open(os.path.join(ROOT, "packages/kubernetes.yaml")) as file:
            deployment, service, pool = yaml.safe_load_all(file)
        template = deployment["spec"]["template"]
        labels, pod = template["metadata"]["labels"], template["spec"]
        container, = pod["containers"]
        for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"],
                         pool["spec"]["selector"]["matchLabels"]):
            self.assertLessEqual(selector.items(), labels.items())
        self.assertEqual({m["name"] for m in container["volumeMounts"]}, {v["name"] for v in pod["volumes"]})
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        self.assertEqual({port["targetPort"] for port in service["spec"]["ports"]}, set(ports))
        self.assertEqual([port["number"] for port in pool["spec"]["targetPorts"]], [ports["http"]])
        with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            events = probe.getsockname()[1]
            probe.close()
            with open(os.path.join(directory, "keys"), "w") as file:
                file.write("sk-a\n")
            given = "\n".join(container["args"])
            for ours, here in {"/model\n": os.path.join(ROOT, "models/demo") + "\n", "/keys/": directory + "/", "$(POD_IP)": "127.0.0.1",
                               f"*:{ports['kv-events']}": f"127.0.0.1:{events}"}.items():
                self.assertIn(ours, given)
                given = given.replace(ours, here)
            server = Server(*given.split("\n")).wait_ready()
            try:
                for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                    asked = container[name]["httpGet"]
                    self.assertEqual((server.get(asked["path"])[0], asked["port"]), (200, "http"), name)
                self.assertEqual(server.get(template["metadata"]["annotations"]["prometheus.io/path"])[0], 200)
                self.assertEqual(server.get("/v1/models")[0], 401)
                self.assertEqual(json.loads(server.get("/v1/models", {"authorization": "Bearer sk-a"})[1])["data"][0]["id"], "model")
                drain, = (int(a.split("=")[1]) for a in container["args"] if a.startswith("--drain-seconds"))
                self.assertLess(drain, pod["terminationGracePeriodSeconds"])
            finally:
                self.assertEqual(server.stop(), 0)

    def test_cache_events(self):
        """A router's side of vLLM's events: what is told is what is cached, and what was missed can be had again."""
        with tempfile.TemporaryDirectory() as directory:
            events, replay = ("ipc://" + os.path.join(directory, name) for name in ("events", "replay"))
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay,
                      "topic": "kv@demo"}
            server = Server("--kv-events-config", json.dumps(config), "--kv-cache-tokens", "4096").wait_ready()
            context = zmq.Context()
            try:
                subscriber = context.socket(zmq.SUB)
                subscriber.connect(events)
                subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@demo")
                asker = context.socket(zmq.DEALER)
                asker.connect(replay)
                asker.setsockopt(zmq.RCVTIMEO, 60_000)
                prompt = "A long text that is cached. " * 30
                tokens = json.loads(server.post("/tokenize", {"prompt": prompt})[1])["tokens"]
                body = {"prompt": prompt, "max_tokens": 1}
                server.post("/v1/completions", {**body, "cache_salt": "secret"})
                server.post("/v1/completions", body)
                for round in range(200):  # each fills the cache further, until something is given up
                    random_text = "".join(chr(97 + (i * i + round * 7) % 26) for i in range(900)) + str(round)
                    server.post("/v1/completions", {"prompt": random_text, "max_tokens": 1})
                    asker.send_multipart([b"", (0).to_bytes(8, "big")])
                    messages = [asker.recv_multipart()[1:]]
                    while int.from_bytes(messages[-1][1], "big", signed=True) >= 0:
                        messages.append(asker.recv_multipart()[1:])
                    batches = [msgpack.unpackb(payload) for _, _, payload in messages[:-1]]
                    if any(event["type"] == "BlockRemoved" for batch in batches for event in batch[1]):
                        break
                self.assertEqual([int.from_bytes(n, "big") for _, n, _ in messages[:-1]], list(range(len(messages) - 1)))
                self.assertEqual({topic for topic, _, _ in messages[:-1]}, {b"kv@demo"})
                self.assertEqual(messages[-1], [b"", b"\xff" * 8, b""])
                blocks = {}
                for time_sent, batch, rank in batches:
                    self.assertGreater(time_sent, 1e9)
                    for event in batch:
                        if event["type"] == "BlockStored":
                            names, parent, stored, size = (
                                event[key] for key in ("block_hashes", "parent_block_hash", "token_ids", "block_size"))
                            self.assertEqual(len(stored), size * len(names))
                            for i, name in enumerate(names):
                                self.assertNotIn(name, blocks)
                                blocks[name] = (parent, stored[i * size:(i + 1) * size])
                                parent = name
                        elif event["type"] == "BlockRemoved":
                            for name in event["block_hashes"]:
                                del blocks[name]
                first = next(event for batch in batches for event in batch[1] if event["type"] == "BlockStored")
                self.assertIsNone(first["parent_block_hash"])
                self.assertEqual(first["token_ids"], tokens[:len(first["token_ids"])])
                self.assertGreaterEqual(len(first["token_ids"]), len(tokens) // 64 * 64 - 64)
                self.assertTrue(any(event["type"] == "BlockRemoved" for batch in batches for event in batch[1]))
                self.assertTrue(subscriber.poll(60_000))
                topic, number, payload = subscriber.recv_multipart()
                self.assertEqual((topic, len(number)), (b"kv@demo", 8))
                self.assertIn(msgpack.unpackb(payload)[1][0]["type"], ("BlockStored", "BlockRemoved"))
            finally:
                context.destroy(linger=0)
                self.assertEqual(server.stop(), 0)

    def test_requests_are_logged_without_their_text(self):
        server = Server("--no-enable-prefix-caching").wait_ready()
        body = {"prompt": "a secret word " * 30, "max_tokens": 2}
        server.post("/v1/completions", body, {"x-request-id": "mine-1"})
        answer = json.loads(server.post("/v1/completions", body)[1])
        self.assertEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(server.stop(), 0)
        lines = [json.loads(line) for line in server.lines if line.startswith("{")]
        lines = [line for line in lines if line.get("path", "").startswith("/v1/")]
        self.assertEqual(len(lines), 2)
        self.assertEqual((lines[0]["id"], lines[0]["status"], lines[0]["output_tokens"]), ("mine-1", 200, 2))
        self.assertNotIn("secret", "".join(server.lines))

    def test_overload(self):
        server = Server("--max-num-seqs", "1", "--max-queued-requests", "1").wait_ready()
        try:
            bodies = [{"prompt": "a", "max_tokens": 2000, "ignore_eos": True}] * 6
            results = [None] * len(bodies)

            def ask(i):
                results[i] = server.post("/v1/completions", bodies[i])
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            statuses = sorted(status for status, _, _ in results)
            self.assertEqual(set(statuses), {200, 503})
            self.assertTrue(all(h["retry-after"] for s, _, h in results if s == 503))
            self.assertEqual(server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0], 200)
            # What would never fit is no overload.
            for body in ({"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}, {"prompt": "a", "n": 2, "guided_choice": ["a"]}):
                status, text, _ = server.post("/v1/completions", {**body, "max_tokens": 1})
                self.assertEqual((status, json.loads(text)["error"]["param"]), (400, "n"), text)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_the_end_waits_for_answers(self):
        server = Server().wait_ready()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        # Long enough that the answer cannot be over, on any machine, before the two requests below are.
        streams = [client.completions.create(model="demo", prompt=str(i), max_tokens=2000, stream=True,
                                             extra_body={"ignore_eos": True}) for i in range(3)]
        for stream in streams:
            next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        for _ in range(200):
            if server.get("/ready")[0] == 503:
                break
            time.sleep(0.01)
        status, text, _ = server.post("/v1/completions", {"prompt": "a"})
        self.assertEqual(status, 503, text)
        self.assertEqual(server.get("/ready")[0], 503)
        for stream in streams:
            finish = None
            for chunk in stream:
                finish = chunk.choices[0].finish_reason if chunk.choices else finish
            self.assertEqual(finish, "length")
        self.assertEqual(server.stop(), 0)

    def test_what_cannot_be_honoured_is_refused(self):
        for flags, word in ((["--max-model-len", "999999"], "--max-model-len"), (["--device", "cuda"], "--device"),
                            (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype"),
                            (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization"),
                            (["--tensor-parallel-size", "3"], "--tensor-parallel-size"),
                            (["--speculative-config", '{"method": "ngram"}'], "--speculative-config"),
                            (["--reasoning-parser", "other"], "--reasoning-parser"), (["/nowhere"], "/nowhere")):
            run = subprocess.run([BINARY, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(word, run.stderr)

    def test_drafts_change_nothing(self):
        plain, drafting = Server().wait_ready(), Server("--speculative-config",
                                                        '{"method": "mtp", "num_speculative_tokens": 2}').wait_ready()
        try:
            body = {"messages": QUESTION, "max_tokens": 60}
            answers = [json.loads(s.post("/v1/chat/completions", body)[1])["choices"][0]["message"] for s in (plain, drafting)]
            self.assertEqual(answers[0], answers[1])
            self.assertGreater(drafting.metric("vllm:spec_decode_num_accepted_tokens_total"), 0)
        finally:
            self.assertEqual((plain.stop(), drafting.stop()), (0, 0))


if __name__ == "__main__":
    unittest.main()
