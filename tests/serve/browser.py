"""Headless Chromium, driven through the DevTools protocol over a pair of pipes: no port, and nothing to install but Chromium."""
import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

PATIENCE = 60  # seconds for what is only a matter of time
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Delete": 46,
        "F2": 113, " ": 32}
ALT, SHIFT = 1, 8


class Browser:
    def __init__(self):
        binary = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
        if binary is None:
            raise RuntimeError("there is no Chromium: packages/apt-ci.txt names the package")
        self.directory = tempfile.TemporaryDirectory(prefix="fourfold-browser-")
        to_read, self.to = os.pipe()
        self.out, from_write = os.pipe()
        # Chromium reads descriptor 3 and writes 4, so ours must be neither.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, from_write)]
        os.close(to_read)
        os.close(from_write)
        self.log = open(os.path.join(self.directory.name, "log"), "wb")
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}', binary, "--headless", "--remote-debugging-pipe",
             "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--hide-scrollbars",
             f"--user-data-dir={self.directory.name}/profile"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=self.log, env={**os.environ, "HOME": self.directory.name})
        for end in ends:
            os.close(end)
        self.numbers = itertools.count(1)
        self.answers, self.pages = {}, {}
        self.lock, self.changed = threading.Lock(), threading.Condition()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        rest = b""
        while piece := os.read(self.out, 1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                with self.changed:
                    if "id" in message:
                        self.answers[message["id"]] = message
                    elif page := self.pages.get(message.get("sessionId")):
                        page.event(message["method"], message["params"])
                    self.changed.notify_all()

    def call(self, method, session=None, **params):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        with self.lock:
            while data:
                data = data[os.write(self.to, data):]
        with self.changed:
            if not self.changed.wait_for(lambda: number in self.answers, PATIENCE):
                raise TimeoutError(method)
            answer = self.answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def page(self, url, **options):
        return Page(self, url, **options)

    def close(self):
        self.call("Browser.close")
        self.process.wait(PATIENCE)
        self.log.close()
        os.close(self.to)
        self.directory.cleanup()


class Page:
    """A tab with storage of its own. What goes wrong in it is gathered in `complaints`, the addresses it asks in `asked`."""

    def __init__(self, browser, url, width=1280, height=800, phone=False, dark=False):
        self.browser, self.url = browser, url
        self.complaints, self.asked = [], []
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.set_dark(dark)
        self.call("Page.addScriptToEvaluateOnNewDocument", source="""
            addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));""")
        self.go(url)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def event(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.complaints.append(("exception", json.dumps(params["exceptionDetails"])[:2000]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(("console", json.dumps(params["args"])[:2000]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append((params["entry"]["source"], params["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def set_dark(self, dark, reduced=False):
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"}])

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def reload(self):
        self.run("window.old = true")
        self.call("Page.reload")
        self.wait("!window.old && document.readyState === 'complete'")

    def run(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {json.dumps(result['exceptionDetails'])[:1000]}")
        return result["result"].get("value")

    def wait(self, expression):
        """The value of an expression once it is true, as JavaScript has it."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                value = self.run(expression)
            except RuntimeError as error:  # between two documents
                value, found = None, error
            else:
                found = value
            if value not in (None, False, 0, ""):
                return value
            if time.monotonic() > end:
                raise AssertionError(f"never: {expression}; found {found}; {self.complaints}; the page says: {self.text('body')[:3000]}")
            time.sleep(0.02)

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def place(self, selector):
        """The middle of an element that can be hit there."""
        found = self.wait("""(() => {
            const element = document.querySelector(%s);
            if (!element || element.disabled) return null;
            element.scrollIntoView({block: 'nearest'});
            const box = element.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            const hit = document.elementFromPoint(x, y);
            return hit && (element.contains(hit) || hit.contains(element)) ? {x, y} : null;
        })()""" % json.dumps(selector))
        return found["x"], found["y"]

    def click(self, selector):
        x, y = self.place(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector, share):
        x, y, width = self.run("""(() => {
            const box = document.querySelector(%s).getBoundingClientRect();
            return [box.x, box.y + box.height / 2, box.width];
        })()""" % json.dumps(selector))
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + share * width, y=y)

    def key(self, key, modifiers=0):
        code = KEYS.get(key) or ord(key.upper())
        names = {"key": key, "code": key if key in KEYS else "Slash" if key == "/" else f"Key{key.upper()}"}
        text = "\r" if key == "Enter" else key if len(key) == 1 and not modifiers & ALT else ""
        more = {"text": text} if text else {}
        names |= {"windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **names, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def fill(self, selector, text):
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.type(text)

    def picture(self, name):
        """A screenshot, where FOURFOLD_SCREENSHOTS names a folder."""
        folder = os.environ.get("FOURFOLD_SCREENSHOTS")
        if folder:
            data = self.call("Page.captureScreenshot", format="png")["data"]
            with open(os.path.join(folder, name + ".png"), "wb") as file:
                file.write(base64.b64decode(data))

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        del self.browser.pages[self.session]
