"""Two servers of the demo model behind a router, by hand: conversations stay where their beginning is cached, and when one
server is killed under load no request is lost but those that it was answering. Standard library alone; everything
but the events of vllm_kv listens on this machine only.

  python3 tests/serve/routers.py nginx sglang vllm vllm_kv

Wants the programs of those that are named: nginx (Debian: nginx-light), sglang-router and vllm-router (PyPI packages of
those names). FOURFOLD_BINARY names the server's.
"""
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from server import ROOT, Server

CONVERSATIONS, TURNS, STREAMS = 8, 3, 16


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def nginx(servers, port, directory):
    """packages/nginx.conf, with these ports, and all its files in the directory."""
    with open(os.path.join(ROOT, "packages/nginx.conf")) as file:
        text = file.read()
    for ours, here in {"listen 127.0.0.1:8000": f"listen 127.0.0.1:{port}", "/tmp/fourfold-nginx-": f"{directory}/",
                       **{f"127.0.0.1:{8001 + i} ": f"127.0.0.1:{server.port} " for i, server in enumerate(servers)}}.items():
        if ours not in text:
            raise RuntimeError(f"packages/nginx.conf has no {ours}")
        text = text.replace(ours, here)
    path = os.path.join(directory, "nginx.conf")
    with open(path, "w") as file:
        file.write(text)
    return [shutil.which("nginx") or "/usr/sbin/nginx", "-c", path, "-g", "daemon off;"]


def worker_urls(servers):
    return [f"http://127.0.0.1:{s.port}" for s in servers]


def sglang(servers, port, directory):
    return ["sglang-router", "launch", "--worker-urls", *worker_urls(servers), "--host", "127.0.0.1", "--port", str(port),
            "--policy", "cache_aware", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
            "--health-failure-threshold", "1"]


def vllm(servers, port, directory):
    return ["vllm-router", "--worker-urls", *worker_urls(servers), "--host", "127.0.0.1", "--port", str(port), "--policy",
            "cache_aware", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
            "--health-failure-threshold", "1"]


def vllm_kv(servers, port, directory):
    """By what the servers tell of their caches; static sources have an empty topic."""
    sources = [part for server in servers for part in
               ("--kv-event-source", f"http://127.0.0.1:{server.port}=tcp://127.0.0.1:{server.events}")]
    return ["vllm-router", "--worker-urls", *worker_urls(servers), "--host", "127.0.0.1", "--port", str(port), "--policy",
            "kv_aware", *sources, "--kv-event-block-size", "64", "--kv-event-model", "demo", "--prometheus-port", str(free_port()),
            "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]


def start(name):
    """A server; for vllm_kv one that publishes its cache events, which only a wild card binds."""
    port = free_port()
    told = ["--kv-events-config", json.dumps({"endpoint": f"tcp://*:{port}"})] if name == "vllm_kv" else []
    server = Server("--served-model-name", "demo", "--disable-log-requests", *told).wait_ready()
    server.events = port
    return server


def post(port, body, conversation):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json", "x-conversation": str(conversation)})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def wait_for(port):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            post(port, {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, 0)
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise RuntimeError("the router does not answer")


def cached_share(port):
    """Of the prompts' tokens, in later turns of conversations that take turns."""
    histories = [[{"role": "user", "content": f"Conversation {i}. " + f"Remember {i * 37} and {i * 91}. " * 20}]
                 for i in range(CONVERSATIONS)]
    cached = prompt = 0
    for turn in range(TURNS):
        for i, messages in enumerate(histories):
            answer = post(port, {"model": "demo", "messages": messages, "max_tokens": 20, "enable_thinking": False}, i)
            usage = answer["usage"]
            if turn > 0:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompt += usage["prompt_tokens"]
            messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                         {"role": "user", "content": f"And what is {turn} + {i}?"}]
    return cached / prompt


def rightly_placed(port, servers):
    """Of conversations that a server answered before: those whose next turn the router gives to that one."""
    right = 0
    for i in range(CONVERSATIONS):
        messages = [{"role": "user", "content": f"Story {i * 7919}. " + f"Remember {i * 37} and {i * 91}. " * 25}]
        body = {"model": "demo", "messages": messages, "max_tokens": 5, "enable_thinking": False}
        server = servers[i * 3 // 2 % 2]
        post(server.port, body, i)
        time.sleep(0.5)  # the events' way
        before = server.metric("vllm:prompt_tokens_total")
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
        post(port, body, i)
        right += server.metric("vllm:prompt_tokens_total") > before
    return right


async def ask(port, i):
    """"whole", "cut" for a stream that ended early, or the status."""
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": f"Question {i}: what is {i} + 1?"}],
                       "max_tokens": 60, "stream": True, "ignore_eos": True}).encode()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Connection: close\r\nX-Conversation: %d\r\nContent-Length: %d\r\n\r\n" % (i, len(body)) + body)
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
    except OSError:
        return "no connection"
    status = answer.split(b" ", 2)[1].decode() if answer else "nothing"
    return "whole" if status == "200" and b"data: [DONE]" in answer else "cut" if status == "200" else status


async def killed_under_load(port, servers):
    """What became of requests, and how many the killed server was answering."""
    outcomes, number = {}, 0
    killed_with = None
    end = time.monotonic() + 20

    async def client():
        nonlocal number
        while time.monotonic() < end:
            number += 1
            outcome = await ask(port, number)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

    async def killer():
        nonlocal killed_with
        await asyncio.sleep(5)
        running = [int(s.metric("vllm:num_requests_running")) for s in servers]
        killed_with = max(running)
        servers[running.index(killed_with)].process.send_signal(signal.SIGKILL)
    await asyncio.gather(killer(), *(client() for _ in range(STREAMS)))
    return outcomes, killed_with


def main():
    results = {}
    for name in sys.argv[1:] or ["nginx", "sglang", "vllm"]:
        with tempfile.TemporaryDirectory() as directory:
            servers = [start(name) for _ in range(2)]
            port = free_port()
            with open(os.path.join(directory, "log"), "w") as log:
                router = subprocess.Popen(globals()[name](servers, port, directory), stdout=log, stderr=log, cwd=directory)
            try:
                wait_for(port)
                share = cached_share(port)
                used = [int(s.metric("vllm:prompt_tokens_total")) for s in servers]
                placed = {"rightly_placed": rightly_placed(port, servers)} if name == "vllm_kv" else {}
                outcomes, running = asyncio.run(killed_under_load(port, servers))
                results[name] = {**placed, "cached_share": round(share, 3), "prompt_tokens_of_each": used, "outcomes": outcomes,
                                 "running_when_killed": running}
            except Exception:
                with open(os.path.join(directory, "log")) as log:
                    print(log.read()[-3000:], file=sys.stderr)
                raise
            finally:
                router.terminate()
                router.wait(30)
                for server in servers:
                    server.process.kill()
                    server.stop()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
