"""The server as a process, for the tests beside this file. FOURFOLD_BINARY names the binary. All traffic stays on this
machine."""
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BINARY = os.environ.get("FOURFOLD_BINARY", os.path.join(ROOT, "build/release/bin/fourfold"))
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


class Server:
    def __init__(self, *flags):
        self.process = subprocess.Popen([BINARY, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on (https?)(\+unix)?://(\S+), loading", line)
            if found:
                break
        else:
            raise RuntimeError("".join(self.lines))
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.url = f"{found.group(1)}://{found.group(3)}"
        self.port = None if found.group(2) else int(found.group(3).rsplit(":", 1)[1])
        self.tls = None  # a context, for servers that have TLS

    def wait_ready(self):
        for _ in range(600):
            if self.get("/ready")[0] == 200:
                return self
            time.sleep(0.05)
        raise RuntimeError("not ready")

    def get(self, path, headers=None):
        return self.send(urllib.request.Request(self.url + path, headers=headers or {}))

    def post(self, path, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})}))

    def send(self, request):
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.tls) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers

    def metric(self, name):
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(name + "{"):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def log(self):
        """The lines of requests, when the server has ended."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        self.reader.join(5)
        self.process.stderr.close()
        return status


def demo_task(name):
    with open(os.path.join(ROOT, "models/demo/eval", name + ".jsonl")) as file:
        return json.loads(file.readline())
