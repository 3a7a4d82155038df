"""The page at /, in headless Chromium: against the demo model, and against a server that says what a test wants.

Run by .ci/run; FOURFOLD_BINARY names the binary. All traffic stays on this machine.
"""
import base64
import hashlib
import http.server
import json
import os
import re
import select
import socket
import threading
import unittest
import urllib.error
import urllib.request

from browser import ALT, PATIENCE, SHIFT, Browser
from server import Server, demo_task

DRAFTS = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
IDLE = "document.querySelector('.turn') && document.getElementById('stop').hidden"


class Stand:
    """A server beside the real one, whose page it hands out, and whose every answer a test scripts."""

    def __init__(self, real):
        self.health = (200, {"status": "ok"})
        self.scripts, self.bodies, self.closed = [], [], False
        stand = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def whole(self, status, data, headers=()):
                data = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                for name, value in headers or [("content-type", "application/json")]:
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def parse_request(self):
                # Of a server that has gone, connections that were kept go too.
                parsed = super().parse_request()
                self.close_connection = self.close_connection or stand.closed
                return parsed and not stand.closed

            def do_GET(self):
                if self.path == "/health":
                    self.whole(*stand.health)
                elif self.path == "/v1/models":
                    self.whole(200, {"data": [{"id": "scripted", "max_model_len": 1000}]})
                else:
                    with urllib.request.urlopen(real + self.path) as answer:
                        kept = [(n, v) for n, v in answer.headers.items() if n in ("content-type", "content-security-policy")]
                        self.whole(200, answer.read(), kept)

            def do_POST(self):
                stand.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                stand.scripts.pop(0)(self)

            # What scripts are made of.

            def begin(self):
                self.close_connection = True
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()

            def raw(self, text):
                data = text.encode()
                self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")

            def delta(self, **delta):
                self.raw("data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}) + "\n\n")

            def conclude(self, reason="stop", **usage):
                self.raw("data: " + json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}) + "\n\n")
                self.raw("data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9, **usage}}) + "\n\n")
                self.raw("data: [DONE]\n\n")
                self.raw("")

            def gone(self):
                """Whether the client closes its side."""
                return bool(select.select([self.connection], [], [], PATIENCE)[0]) and self.connection.recv(1) == b""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, text, cut=7):
        def script(handler):
            handler.begin()
            for at in range(0, len(text), cut):
                handler.delta(content=text[at:at + cut])
            handler.conclude()
        self.scripts.append(script)

    def refuse(self, status, message, headers=(), **more):
        self.scripts.append(lambda handler: handler.whole(
            status, {"error": {"message": message, "param": None, "code": None, **more}}, [("content-type", "application/json"), *headers]))

    def close(self):
        self.closed = True
        self.server.shutdown()
        self.server.server_close()


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.close)
        cls.server = Server("--max-num-seqs", "4", *DRAFTS).wait_ready()

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.lines)

    def open(self, url=None, refusals=False, **options):
        """A tab that must be without a complaint at the end; `refusals`: but for those of Chromium about statuses."""
        url = url or self.server.url
        page = self.browser.page(url + "/", **options)

        def check():
            page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
            complaints = [c for c in page.complaints if not (refusals and c[0] == "network")]
            self.assertEqual(complaints, [])
            self.assertEqual([a for a in page.asked if not a.startswith((url + "/", "data:"))], [])
            page.close()
        self.addCleanup(check)
        return page

    def stand(self):
        stand = Stand(self.server.url)
        self.addCleanup(stand.close)
        return stand

    def ask(self, page, text):
        page.fill("#input", text)
        page.key("Enter")
        page.wait(f"document.querySelector('.question:nth-last-child(2) .bubble')?.innerText === {json.dumps(text)} && {IDLE}")

    @staticmethod
    def answers(page):
        return page.run("[...document.querySelectorAll('.answer > .markdown')].map((e) => e.innerText)")

    # ---- what is served

    def test_one_file_under_a_strict_policy(self):
        status, html, headers = self.server.get("/")
        self.assertEqual((status, headers["content-type"]), (200, "text/html; charset=utf-8"))
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        self.assertEqual((policy["default-src"], policy["connect-src"], policy["frame-ancestors"]), ("'none'", "'self'", "'none'"))
        for tag in ("style", "script"):
            inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
            digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
            self.assertEqual((len(inside), policy[f"{tag}-src"]), (1, f"'sha256-{digest}'"))
        # Addresses in the file are its own: pieces of itself, and one picture that is in it.
        for address in re.findall(r'\b(?:href|src|action)="([^"]*)"', html):
            self.assertTrue(address.startswith(("#", "data:image/svg+xml,")), address)
        for tags in (headers["etag"], f'"other", W/{headers["etag"]}', "*"):
            status, body, again = self.server.get("/", {"if-none-match": tags})
            self.assertEqual((status, body, again["etag"]), (304, "", headers["etag"]))
        self.assertEqual(self.server.get("/", {"if-none-match": '"other"'})[0], 200)
        status, _, refused = self.server.post("/", {})
        self.assertEqual((status, refused["allow"]), (405, "GET"))

    # ---- with the demo model

    def test_conversations(self):
        page = self.open()
        page.wait("document.getElementById('model').textContent.includes('demo')")
        page.picture("greeting-light")
        self.ask(page, "What is 17 + 25?")
        self.assertIn("42", self.answers(page)[0])
        # The thinking is folded, and there when it is wanted.
        self.assertRegex(page.text(".thinking summary"), r"^Thought for \d+ tokens$")
        self.assertFalse(page.run("document.querySelector('.thinking').open"))
        page.click(".thinking summary")
        self.assertTrue(page.wait("document.querySelector('.thinking > .markdown').innerText.trim()"))
        figures = page.text(".answer .figures")
        self.assertRegex(figures, r"\d tokens/s")
        accepted, drafted = map(int, re.search(r"(\d+) of (\d+) drafts accepted", figures).groups())
        self.assertLessEqual(accepted, drafted)
        self.assertGreater(accepted, 0)
        # It goes on with what was said.
        self.ask(page, "Double that.")
        self.assertIn("84", self.answers(page)[1])
        page.picture("chat-light")
        # Another answer to the same question: both stay.
        page.click(".answer:last-child [aria-label='Answer again']")
        page.wait(f"{IDLE} && document.querySelector('.answer:last-child .versions')?.innerText.trim() === '2 / 2'")
        page.click(".answer:last-child [aria-label='Previous version']")
        page.wait("document.querySelector('.answer:last-child .versions').innerText.trim() === '1 / 2'")
        # Another question in the place of the first: what followed is still behind the old one.
        page.click(".question:first-child [aria-label='Edit the message']")
        page.fill(".edit", "What is 3 + 4?")
        page.click(".editor .primary")
        page.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 2 && "
                  f"document.querySelector('.answer > .markdown').innerText.includes('7')")
        self.assertEqual(page.text(".question .versions").strip(), "2 / 2")
        page.click(".question [aria-label='Previous version']")
        page.wait("document.querySelectorAll('.turn').length === 4")
        # A second conversation beside it.
        page.click("#new")
        self.ask(page, "My lucky number is 855.")
        self.ask(page, "What is my lucky number?")
        self.assertIn("855", self.answers(page)[1])
        titles = "[...document.querySelectorAll('.side .open')].map((e) => e.textContent)"
        self.assertEqual(page.run(titles), ["My lucky number is 855.", "What is 17 + 25?"])
        # All of it is there after a reload, the one that was looked at in front.
        before = self.answers(page)
        page.reload()
        self.assertEqual(self.answers(page), before)
        page.click(".side li:nth-child(2) .open")
        self.assertEqual(len(self.answers(page)), 2)
        self.assertEqual(page.text(".answer:last-child .versions").strip(), "1 / 2")
        self.assertRegex(page.text(".answer .figures"), r"\d+ of \d+ drafts accepted")
        # Deleted, and brought back.
        page.click(".side li.current [aria-label^='Delete']")
        page.wait("document.querySelectorAll('.side li').length === 1 && document.querySelector('.greeting')")
        page.click("#toast button")
        page.wait("document.querySelectorAll('.side li').length === 2")
        page.click(".side li:nth-child(2) .open")
        self.assertEqual(len(self.answers(page)), 2)

    def test_settings_and_tools(self):
        page = self.open()
        task = demo_task("tool_call")
        page.click("#open-settings")
        page.fill("#s-system", task["messages"][0]["content"])
        page.fill("#s-temperature", "0")
        page.fill("#s-tools", "[{")
        self.assertIn("JSON", page.wait("!document.getElementById('tools-wrong').hidden && "
                                        "document.getElementById('tools-wrong').innerText"))
        page.fill("#s-tools", json.dumps(task["tools"]))
        page.wait("document.getElementById('tools-wrong').hidden")
        page.picture("settings-light")
        page.click("#close-settings")
        page.run("""(() => { const s = document.getElementById('thinking'); s.value = 'off'; s.dispatchEvent(new Event('change')); })()""")
        self.ask(page, task["messages"][1]["content"])
        wanted = task["expect"]["calls"][0]
        self.assertEqual(page.text(".call h3 code"), wanted["name"])
        self.assertEqual(json.loads(page.text(".call pre")), wanted["arguments"])
        page.fill(".call textarea", '{"status": "ok"}')
        page.picture("tools-light")
        page.click(".calls .primary")
        page.wait(f"{IDLE} && document.querySelectorAll('.answer').length === 2")
        self.assertTrue(self.answers(page)[1])
        self.assertIn('{"status": "ok"}', page.text(".call"))
        page.reload()
        self.assertIn('{"status": "ok"}', page.text(".call"))
        self.assertEqual(page.run("document.getElementById('thinking').value"), "off")

    def test_the_key_is_asked_for(self):
        server = Server("--api-key", "right-key").wait_ready()
        self.addCleanup(server.stop)
        page = self.open(server.url, refusals=True)
        page.wait("document.getElementById('key').open")
        page.picture("key-light")
        page.type("wrong-key")
        page.key("Enter")
        page.wait("document.getElementById('key').open && document.getElementById('key-words').innerText.includes('another')")
        page.type("right-key")
        page.key("Enter")
        page.wait("!document.getElementById('key').open && document.getElementById('model').textContent.includes('demo')")
        self.ask(page, "What is 3 + 4?")
        self.assertIn("7", self.answers(page)[0])
        page.reload()
        page.wait("document.getElementById('model').textContent.includes('demo')")
        self.assertIn("right-key", page.run("JSON.stringify(sessionStorage)"))
        self.assertNotIn("right-key", page.run("JSON.stringify(localStorage)"))
        self.assertNotIn("right-key", page.run("document.documentElement.outerHTML"))

    def test_live_figures_move(self):
        page = self.open()
        page.click("#tab-live")
        total = "+(/([\\d,]+) in all/.exec(document.querySelector('#tiles').innerText)?.[1] ?? '').replaceAll(',', '')"
        page.wait("document.querySelectorAll('.chart').length === 5 && document.querySelector('#tiles').innerText.includes('in all')")
        before = page.run(total)
        counts = []

        def work():
            for _ in range(3):
                answer = self.server.post("/v1/completions", {"prompt": "a", "max_tokens": 200, "ignore_eos": True})
                counts.append(json.loads(answer[1])["usage"]["completion_tokens"])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        page.wait(f"{total} >= {before} + {sum(counts)}")
        # Lines through at least two looks; speed where there was any.
        page.wait("document.querySelector('.chart .line-0').getAttribute('d').includes('L')")
        page.wait("/generated [1-9]/.test(document.querySelector('.chart svg').getAttribute('aria-label')) || "
                  "+document.querySelector('.axis-top').innerText.replaceAll(',', '') > 1")
        self.assertIn("drafts", page.text("#charts").lower())
        self.assertTrue(page.wait("document.querySelectorAll('.bars li').length > 0"))
        page.point(".chart .plot", 0.995)
        page.picture("live-light")
        page.set_dark(True)
        page.picture("live-dark")
        # Nothing is asked for while nobody looks.
        page.click("#tab-chat")
        page.reload()
        page.wait("document.getElementById('model').textContent.includes('demo')")
        self.assertNotIn(self.server.url + "/metrics", page.asked[page.asked.index(self.server.url + "/", 1):])

    # ---- hands, eyes, sizes

    def test_keyboard_alone(self):
        page = self.open()
        page.wait("document.activeElement.id === 'input'")
        page.type("What is 3 + 4?")
        page.key("Enter", SHIFT)
        page.type("Please.")
        self.assertIn("\n", page.run("document.getElementById('input').value"))
        page.key("Enter")
        page.wait(IDLE)
        # The last message, edited.
        page.key("ArrowUp")
        page.wait("document.activeElement.className === 'edit'")
        page.key("Escape")
        page.wait("document.activeElement.id === 'input' && !document.querySelector('.edit')")
        page.key("ArrowUp")
        page.wait("document.activeElement.className === 'edit'")
        page.type(" What is 5 + 6?")
        page.key("Enter")
        page.wait(f"{IDLE} && document.querySelector('.question .versions')?.innerText.trim() === '2 / 2'")
        # Everything can be reached, and shows that it was.
        page.run("document.activeElement.blur()")
        page.key("/")
        page.wait("document.activeElement.id === 'input' && document.activeElement.value === ''")
        reached = set()
        for _ in range(60):
            page.key("Tab", SHIFT)
            found = page.run("""(() => { const e = document.activeElement, s = getComputedStyle(e);
                return [e.id || e.getAttribute('aria-label') || e.textContent.trim(), s.outlineStyle]; })()""")
            reached.add(found[0])
            if found[0] != "":
                self.assertNotEqual(found[1], "none", found)
            if "Skip to the message" in found[0]:
                break
        for name in ("Answer again", "Copy the answer", "Edit the message", "Previous version", "new", "theme", "open-settings", "tab-chat"):
            self.assertIn(name, reached)
        page.key("Enter")
        page.wait("document.activeElement.id === 'input'")
        # Tabs by arrows.
        page.run("document.getElementById('tab-chat').focus()")
        page.key("ArrowRight")
        page.wait("document.activeElement.id === 'tab-live' && !document.getElementById('live').hidden")
        page.key("ArrowLeft")
        page.wait("document.activeElement.id === 'tab-chat' && document.getElementById('live').hidden")
        # The panel: opened, closed, and back where one was.
        page.run("document.getElementById('open-settings').focus()")
        page.key("Enter")
        page.wait("document.getElementById('settings').open && "
                  "document.getElementById('settings').contains(document.activeElement)")
        page.key("Escape")
        page.wait("!document.getElementById('settings').open && document.activeElement.id === 'open-settings'")
        # The list.
        page.run("document.querySelector('.side .open').focus()")
        page.key("F2")
        page.wait("document.activeElement.className === 'rename'")
        page.type("Sums")
        page.key("Enter")
        page.wait("document.activeElement.textContent === 'Sums' && document.activeElement.className === 'open'")
        page.key("n", ALT)
        page.wait("document.querySelector('.greeting') && document.activeElement.id === 'input'")
        page.run("document.querySelector('.side .open').focus()")
        page.key("Delete")
        page.wait("document.querySelectorAll('.side li').length === 0")

    def test_names_for_those_who_do_not_see(self):
        page = self.open()
        self.ask(page, "What is 3 + 4?")
        nameless = """[...document.querySelectorAll('button, input, textarea, select, [role=tabpanel], dialog')].filter((e) =>
            !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim() || e.getAttribute('aria-labelledby')))
            .map((e) => e.outerHTML)"""
        self.assertEqual(page.run(nameless), [])
        self.assertRegex(page.wait("document.getElementById('said').innerText"), "The answer is complete, .* tokens/s")
        page.set_dark(False, reduced=True)
        moving = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).animationName !== 'none').length"
        self.assertEqual(page.run(moving), 0)

    def test_dark_and_light(self):
        def luminance(colour):
            parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
            return sum(w * (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4) for w, p in zip((0.2126, 0.7152, 0.0722), parts))

        def colours(names):
            return page.run("""(() => { const probe = document.body.appendChild(document.createElement('i')); const out = %s.map((name) => {
                probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; }); probe.remove(); return out; })()""" % json.dumps(names))

        def check(dark):
            ground = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
            self.assertEqual(ground < 0.2, dark)
            pairs = [(front, back, 4.5) for front in ("text", "quiet") for back in ("ground", "surface", "sunk", "tint")]
            pairs += [("accent", "surface", 4.5), ("on-accent", "accent", 4.5), ("wrong", "surface", 4.5), ("text", "wrong-tint", 4.5),
                      ("second", "surface", 3), ("strong-line", "surface", 3), ("text", "raised", 4.5), ("quiet", "code", 4.5)]
            for front, back, least in pairs:
                a, b = sorted(map(luminance, colours([front, back])))
                self.assertGreaterEqual((b + 0.05) / (a + 0.05), least, (front, back, dark))
        page = self.open(dark=True)
        check(True)
        page.set_dark(False)
        check(False)
        for name, dark in (("light", False), ("dark", True)):
            page.click("#theme")
            page.wait(f"document.getElementById('theme').title.endsWith('{name}')")
            page.set_dark(not dark)  # what was chosen counts
            check(dark)
        page.reload()
        check(True)
        page.click("#theme")
        check(False)

    def test_phone(self):
        page = self.open(width=390, height=844, phone=True)
        page.wait("document.getElementById('model').textContent.includes('demo')")
        fits = "document.documentElement.scrollWidth <= innerWidth && document.getElementById('scroll').scrollWidth <= innerWidth"
        page.click("#input")
        page.type("What is 17 + 25?")
        page.key("Enter")
        self.assertTrue(page.run("document.getElementById('input').value.endsWith('\\n')"))  # this keyboard has no Shift+Enter
        page.click("#send")
        page.wait(IDLE)
        self.assertTrue(page.run(fits))
        page.picture("phone-light")
        page.click("#menu")
        page.wait("document.getElementById('menu').getAttribute('aria-expanded') === 'true' && "
                  "document.getElementById('side').getBoundingClientRect().x === 0")
        page.picture("phone-list")
        page.click("#new")
        page.wait("document.getElementById('menu').getAttribute('aria-expanded') === 'false' && "
                  "document.querySelector('.greeting')")
        self.assertTrue(page.run(fits))
        page.click("#menu")
        page.wait("document.getElementById('side').getBoundingClientRect().x === 0")
        page.click(".side .open")
        page.wait("document.querySelector('.answer')")
        page.click("#open-settings")
        self.assertTrue(page.run("document.getElementById('settings').getBoundingClientRect().width <= innerWidth"))
        page.picture("phone-settings")
        page.click("#close-settings")
        page.set_dark(True)
        page.picture("phone-dark")
        page.click("#tab-live")
        page.wait("document.querySelectorAll('.chart').length === 5")
        self.assertTrue(page.run(f"{fits} && document.getElementById('live').scrollWidth <= innerWidth"))
        page.picture("phone-live")
        small = """[...document.querySelectorAll('button, select, input')].filter((e) => e.offsetParent && e.getBoundingClientRect().height < 24)
            .map((e) => e.outerHTML)"""
        self.assertEqual(page.run(small), [])

    # ---- with a server that says what is wanted

    def test_stop_cancels(self):
        stand = self.stand()
        gone = []

        def script(handler):
            handler.begin()
            handler.raw(": queued\n\n")
            handler.delta(reasoning_content="A thought.")
            handler.delta(content="It begins")
            gone.append(handler.gone())
        for press in (lambda: page.click("#stop"), lambda: page.key("Escape")):
            stand.scripts.append(script)
            page = self.open(stand.url)
            page.fill("#input", "Go on for ever")
            page.key("Enter")
            page.wait("document.querySelector('.answer > .markdown')?.innerText === 'It begins' && "
                      "!document.getElementById('stop').hidden")
            self.assertTrue(page.run("document.querySelector('.answer').getAttribute('aria-busy') === 'true' && "
                                     "document.getElementById('send').hidden"))
            press()
            page.wait(f"{IDLE} && document.querySelector('.answer .end-note').innerText.includes('You stopped this answer')")
            page.wait("document.activeElement.id === 'input'")
        while len(gone) < 2:
            threading.Event().wait(0.01)
        self.assertEqual(gone, [True, True])
        page.reload()
        self.assertEqual(self.answers(page), ["It begins"])
        # What was stopped is part of what follows.
        stand.say("More.")
        self.ask(page, "And?")
        self.assertEqual([m["role"] for m in stand.bodies[-1]["messages"]], ["user", "assistant", "user"])
        self.assertEqual(stand.bodies[-1]["messages"][1], {"role": "assistant", "content": "It begins", "reasoning_content": "A thought."})

    def test_failures_in_words(self):
        stand = self.stand()
        stand.health = (503, {"status": "loading", "phase": "loading weights", "progress": {"done": 1, "total": 4}})
        page = self.open(stand.url, refusals=True)
        note = "document.querySelector('.answer:last-child .end-note')?.innerText ?? ''"
        self.assertIn("loading weights, 25 %", page.wait("document.getElementById('banner').innerText"))
        stand.health = (200, {"status": "ok"})
        page.wait("document.getElementById('banner').hidden && "
                  "document.getElementById('model').textContent.includes('scripted')")
        stand.refuse(503, "2 requests are being answered or waiting, more are not taken", [("retry-after", "7")])
        self.ask(page, "Hello")
        words = page.wait(note)
        self.assertIn("wait for 7 seconds", words)
        self.assertIn("2 requests are being answered", words)
        page.picture("busy-light")
        stand.refuse(400, "temperature is 11, wanted 0 to 10", param="temperature")
        page.click(".end-note button:last-child")
        page.wait(f"({note}).includes('temperature is 11')")
        page.click(".end-note button")
        page.wait("document.getElementById('settings').open && "
                  "document.activeElement.id === 's-temperature' && "
                  "document.activeElement.getAttribute('aria-invalid') === 'true'")
        page.key("Escape")
        stand.refuse(400, "too long", code="context_length_exceeded", param="messages")
        page.click(".end-note button:last-child")
        page.wait(f"({note}).includes('context of 1,000 tokens')")
        stand.refuse(500, "the request failed")
        page.click(".answer:last-child [aria-label='Answer again']")
        page.wait(f"({note}).includes('status 500')")

        seen = threading.Event()

        def cut(handler):
            handler.begin()
            handler.delta(content="Half an")
            seen.wait(PATIENCE)
            handler.connection.shutdown(socket.SHUT_RDWR)
        stand.scripts.append(cut)
        page.click(".end-note button:last-child")
        page.wait("document.querySelector('.answer > .markdown').innerText === 'Half an'")
        seen.set()
        page.wait(f"({note}).includes('connection was lost')")
        self.assertEqual(self.answers(page), ["Half an"])

        def broken_off(handler):
            handler.begin()
            handler.raw('data: {"error": {"message": "the logits are not finite", "type": "internal_server_error"}}\n\ndata: [DONE]\n\n')
            handler.raw("")
        stand.scripts.append(broken_off)
        page.click(".end-note button:last-child")
        page.wait(f"({note}).includes('logits are not finite')")
        stand.close()
        page.click(".end-note button:last-child")
        page.wait(f"({note}).includes('does not answer')")
        page.wait("document.getElementById('banner').innerText.includes('goes on trying')")
        # Only what said something is a version.
        self.assertEqual(page.text(".answer .versions").strip(), "2 / 2")

    def test_answers_are_text(self):
        evil = ("<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) [b](data:text/html,x)\n\n"
                "# <b>Heading</b>\n\n[good](https://example.com/?a=1&b=2) and https://example.com/x.\n\n"
                "`<i>code</i>` &lt; **bold *both*** ~~gone~~ 2*3*4 a_b_c")
        stand = self.stand()
        page = self.open(stand.url)
        stand.say(evil, 3)
        self.ask(page, "Be evil")
        inside = "document.querySelector('.answer > .markdown')"
        self.assertEqual(page.run(f"{inside}.querySelectorAll('img, script, b, i, iframe').length"), 0)
        self.assertEqual(page.run(f"[...{inside}.querySelectorAll('a')].map((a) => a.href)"),
                         ["https://example.com/?a=1&b=2", "https://example.com/x"])
        shown = page.text(".answer > .markdown")
        for words in ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "[a](javascript:alert(3))", "<b>Heading</b>",
                      "<i>code</i> &lt; bold both gone 2*3*4 a_b_c"):
            self.assertIn(words, shown)
        self.assertEqual(page.run(f"[...{inside}.querySelectorAll('h2, code, strong, strong em, del')].map((e) => e.textContent)"),
                         ["<b>Heading</b>", "<i>code</i>", "bold both", "both", "gone"])

    def test_markdown_is_the_same_however_it_comes(self):
        text = LONG_ANSWER
        stand = self.stand()
        page = self.open(stand.url)
        self.browser.call("Browser.grantPermissions", origin=stand.url, browserContextId=page.context,
                          permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        looks = set()
        for cut in (1, 5, 64, len(text)):
            stand.say(text, cut)
            page.run("document.getElementById('new').click()")
            self.ask(page, "How do I keep the last values?")
            looks.add(page.run("document.querySelector('.answer > .markdown').innerHTML"))
        page.reload()
        looks.add(page.wait("document.querySelector('.answer > .markdown').innerHTML"))
        self.assertEqual(len(looks), 1, looks)
        kinds = """['h3', 'ol > li', 'ul ul > li', 'table td', 'blockquote', 'hr', 'pre', 'strong', 'em'].map(
            (kind) => document.querySelectorAll(`.answer > .markdown ${kind}`).length)"""
        self.assertEqual(page.run(kinds), [1, 3, 2, 6, 1, 1, 2, 2, 1])
        page.click(".code [aria-label='Copy the code']")
        copied = page.wait("navigator.clipboard.readText()")
        self.assertEqual(copied, re.search(r"```cpp\n(.*?)\n```", text, re.S).group(1))
        page.click(".answer [aria-label='Copy the answer']")
        page.wait(f"navigator.clipboard.readText().then((text) => text === {json.dumps(text)})")
        page.run("document.getElementById('scroll').scrollTop = 0")
        page.picture("code-light")
        page.set_dark(True)
        page.picture("code-dark")
        page.run("document.getElementById('scroll').scrollTop = 1e6")
        page.picture("code-end-dark")

    def test_what_is_kept_may_be_broken(self):
        page = self.open()
        page.run("""(() => {
            localStorage.setItem('fourfold.conversations', JSON.stringify([{id: 'a', title: 'Broken'}, 5, null, {id: 7}]));
            localStorage.setItem('fourfold.conversation.a', '{"id": "a", "nodes": {"root": {"children": ["x"]}}}');
            localStorage.setItem('fourfold.current', '"a"');
            localStorage.setItem('fourfold.theme', '[]');
            localStorage.setItem('fourfold.settings', '{{');
        })()""")
        page.reload()
        page.click(".side .open")
        page.wait("document.getElementById('toast').innerText.includes('cannot be read') && "
                  "document.querySelectorAll('.side li').length === 0")
        self.ask(page, "What is 3 + 4?")
        self.assertIn("7", self.answers(page)[0])


LONG_ANSWER = """## A ring buffer

You want a container that **never allocates** while it runs. Three things decide its shape:

1. The capacity is a power of two, so that an index is `position & (N - 1)`.
2. Writers and readers each have a *counter* that only grows.
3. It is full when they are `N` apart:
   - nothing is overwritten,
   - `push` says `false`.

```cpp
template <typename T, size_t N>
class Ring {
  static_assert((N & (N - 1)) == 0, "a power of two");

 public:
  bool push(const T& value) {
    if (head_ - tail_ == N) return false;
    slots_[head_++ & (N - 1)] = value;
    return true;
  }

  std::optional<T> pop() {
    if (head_ == tail_) return std::nullopt;
    return slots_[tail_++ & (N - 1)];
  }

 private:
  std::array<T, N> slots_{};
  uint64_t head_ = 0, tail_ = 0;  // they never wrap within a lifetime, and their difference is right even if they did
};
```

> Between two threads the counters must be atomic: `head_` is released by the writer and acquired by the reader.

### What it costs

| operation | time | allocations |
|---|---:|---|
| `push` | O(1) | none |
| `pop` | O(1) | none |

---

- Use it like this:
  - make it once,
  - **keep** it.

```sh
g++ -std=c++20 -O2 ring.cpp && ./a.out
```
"""


if __name__ == "__main__":
    unittest.main()
