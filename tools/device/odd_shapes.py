"""Draws models of unusual shapes and compares their logits on a GPU with the CPU reference; see odd_shapes.sh.

LAYER and ELEMENT are several times what the same weights in fp32 and in bf16 differ by (odd_models.py).

Several requests at once have their answers chosen by the device; the reference then gets prompt and answer of some of them,
and says what the log-probabilities of the chosen tokens and of the next best ones are. A second batch of the same requests,
in another order and with another number of them at a time, must say the same as the first of all of them.
"""
import array
import concurrent.futures
import contextlib
import fcntl
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time

from odd_models import (EXPERTS, HEADS, MOST_PARAMETERS, SEED, Failure, Refused, deal, described, draw, finish_checkpoint,
                        has_attention, parameters, read_header, spell, spelled, splits_in_two)

FOURFOLD = os.environ["FOURFOLD"]
OUT = pathlib.Path(sys.argv[1])
DEVICE = os.environ.get("DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"
APART = os.environ.get("RANKS_APART", "") not in ("", "0")
COUNT = int(os.environ.get("COUNT", "24"))
SECONDS = float(os.environ.get("SECONDS_ALL", "480"))
KEEP = os.environ.get("KEEP", "") not in ("", "0")
PROCESSORS = len(os.sched_getaffinity(0))
JOBS = int(os.environ.get("JOBS", max(1, min(6, PROCESSORS // 3))))
THREADS = str(max(1, PROCESSORS // JOBS))

LIMIT = float(os.environ.get("LIMIT", "1e-3"))
FP8_CACHE_LIMIT = 2e-2  # an e4m3 number is off by up to a sixteenth
GAP = 0.05              # of the reference's logits: between closer ones, with what rounding moves them by, either is right
LAYER = 0.03            # part of what a layer adds to the residual that may be wrong, mean of the rows
ELEMENT = 0.3           # one element of that, and one logit, as part of its row's root mean square
TOKENS = 150
ANSWER = 24
REQUESTS = [5, 20, 40, 70]
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 127, 128, 129, 190]  # of prompts: around what is cut
LONGEST = 640           # prompt and answer
FORCED = 500            # tokens of requests that the reference computes, beside the longest two and the shortest
OTHERS = 4              # log-probabilities beside that of the chosen token


# ---- comparing

def read_logits(path):
    data = path.read_bytes()
    header, base = read_header(data)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = array.array("f")
        values.frombytes(data[base + begin:base + end])
        columns = entry["shape"][1]
        tensors[name] = [values[i:i + columns] for i in range(0, len(values), columns)]
    return tensors


def log_sum(row):
    largest = max(row)
    return largest + math.log(sum(math.exp(x - largest) for x in row))


def spread(mean_kl):
    """What two logits may be apart by where the mean KL is this: four times what rounding moves one by."""
    return 4 * math.sqrt(2 * max(0.0, min(mean_kl, LIMIT)))


def scale_of(row):
    return max(1.0, rms(row) / 2)  # logits of a model with a head of its own have an rms of 2


def gap_of(row, token):
    return (max(row) - row[token]) / scale_of(row)


def off_at_most(limit, rows):
    """Root mean square of what log-probabilities of so many rows may be off by where the mean KL may be `limit`: the square
    of what they are off by is twice the KL. For many rows that is what their mean is held to, for one four times as much."""
    return math.sqrt(2 * limit) * (1 + 3 / math.sqrt(rows))


def rms(row):
    return math.sqrt(sum(x * x for x in row) / len(row))


class Difference:
    """Of two lists of rows of logits: KL, rows whose best token is another one although the gap is wide, worst logit."""

    def __init__(self, want, got):
        self.rows = len(want)
        self.mean = self.worst = self.logit = 0.0
        gaps = []
        for x, y in zip(want, got):
            if not all(map(math.isfinite, y)):
                self.mean = self.worst = self.logit = math.inf
                break
            from_x, from_y = log_sum(x), log_sum(y)
            kl = sum(math.exp(a - from_x) * ((a - from_x) - (b - from_y)) for a, b in zip(x, y))
            self.mean += kl / self.rows
            self.worst = max(self.worst, kl)
            gaps.append(gap_of(x, max(range(len(y)), key=y.__getitem__)))
            self.logit = max(self.logit, max(abs(a - b) for a, b in zip(x, y)) / rms(x))
        self.others = sum(gap > GAP + spread(self.mean) for gap in gaps)

    def __str__(self):
        return (f"mean KL {self.mean:.2e}, largest {self.worst:.2e}, logit off by {self.logit:.4f} of rms, {self.others} other "
                f"choices in {self.rows} rows")


class Answer:
    """What the device said: tokens, and by row (that of the token before) log-probabilities of the chosen and other tokens."""

    def __init__(self, prompt, echo, choice):
        logprobs = choice["logprobs"]
        tokens = spelled("".join(logprobs["tokens"]))
        echoed = len(prompt) if echo else 0
        if tokens[:echoed] != prompt[:echoed]:
            raise Failure(f"{tokens[:echoed]} is echoed, wanted {prompt}")
        self.tokens = tokens[echoed:]
        self.all = prompt + self.tokens
        self.begin = len(prompt) - 1  # the row that chose the first token
        self.rows = {}
        for i, top in enumerate(logprobs["top_logprobs"], len(prompt) - echoed - 1):
            if i >= 0:
                found = {spelled(text)[0]: value for text, value in top.items()}
                if self.all[i + 1] not in found or not all(v is not None and math.isfinite(v) for v in found.values()):
                    raise Failure(f"log-probabilities after token {i} of {len(self.all)} are {top}")
                self.rows[i] = found


class Reference:
    """A row of the reference's logits."""

    def __init__(self, row):
        self.row, self.sum, self.scale = row, log_sum(row), scale_of(row)

    def off(self, found):
        return [abs(value - (self.row[token] - self.sum)) / self.scale for token, value in found.items()]


class Off:
    """What log-probabilities are off by: root mean squares of rows, of requests and of all together."""

    def __init__(self):
        self.squares = {}  # of each row, by request
        self.beyond = {}  # by request: rows that are beyond what one may be off by, where that is known
        self.rows, self.worst = 0, (0.0, 0, 0)

    def add(self, request, row, off, limit=math.inf):
        square = sum(x * x for x in off) / len(off)
        if not math.sqrt(square) <= off_at_most(limit, 1):
            self.beyond.setdefault(request, []).append((row, math.sqrt(square)))
        self.squares.setdefault(request, []).append(square)
        self.rows += 1
        self.worst = max(self.worst, (math.sqrt(square), request, row))

    def mean(self):
        return math.sqrt(sum(map(sum, self.squares.values())) / max(1, self.rows))

    def wrong(self, limit, one_by_one):
        """What is beyond the limit; `one_by_one`: the worst request and the worst row as well."""
        found = [(self.mean(), self.rows, f"{self.rows} rows are")]
        if one_by_one:
            found.append(max(((math.sqrt(sum(x) / len(x)), len(x), f"{len(x)} rows of request {i} are")
                              for i, x in self.squares.items()), key=lambda r: r[0] / off_at_most(limit, r[1])))
            found.append((self.worst[0], 1, f"row {self.worst[2]} of request {self.worst[1]} is"))
        return [f"{what} off by {mean:.4f}, wanted at most {off_at_most(limit, rows):.4f}" for mean, rows, what in found
                if not mean <= off_at_most(limit, rows)]

    def __str__(self):
        worst, request, row = self.worst
        return (f"off by {self.mean():.4f}, row {row} of request {request} by {worst:.4f}, {self.rows} rows of "
                f"{len(self.squares)} requests")


def added(before, after):
    return [[b - a for a, b in zip(x, y)] for x, y in zip(before, after)]


def off(want, got):
    """Of a row: norm of the difference over the norm; largest difference over the root mean square."""
    size, difference = max(rms(want), 1e-9), [x - y for x, y in zip(want, got)]
    return rms(difference) / size, max(map(abs, difference)) / size


def find_embeddings(folder):
    """The shard, its bytes, where the matrix begins, its columns and their type."""
    for shard in sorted(folder.glob("*.safetensors")):
        data = shard.read_bytes()
        header, base = read_header(data)
        for name, entry in header.items():
            if name.endswith("embed_tokens.weight"):
                return shard, data, base + entry["data_offsets"][0], entry["shape"][1], entry["dtype"]
    raise Failure("no embedding in the checkpoint")


def read_embeddings(folder, tokens):
    _, data, begin, columns, dtype = find_embeddings(folder)
    if dtype == "BF16":
        words = [struct.unpack_from(f"<{columns}H", data, begin + t * columns * 2) for t in tokens]
        return [struct.unpack(f"<{columns}f", struct.pack(f"<{columns}I", *(w << 16 for w in row))) for row in words]
    code, size = ("e", 2) if dtype == "F16" else ("f", 4)
    return [struct.unpack_from(f"<{columns}{code}", data, begin + t * columns * size) for t in tokens]


@contextlib.contextmanager
def rounded_embeddings(folder, tokens, rng):
    """The checkpoint while each element of these tokens' rows is a unit of bf16 more, less, or what it was."""
    shard, data, begin, columns, dtype = find_embeddings(folder)
    size, high, unit = {"BF16": (2, 0, 1), "F16": (2, 0, 8), "F32": (4, 2, 1)}[dtype]
    moved = bytearray(data)
    for t in set(tokens):
        for at in range(begin + t * columns * size + high, begin + (t + 1) * columns * size, size):
            word = struct.unpack_from("<H", data, at)[0]
            if word & 0x7fff > unit:
                struct.pack_into("<H", moved, at, word + unit * rng.choice((-1, 0, 1)))
    shard.write_bytes(moved)
    try:
        yield
    finally:
        shard.write_bytes(data)


class Model:
    def __init__(self, index, deadline):
        self.index, self.deadline = index, deadline
        self.log_path = OUT / f"odd_{index:02}.txt"
        self.folder = OUT / f"odd_{index:02}"
        self.refused = []
        self.problems = []
        self.worst = (-1.0, 0.0, "nothing compared")  # mean KL as part of its limit, mean KL, of what
        self.layer = self.slack = self.measured = 0.0  # measured: mean KL
        self.other_answers = False
        self.answers_off = 0.0
        self.told_apart = math.inf  # the least that an answer is off by from another's reference, as part of what is allowed
        self.shape = "?"
        self.said = []

    def note(self, text):
        with self.log_path.open("a") as log:
            log.write(text + "\n")

    def command(self, *arguments, seconds=150):
        arguments = [FOURFOLD, *map(str, arguments)]
        self.note("$ " + shlex.join(arguments))
        begin = time.monotonic()
        seconds = min(seconds, self.deadline - time.time())
        if seconds < 1:
            raise Failure(f"{arguments[1]}: no time left")
        try:
            done = subprocess.run(arguments, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as late:
            self.note(((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace"))
            raise Failure(f"{arguments[1]}: not done after {seconds:.0f} s: {shlex.join(arguments)}") from None
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        # Plans, lists and answers are long, and only their end says something new.
        self.note(f"{out if len(out) < 4000 else '...' + out[-1000:]}{err}[{done.returncode}, {time.monotonic() - begin:.2f} s]")
        for line in err.splitlines():
            if "warning:" in line:
                (self.problems if "disabled" in line else self.said).append(line.strip())
        if done.returncode != 0:
            message = (err.strip().splitlines() or [f"no message, exit status {done.returncode}"])[-1]
            raise Failure(f"{arguments[1]}: {message} [exit status {done.returncode}]")
        return out

    def attempt(self, step, *arguments):
        """What a step returns; a failure is noted and does not end the others."""
        try:
            return step(*arguments)
        except Failure as failure:
            self.problems.append(str(failure))
            return None

    def make(self):
        rng = random.Random(f"{SEED}/{self.index}")
        experts, heads = deal("experts", EXPERTS, self.index), deal("heads", HEADS, self.index)
        tries = 0
        while True:
            tries += 1
            if tries % 300 == 0:  # too many for this hidden size
                experts, heads = rng.choice(EXPERTS), rng.choice(HEADS)
            o, flags, edits = draw(rng, self.index, experts, heads, not self.refused)
            if not 200_000 <= parameters(o, flags) <= MOST_PARAMETERS:
                continue
            if o["format"] == "fp8-block" and "fused-experts" in flags:
                continue  # gate and up would share a block of 128 rows
            self.options, self.flags, self.edits = o, flags, edits
            self.shape = described(o, flags, edits)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.note(f"== {self.shape}")
            self.mtp = "no-mtp" not in flags
            self.split = splits_in_two(o, flags)
            try:
                self.refusable("generate", self.folder, "--threads", THREADS, *[f"--{n}={v}" for n, v in o.items()],
                               *[f"--{f}" for f in flags])
                finish_checkpoint(self.folder, o, edits, rng)
                self.plan()
                return
            except Refused as refused:
                self.refused.append(f"{refused}: {self.shape}")

    def refusable(self, *arguments):
        """A refusal that says what is wanted is no failure."""
        try:
            self.command(*arguments)
        except Failure as failure:
            if "[exit status 2]" in str(failure) and re.search("wanted|needs a multiple of", str(failure)):
                raise Refused(str(failure)) from None
            raise

    def plan(self):
        """What the GPU would hold and run, without one."""
        for more in [[], ["--tensor-parallel-size", "2"]] if self.split else [[]]:
            card = ["--gpu", os.environ.get("GPU", "h200"), *more]
            self.refusable("plan", "--memory", self.folder, *card, "--max-num-seqs", 4, *(["--draft", 3] if self.mtp else []))
            self.refusable("plan", "--kernels", "--model", self.folder, *card)

    def warm(self):
        """Kernels compiled by all threads; what is not in the store is compiled where it is used, one after the other."""
        for more in [[], ["--tensor-parallel-size", "2"]] if self.split else [[]]:
            self.command("warm", "--model", self.folder, *card_options(), *more, "--threads", THREADS, seconds=200)

    def logits(self, name, *options):
        path = self.folder / f"{name}.safetensors.out"
        mtp = ["--mtp"] if self.mtp and name != "answer" else []
        self.command("logits", self.folder, self.folder / ("answer.json" if name == "answer" else "tokens.json"), path, *mtp,
                     "--threads", THREADS, *options)
        tensors = read_logits(path)
        path.unlink()
        return tensors

    def compare_variant(self, name, limit, *options):
        got = self.logits(name, *options)
        for part in ("logits", "mtp.logits") if self.mtp else ("logits",):
            found = Difference(self.want[part], got[part])
            label = name if part == "logits" else f"{name} mtp"
            self.note(f"{label}: {found}")
            if limit == LIMIT:
                self.slack = max(self.slack, spread(found.mean))
                self.measured = max(self.measured, found.mean)
            if found.mean / limit > self.worst[0]:
                self.worst = (found.mean / limit, found.mean, label)
            # Elements of an fp8 cache are far apart: there only the mean is asked for.
            if not (found.mean < limit and (limit != LIMIT or (found.others == 0 and found.logit < ELEMENT))):
                self.problems.append(f"{label}: {found}; wanted a mean below {limit:g} and a logit below {ELEMENT}")
        if "--hidden" in options:
            self.compare_layers(name, got)

    def compare_layers(self, name, got):
        """What each layer adds to the residual, so that an error is seen where it is made."""
        last_want = last_got = self.embeddings
        for layer in range(self.options["layers"]):
            now_want, now_got = self.want[f"hidden.{layer}"], got[f"hidden.{layer}"]
            rows, elements = zip(*[off(x, y) for x, y in zip(added(last_want, now_want), added(last_got, now_got))])
            last_want, last_got = now_want, now_got
            mean, worst = sum(rows) / len(rows), max(elements)
            kind = "attention" if (layer + 1) % self.options["attention-interval"] == 0 else "delta net"
            text = (f"{name}: layer {layer} ({kind}) adds {mean:.4f} of it wrong, an element of row "
                    f"{elements.index(worst)} by {worst:.4f} of rms")
            self.note(text)
            self.layer = max(self.layer, mean)
            if not (mean < LAYER and worst < ELEMENT):
                self.problems.append(f"{text}; wanted less than {LAYER} and {ELEMENT}")

    def reference_of(self, tokens):
        (self.folder / "answer.json").write_text(json.dumps(tokens))
        return self.logits("answer", "--device", "cpu", "--isa", "reference")["logits"]

    def stretched(self, tokens):
        """Of each row after these tokens: how many times as much as all of them in the mean rounding moves it, by the
        reference with other embeddings. Where a query is at right angles to all keys so far, for one, little is left of
        a sum before it is normed."""
        rng, squares = random.Random(SEED), [0.0] * len(tokens)
        want = self.reference_of(tokens)
        for _ in range(4):
            with rounded_embeddings(self.folder, tokens, rng):
                got = self.reference_of(tokens)
            squares = [s + off(x, y)[0] ** 2 for s, x, y in zip(squares, want, got)]
        mean = max(sum(squares) / len(squares), 1e-30)
        return [math.sqrt(s / mean) for s in squares]

    def answer(self, prompt, draft, device):
        printed = self.command("run", self.folder, "--raw", "--prompt", "".join(map(spell, prompt)), "--temperature", 0,
                               "--max-tokens", ANSWER, "--context", 256, "--json", "--draft", draft, "--threads", THREADS,
                               *device)
        tokens = spelled(json.loads(printed)["content"])
        if len(tokens) != ANSWER:
            raise Failure(f"run --draft {draft}: {len(tokens)} tokens, wanted {ANSWER}")
        # Each token is held to the reference's logits after the same tokens.
        rows = self.reference_of(prompt + tokens)
        gaps = [gap_of(row, token) for row, token in zip(rows[len(prompt) - 1:], tokens)]
        text = f"run --draft {draft}: token {gaps.index(max(gaps))} of the answer is {max(gaps):.3g} below the reference's best"
        self.note(text)
        if max(gaps) > GAP + self.slack:
            self.problems.append(f"{text}, wanted at most {GAP + self.slack:.3g}")
        return tokens

    def draw_requests(self, rng):
        """Prompts, numbers of tokens, and whether the prompt's log-probabilities are asked for. Prompts are beginnings of two
        stems, some with tokens of their own behind: parts of them are cached, and the reference of a stem says what the first
        token after each of its beginnings must be. The first two are the stems as a whole, the third is a single token."""
        def drawn(count):
            return [rng.randrange(self.options["vocab"]) for _ in range(count)]
        stems = [drawn(rng.randrange(260, 420)), drawn(rng.randrange(130, 200))]
        requests = [(stems[0], 24, False), (stems[1], 16, True), (drawn(1), 40, False)]
        for _ in range(deal("requests", REQUESTS, self.index) - len(requests)):
            stem = rng.choice(stems)
            prompt = stem[:rng.choice([*LENGTHS, rng.randrange(1, len(stem))])]
            if rng.random() < 0.3:
                prompt = prompt + drawn(rng.randrange(1, 20))
            requests.append((prompt, rng.choice([1, 2, 7, 16, 24, 32, 48]), rng.random() < 0.1))
        return requests

    def sequences(self, count):
        """So many at once as their recurrent states leave room for, several models being on the card: a state, two dozen
        times with cached ones and those of drafts, in 4 GB."""
        o = self.options
        delta_nets = o["layers"] - o["layers"] // o["attention-interval"]
        state = 4 * delta_nets * o["linear-value-heads"] * o["linear-key-dim"] * o["linear-value-dim"]
        return min(count, max(4, 4_000_000_000 // (24 * max(1, state))))

    def serve(self, name, requests, order, *options):
        """The answers, by the number of the request."""
        asked, answered = self.folder / f"{name}.jsonl", self.folder / f"{name}.out.jsonl"
        answered.unlink(missing_ok=True)  # what is in it would not be computed again
        with asked.open("w") as lines:
            for i in order:
                prompt, count, echo = requests[i]
                body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": OTHERS, "echo": echo}
                lines.write(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
        self.command("batch", asked, answered, self.folder, "--json", "--max-model-len", LONGEST, "--threads", THREADS,
                     *options)
        answers, cached = {}, 0
        for line in answered.read_text().splitlines():
            found = json.loads(line)
            body = found["response"]["body"]
            i = int(found["custom_id"])
            answers[i] = Answer(requests[i][0], requests[i][2], body["choices"][0])
            cached += body["usage"]["prompt_tokens_details"]["cached_tokens"]
            rows = requests[i][1] + (len(requests[i][0]) - 1 if requests[i][2] else 0)
            if len(answers[i].tokens) != requests[i][1] or len(answers[i].rows) != rows:
                raise Failure(f"{name}: request {i}: {len(answers[i].tokens)} tokens and {len(answers[i].rows)} rows of "
                              f"log-probabilities, wanted {requests[i][1]} and {rows}")
        if len(answers) != len(requests):
            raise Failure(f"{name}: {len(answers)} answers to {len(requests)} requests")
        self.note(f"{name}: {len(answers)} requests, {cached} tokens of prompts were cached")
        return answers

    def allowed(self):
        """The KL of answers: four times what the model's logits are off by in pieces, so that a state that is a little wrong
        is seen as well. Logits that are hundreds say little by their KL: hence no less than a quarter of LIMIT."""
        return min(LIMIT, max(LIMIT / 4, 4 * self.measured))

    def compare_answers(self, name, requests, answers, forced, limit):
        """With the reference: of the requests in `forced` all tokens, of the others those that come after a beginning of a
        sequence that was computed for one of them."""
        off, gaps, known, apart = Off(), [], {}, math.inf
        for i in forced:
            whole = answers[i].all
            key = tuple(whole)
            if key not in self.references:
                self.references[key] = [Reference(row) for row in self.reference_of(whole)]
            known[i] = whole, self.references[key]
        for i, answer in answers.items():
            sequences = [known[i]] if i in known else list(known.values())
            for row, found in answer.rows.items():
                # A row depends on the tokens up to it: equal ones have an equal row, whatever request they are of.
                reference = next((rows[row] for whole, rows in sequences if whole[:row + 1] == answer.all[:row + 1]), None)
                if reference is None:
                    continue
                off.add(i, row, reference.off(found), limit)
                if row >= answer.begin:
                    gaps.append((gap_of(reference.row, answer.all[row + 1]), i, row - answer.begin))
        # How far off a wrong row or state would be: each answer with what the reference says in another's place.
        for i in known:
            for j in known:
                if requests[i][0] != requests[j][0]:
                    other = Off()
                    for step in range(min(len(answers[i].tokens), len(answers[j].tokens))):
                        row = answers[i].begin + step
                        other.add(i, row, known[j][1][answers[j].begin + step].off(answers[i].rows[row]))
                    apart = min(apart, other.mean() / off_at_most(limit, other.rows))
        gap, i, step = max(gaps)
        self.note(f"{name}: {off}; token {step} of request {i} is {gap:.3g} below the reference's best; "
                  f"with another request's reference it would be {apart:.1f} times what is allowed, or more")
        self.problems += [f"{name}: {text}" for text in off.wrong(limit, limit <= LIMIT)]
        if limit <= LIMIT:
            for i, rows in off.beyond.items():  # wrong all the same; said to whoever looks for the cause
                stretched = self.stretched(answers[i].all)
                for row, found in rows:
                    self.note(f"{name}: row {row} of request {i} is off by {found:.4f}; rounding moves it "
                              f"{stretched[row]:.1f} times as much as all rows of it in the mean")
            self.answers_off, self.told_apart = max(self.answers_off, off.mean()), min(self.told_apart, apart)
            if gap > GAP + self.slack:
                self.problems.append(f"{name}: token {step} of request {i} is {gap:.3g} below the reference's best, wanted at "
                                     f"most {GAP + self.slack:.3g}")

    def compare_batches(self, name, one, two):
        """Of all requests, up to the token where answers part: there both tokens must be close."""
        off, gap, parted = Off(), 0.0, 0
        scale = sum(scale_of(row) for row in self.want["logits"]) / len(self.want["logits"])
        for i in one:
            for row in sorted(one[i].rows):
                x, y = one[i].rows[row], two[i].rows[row]
                off.add(i, row, [abs(x[t] - y[t]) / scale for t in x if t in y] or [math.inf])
                a, b = one[i].all[row + 1], two[i].all[row + 1]
                if a != b:
                    parted += 1
                    gap = max(gap, *((z[c] - z.get(d, min(z.values()))) / scale for z, c, d in ((x, a, b), (y, b, a))))
                    break
        self.note(f"{name}: {off}; {parted} answers part, at tokens {gap:.3g} apart")
        self.problems += [f"{name}: {text}" for text in off.wrong(2 * self.allowed(), True)]  # both may be off
        if gap > GAP + self.slack:
            self.problems.append(f"{name}: tokens where answers part are {gap:.3g} apart, wanted at most "
                                 f"{GAP + self.slack:.3g}")

    def check_batches(self, rng, device):
        """Requests at the same time: with room for all of them, and again with less, with drafts where there is a head."""
        begin = time.monotonic()
        requests = self.draw_requests(rng)
        count, self.references = len(requests), {}
        order = [0, *rng.sample(range(1, count), count - 1)]  # the others come while the long prompt is computed
        forced, tokens = [0, 1, 2], 0
        for i in order:
            size = len(requests[i][0]) + requests[i][1]
            if i > 2 and len(forced) < 11 and tokens + size <= FORCED:
                forced.append(i)
                tokens += size
        most = self.sequences(count)
        batches = []
        for name, draft, sequences, room, steps in (
                ("batch", 0, most, most, 512),
                ("batch with drafts" if self.mtp else "second batch", rng.choice([1, 2, 3]) if self.mtp else 0,
                 min(most, rng.choice([5, 16, 33, 64])), rng.choice([2, most, most]), rng.choice([100, 256, 2048]))):
            try:
                answers = self.serve(name, requests, order, *device, "--draft", draft, "--max-num-seqs", sequences,
                                     "--max-num-batched-tokens", steps, "--kv-cache-tokens", room * LONGEST)
                batches.append(answers)
                self.compare_answers(name, requests, answers, forced, self.allowed())
            except Failure as failure:
                self.problems.append(str(failure))
            order = rng.sample(order, count)
        if len(batches) == 2:
            self.compare_batches("both batches", *batches)
        if not ON_CPU and has_attention(self.options, self.flags) and self.index % 2 == 0:
            some = requests[1:12]
            answers = self.serve("batch, fp8 cache", some, range(len(some)), *device, "--draft", 2 if self.mtp else 0,
                                 "--max-num-seqs", self.sequences(len(some)), "--kv-cache-tokens", len(some) * LONGEST,
                                 "--kv-cache-dtype", "fp8")
            self.compare_answers("batch, fp8 cache", some, answers, range(min(4, len(some))), FP8_CACHE_LIMIT)
        self.note(f"batches: {len(self.references)} sequences by the reference, {sum(map(len, self.references))} tokens; "
                  f"{time.monotonic() - begin:.1f} s")
        self.references = None

    def check(self):
        o, rng = self.options, random.Random(f"{SEED}/{self.index}/tokens")
        tokens = [rng.randrange(o["vocab"]) for _ in range(TOKENS)]
        (self.folder / "tokens.json").write_text(json.dumps(tokens))
        self.embeddings = read_embeddings(self.folder, tokens)
        self.want = self.logits("reference", "--device", "cpu", "--isa", "reference", "--hidden")
        device = ["--device", DEVICE]
        if not ON_CPU:
            self.attempt(self.warm)
        few, more = rng.randrange(2, 17), rng.randrange(17, 100)
        # Asked for hidden states, a backend does not add and norm in one operation; so with them and without.
        variants = [("whole", LIMIT, "--chunk", 256), ("one by one", LIMIT, "--chunk", 1),
                    (f"by {few}", LIMIT, "--chunk", few, "--hidden"), (f"by {more}", LIMIT, "--chunk", more, "--hidden")]
        if not ON_CPU and has_attention(o, self.flags):
            variants.append(("fp8 cache", FP8_CACHE_LIMIT, "--chunk", more, "--kv-cache-dtype", "fp8"))
        for name, limit, *options in variants:
            self.attempt(self.compare_variant, name, limit, *device, *options)
        if self.split:
            card = DEVICE if ON_CPU or APART or ":" in DEVICE else DEVICE + ":0"
            ranks = ["--device", card, "--tensor-parallel-size", 2]
            with (OUT / "odd_ranks.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # ranks wait for each other on a card: one such model at a time
                self.attempt(self.compare_variant, "2 ranks", LIMIT, *ranks, "--chunk", more)
                if "experts" in o and o["experts"] > 1:
                    self.attempt(self.compare_variant, "2 ranks by expert", LIMIT, *ranks, "--enable-expert-parallel",
                                 "--chunk", few)
        prompt = [rng.randrange(26) for _ in range(rng.randrange(1, 60))]
        answers = [self.attempt(self.answer, prompt, draft, device) for draft in ([0, 3] if self.mtp else [0])]
        if len(answers) == 2 and None not in answers and answers[0] != answers[1]:
            self.note(f"other tokens with drafts: {answers[0]} and {answers[1]}")
            self.other_answers = True
        requests = random.Random(f"{SEED}/{self.index}/requests")
        self.attempt(self.check_batches, requests, ranks if APART and self.split else device)

    def run(self):
        begin = time.monotonic()
        self.log_path.unlink(missing_ok=True)
        try:
            self.make()
            self.check()
        except Failure as failure:
            self.problems.append(str(failure))
        except Exception as error:  # a mistake in this script is a failure of the model's check, and the others go on
            self.problems.append(f"{type(error).__name__}: {error}")
        if not KEEP and not self.problems:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.note("\n".join(["problems:", *self.problems]) if self.problems else "ok")
        _, mean, label = self.worst
        self.want = self.embeddings = None
        lines = [f"{self.index:3} {'FAIL' if self.problems else 'ok  '} {self.shape}: worst KL {mean:.1e} ({label}), layer off by "
                 f"{self.layer:.4f}, answers at once by {self.answers_off:.4f}"
                 f"{', other answer with drafts, within the gap' if self.other_answers else ''}, {time.monotonic() - begin:.1f} s"]
        lines += [f"      {problem[:400]}" for problem in self.problems]
        lines += [f"      said: {text[:300]}" for text in sorted(set(self.said))]
        lines += [f"      refused: {text[:300]}" for text in self.refused]
        print("\n".join(lines), flush=True)
        return self


def card_options():
    """The card as the planner names it, or its architecture."""
    try:
        found = subprocess.run(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"], capture_output=True,
                               text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise Failure(f"nvidia-smi: {error}") from None
    name, capability = found.rsplit(",", 1)
    for part, card in (("H200", "h200"), ("H100", "h100"), ("B200", "b200"), ("A100", "a100"), ("L40S", "l40s")):
        if part in name:
            return ["--gpu", card]
    digits = capability.strip().replace(".", "")
    return ["--arch", f"sm_{digits}{'a' if int(digits) >= 90 else ''}"]


def run_one(number, deadline):
    return Model(number, deadline).run()


def main():
    begin = time.monotonic()
    numbers = [int(n) for n in os.environ.get("ONLY", "").split()] or range(COUNT)
    with concurrent.futures.ProcessPoolExecutor(JOBS) as pool:
        models = list(pool.map(run_one, numbers, [time.time() + SECONDS] * len(numbers)))
    (OUT / "odd_ranks.lock").unlink(missing_ok=True)
    failed = [m for m in models if m.problems]
    worst = max(models, key=lambda m: m.worst[0])
    print(f"{len(models)} models of seed {SEED} on {DEVICE}: {len(models) - len(failed)} ok, {len(failed)} failed"
          f"{' (' + ' '.join(str(m.index) for m in failed) + ')' if failed else ''}; {sum(len(m.refused) for m in models)} shapes refused "
          f"and drawn again; worst mean KL {worst.worst[1]:.1e} (model {worst.index}, {worst.worst[2]}), layer off by "
          f"{max(m.layer for m in models):.4f}, answers at once by {max(m.answers_off for m in models):.4f} (another's "
          f"reference: {min(m.told_apart for m in models):.1f} times what is allowed, or more); {time.monotonic() - begin:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
