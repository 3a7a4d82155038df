"""Load for a server of the demo model, by hand: what docs/serving.md has figures of. Standard library alone; every server
that it starts listens on this machine only. FOURFOLD_BINARY names the binary.

  python3 tests/serve/load.py soak --seconds 180     64 streams with cancellations, disconnects and slow readers
  python3 tests/serve/load.py idle                   10,000 idle connections
  python3 tests/serve/load.py throughput             16 streams beside `bench engine` with the same requests
  python3 tests/serve/load.py first                  first byte of a one-token answer beside the engine's own time
  python3 tests/serve/load.py vanish                 from the end of a connection to the end of its request
  python3 tests/serve/load.py start                  from the start of the process to the open port
  python3 tests/serve/load.py malformed              20,000 malformed requests
"""
import argparse
import asyncio
import json
import os
import random
import re
import resource
import select
import socket
import statistics
import subprocess
import time

from server import BINARY, Server

MASK = (1 << 64) - 1


def resident_mb(server):
    with open(f"/proc/{server.process.pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def head(path, body=b"", more=""):
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


async def read_head(reader):
    return int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])


async def chunks(reader):
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def stream(server, body, limit=0, pause=0.0):
    """The text of an answer; None when it is left after `limit` pieces. `pause` between two reads is a slow reader."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 14 if pause else 1 << 20)
    try:
        writer.write(head("/v1/completions", json.dumps({**body, "stream": True}).encode()))
        status = await read_head(reader)
        if status != 200:
            raise RuntimeError(f"status {status}")
        text, pieces, ended = "", 0, False
        async for piece in chunks(reader):
            for line in piece.decode().split("\n"):
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RuntimeError(line)
                    text += "".join(choice["text"] for choice in chunk["choices"])
            pieces += 1
            if limit and pieces >= limit:
                return None
            if pause:
                await asyncio.sleep(pause)
        if not ended:
            raise RuntimeError("a stream ended early")
        return text
    finally:
        writer.close()


async def soak(options):
    server = Server("--max-num-seqs", "64", "--max-model-len", "1024", "--disable-log-requests").wait_ready()
    chooser = random.Random(3)
    # Short ones: rows of up to 16 tokens have the same bits alone and beside others, on every backend (docs/cpu.md).
    prompts = [f"{i} + {3 * i} =" for i in range(40)]
    body = {"temperature": 0.8, "seed": 5, "ignore_eos": True, "max_tokens": 120}
    alone = [await stream(server, {**body, "prompt": prompt}) for prompt in prompts]
    counts = {"complete": 0, "left": 0, "slow": 0, "different": 0, "errors": 0}
    memory, health = [], []
    end = time.monotonic() + options.seconds

    async def client():
        while time.monotonic() < end:
            which = chooser.randrange(len(prompts))
            kind = chooser.random()
            try:
                limit = chooser.randrange(1, 60) if kind < 0.15 else 0
                slow = 0.15 <= kind < 0.2
                text = await stream(server, {**body, "prompt": prompts[which]}, limit, 0.02 if slow else 0)
                counts["left" if limit and text is None else "slow" if slow else "complete"] += 1
                if text is not None and text != alone[which]:
                    counts["different"] += 1
            except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
                counts["errors"] += 1
                print("error:", repr(error))

    async def probe():
        while time.monotonic() < end:
            begin = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await reader.read()
            health.append((time.monotonic() - begin) * 1000)
            writer.close()
            memory.append(resident_mb(server))
            await asyncio.sleep(0.25)
    await asyncio.gather(probe(), *(client() for _ in range(64)))
    await asyncio.sleep(1)
    running = server.metric("vllm:num_requests_running")
    third = len(memory) // 3
    early, late = statistics.median(memory[third:2 * third]), statistics.median(memory[2 * third:])
    print(json.dumps({**counts, "running_after": running, "rss_mb_middle_third": round(early, 1),
                      "rss_mb_last_third": round(late, 1), "growth_percent": round((late / early - 1) * 100, 2),
                      "health_ms_p50": round(statistics.median(health), 2),
                      "health_ms_p99": round(sorted(health)[int(len(health) * 0.99)], 2),
                      "exit": server.stop()}))


async def idle(options):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = Server("--disable-log-requests").wait_ready()
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
    before = resident_mb(server)
    sockets = []
    for _ in range(options.connections):
        one = socket.socket()
        one.connect(("127.0.0.1", server.port))
        sockets.append(one)
    while server.metric("fourfold_http_connections") < options.connections:
        time.sleep(0.05)
    # Each has been used once.
    for one in sockets:
        one.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for one in sockets:
        one.recv(4096)
    after = resident_mb(server)
    times = []
    for _ in range(100):
        begin = time.monotonic()
        server.get("/health")
        times.append((time.monotonic() - begin) * 1000)
    print(json.dumps({"connections": len(sockets), "rss_mb_before": round(before, 1), "rss_mb_after": round(after, 1),
                      "more_mb": round(after - before, 1), "health_ms_p50": round(statistics.median(times), 2),
                      "health_ms_max": round(max(times), 2)}))
    for one in sockets:
        one.close()
    server.stop()


def bench_requests(count, length, vocabulary, seed=1):
    """The prompts of `bench engine --seed 1`: the numbers of base/random.h."""
    state = seed

    def below(n):
        nonlocal state
        state = (state + 0x9e3779b97f4a7c15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xbf58476d1ce4e5b9) & MASK
        z = ((z ^ (z >> 27)) * 0x94d049bb133111eb) & MASK
        return ((z ^ (z >> 31)) * n) >> 64
    return [[below(vocabulary) for _ in range(length)] for _ in range(count)]


class Reader:
    """A stream that costs its reader next to nothing: pieces are counted, and not parsed."""

    def __init__(self, port, body):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(head("/v1/completions", json.dumps({**body, "stream": True}).encode()))
        self.end = b""

    def read(self):
        piece = self.socket.recv(1 << 16)
        self.end = (self.end + piece)[-32:]
        if not piece:
            raise RuntimeError("a stream ended early")
        return b"data: [DONE]" in self.end


def read_all(port, bodies, concurrency):
    """Seconds of it, and of the processor that this client took."""
    begin, before = time.monotonic(), time.process_time()
    poll, open_ones = select.epoll(), {}
    while bodies or open_ones:
        while bodies and len(open_ones) < concurrency:
            one = Reader(port, bodies.pop())
            open_ones[one.socket.fileno()] = one
            poll.register(one.socket, select.EPOLLIN)
        for file, _ in poll.poll():
            if open_ones[file].read():
                open_ones.pop(file).socket.close()
    return time.monotonic() - begin, time.process_time() - before


async def throughput(options):
    shape = ["--requests", "64", "--concurrency", "16", "--prompt", "128", "--generate", "128"]
    bench = []
    served = []
    for _ in range(options.turns):
        run = subprocess.run([BINARY, "bench", "engine", os.path.join(os.path.dirname(BINARY), "../../../models/demo"), *shape,
                              "--json"], stdout=subprocess.PIPE, check=True, text=True)
        bench.append(json.loads(run.stdout))
        server = Server("--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--max-model-len", "256",
                        "--disable-log-requests").wait_ready()
        vocabulary = json.loads(server.get("/v1/models")[1])["data"][0]["meta"]["n_vocab"]
        prompts = bench_requests(64, 128, vocabulary)
        bodies = [{"prompt": one, "max_tokens": 128, "ignore_eos": True, "temperature": 0} for one in reversed(prompts)]
        seconds, client = read_all(server.port, bodies, 16)
        served.append((seconds, client))
        server.stop()
    processors = len(os.sched_getaffinity(0))
    tokens = 64 * 128
    print(json.dumps({
        "engine_tokens_per_second": [round(x["output_tokens_per_s"], 1) for x in bench],
        "server_tokens_per_second": [round(tokens / seconds, 1) for seconds, _ in served],
        "client_processor_seconds": [round(client, 3) for _, client in served],
        # Of the time that the client left to the server.
        "server_without_client": [round(tokens / (seconds - client / processors), 1) for seconds, client in served]}))


async def first(options):
    server = Server("--disable-log-requests").wait_ready()
    times, engine = [], []
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    def sums():
        return sum(server.metric(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill"))
    for i in range(options.turns * 20):
        body = json.dumps({"prompt": f"A short prompt, number {i}.", "max_tokens": 1, "stream": True,
                           "cache_salt": str(i)}).encode()
        before = sums()
        begin = time.monotonic()
        writer.write(head("/v1/completions", body))
        await read_head(reader)
        async for piece in chunks(reader):
            if piece.startswith(b"data: {") and not times[i:]:
                times.append((time.monotonic() - begin) * 1000)
        engine.append((sums() - before) * 1000)
    over = [a - b for a, b in zip(times, engine)]
    writer.close()
    server.stop()
    print(json.dumps({"first_byte_ms_p50": round(statistics.median(times), 2),
                      "engine_ms_p50": round(statistics.median(engine), 2),
                      "over_ms_p50": round(statistics.median(over), 2),
                      "over_ms_p90": round(sorted(over)[int(len(over) * 0.9)], 2)}))


async def vanish(options):
    server = Server("--disable-log-requests").wait_ready()
    times = []
    for i in range(options.turns * 10):
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": i % 2 == 0}).encode()
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(head("/v1/completions", body))
        while server.metric("vllm:num_requests_running") == 0:
            time.sleep(0.001)
        begin = time.monotonic()
        client.close()
        while server.metric("vllm:num_requests_running") > 0:
            pass
        times.append((time.monotonic() - begin) * 1000)
    server.stop()
    print(json.dumps({"cancelled_ms_p50": round(statistics.median(times), 1), "max": round(max(times), 1)}))


async def start(options):
    times = []
    for _ in range(options.turns * 3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        begin = time.monotonic()
        process = subprocess.Popen([BINARY, "serve", "--port", str(port)], stderr=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.0005)
        times.append((time.monotonic() - begin) * 1000)
        process.terminate()
        process.wait()
    print(json.dumps({"port_open_ms": [round(x, 1) for x in times], "p50": round(statistics.median(times), 1)}))


def mutated(chooser, text):
    text = bytearray(text)
    for _ in range(chooser.randint(1, 4)):
        place = chooser.randrange(len(text))
        action = chooser.randrange(3)
        if action == 0:
            text[place] = chooser.randrange(256)
        elif action == 1:
            del text[place:place + chooser.randint(1, 6)]
        else:
            text[place:place] = text[place:place + chooser.randrange(30)]
        if not text:
            return b"\r\n"
    return bytes(text)


async def malformed(options):
    server = Server("--disable-log-requests").wait_ready()
    chooser = random.Random(9)
    bodies = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stop": ["x"]},
              "/v1/completions": {"prompt": [1, 2], "max_tokens": 1, "logprobs": 1},
              "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1},
              "/v1/responses": {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 1}}
    statuses = {}

    async def client(count):
        for _ in range(count):
            path = chooser.choice(list(bodies))
            request = mutated(chooser, head(path, json.dumps(bodies[path]).encode(), "Connection: close\r\n"))
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                writer.write(request)
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), 60)
                found = re.match(rb"HTTP/1\.1 (\d+)", answer)
                status = int(found.group(1)) if found else 0
            except ConnectionError:
                status = -1
            statuses[status] = statuses.get(status, 0) + 1
            writer.close()
    await asyncio.gather(*(client(options.requests // 20) for _ in range(20)))
    print(json.dumps({"statuses": dict(sorted(statuses.items())), "health": server.get("/health")[0], "exit": server.stop()}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["soak", "idle", "throughput", "first", "vanish", "start", "malformed"])
    parser.add_argument("--seconds", type=int, default=180)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    asyncio.run(globals()[options.what](options))


if __name__ == "__main__":
    main()
