"""Trains the demo model on one GPU within a time budget and measures it.

  python3 tools/demo/train.py --out DIR --seconds 420                      from scratch
  python3 tools/demo/train.py --out DIR --resume DIR --peak 0.6 --anneal --seconds 140   go on with fresh data, learning rates falling from 0.6 of theirs
  python3 tools/demo/train.py --out DIR --resume DIR --qat --seconds 300   the same with weights fake-quantised to NVFP4 (straight-through)

Writes DIR/weights_{0,1,2}.safetensors (bf16, gates and norms fp32), DIR/results.json (exact match per task in bf16 and NVFP4, acceptance of the
MTP draft, activation ranges) and DIR/log.txt. tools/demo/pack.py turns them into checkpoints.
"""
import argparse
import copy
import json
import multiprocessing
import os
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import data
from conversations.rendering import prompt_text
from conversations.scoring import correct
from network import model as demo

ROW = 1024
TOKENIZER = None
PROMPT_WEIGHT = 0.05


def load_tokenizer(path):
    global TOKENIZER
    TOKENIZER = Tokenizer.from_file(path)


def make_rows(job):
    """One worker's share, (seed, conversations, split): generates conversations and packs them into rows of ROW + 2 tokens.
    Returns tokens int16, document int16, kind uint8 (0 padding, 1 read, 2 written by the model)."""
    seed, count, split = job
    pairs = list(data.texts(seed, split, count))
    prompts = TOKENIZER.encode_batch_fast([p for p, _ in pairs])
    answers = TOKENIZER.encode_batch_fast([c for _, c in pairs])
    size = ROW + 2
    open_rows, done = [], []
    for p, c in zip(prompts, answers):
        ids = p.ids + c.ids
        if len(ids) > size:
            continue
        kinds = [1] * len(p.ids) + [2] * len(c.ids)
        for row in open_rows:
            if len(row[0]) + len(ids) <= size:
                break
        else:
            row = ([], [], [])
            open_rows.append(row)
            if len(open_rows) > 12:
                done.append(open_rows.pop(max(range(12), key=lambda i: len(open_rows[i][0]))))
        number = (row[1][-1] + 1) if row[1] else 0
        row[0].extend(ids)
        row[1].extend([number] * len(ids))
        row[2].extend(kinds)
    tokens = numpy.zeros((len(done), size), numpy.int16)
    document = numpy.full((len(done), size), 999, numpy.int16)
    kind = numpy.zeros((len(done), size), numpy.uint8)
    for i, row in enumerate(done):
        tokens[i, :len(row[0])], document[i, :len(row[0])], kind[i, :len(row[0])] = row
    return tokens, document, kind


class Feed:
    """Rows from worker processes, each used once in order; starts again from random ones if training outruns the workers."""

    def __init__(self, pool, jobs):
        self.parts, self.rows, self.at, self.error = [], 0, 0, None
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.collect, args=(pool, jobs), daemon=True)
        self.thread.start()
        self.random = numpy.random.default_rng(0)

    def collect(self, pool, jobs):
        try:
            for part in pool.imap_unordered(make_rows, jobs):
                with self.lock:
                    self.parts.append(part)
                    self.rows += len(part[0])
        except Exception as error:  # noqa: BLE001 - whatever stops the data stops the training
            self.error = error

    def batch(self, size):
        while self.rows < size and self.error is None:
            time.sleep(0.05)
        if self.error is not None:
            raise RuntimeError("making training data failed") from self.error
        with self.lock:
            if not hasattr(self, "current") or self.offset + size > len(self.current[0]):
                if self.at < len(self.parts):
                    self.current = self.parts[self.at]
                    self.at += 1
                else:
                    self.current = self.parts[self.random.integers(len(self.parts))]
                self.offset = 0
        part, at = self.current, self.offset
        self.offset += size
        return [torch.from_numpy(x[at:at + size]).cuda(non_blocking=True) for x in part]


# ---- optimiser --------------------------------------------------------------------------------------------------------------------

def orthogonalise(g, steps=5):
    """Newton-Schulz iteration of Muon on a stack [n, r, c]."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        a = x @ x.transpose(-1, -2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.transpose(-1, -2) if flip else x).float()


class Muon:
    """Momentum, orthogonalised; update size matched to Adam's (0.2 sqrt(max(r, c)))."""

    def __init__(self, parameters, decay=0.03):
        groups = {}
        for p, view in parameters:
            groups.setdefault(view[-2:], []).append((p, view))
        self.groups = [(items, [torch.zeros(v, device=p.device) for p, v in items], shape) for shape, items in groups.items()]
        self.decay = decay

    @torch.no_grad()
    def step(self, lr, momentum=0.95):
        for items, states, (r, c) in self.groups:
            grads = [p.grad.view(v) for p, v in items]
            torch._foreach_lerp_(states, grads, 1 - momentum)
            ahead = torch._foreach_lerp(grads, states, momentum)
            update = orthogonalise(torch.cat([u.reshape(-1, r, c) for u in ahead]))
            scale = 0.2 * max(r, c) ** 0.5
            parts = update.split([v.numel() // (r * c) for v in states])
            ps = [p.data for p, _ in items]
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_add_(ps, [u.reshape(p.shape) for u, p in zip(parts, ps)], alpha=-lr * scale)


def split_parameters(m):
    hidden, rest, heads = [], [], []
    for name, p in m.named_parameters():
        if name in ("embed", "lm_head"):
            heads.append(p)
        elif name.endswith("gate_up"):
            view = (p.shape[0] * 2, p.shape[1] // 2, p.shape[2]) if p.dim() == 3 else (2, p.shape[0] // 2, p.shape[1])
            hidden.append((p, view))
        elif p.dim() == 3 or (p.dim() == 2 and min(p.shape) > 32):
            hidden.append((p, tuple(p.shape) if p.dim() == 3 else (1,) + tuple(p.shape)))
        else:
            rest.append(p)
    return hidden, rest, heads


# ---- measuring --------------------------------------------------------------------------------------------------------------------

def quantised_copy(m):
    q = copy.deepcopy(m)
    q.set_qat(False)
    with torch.no_grad():
        for module in q.modules():
            if isinstance(module, demo.Linear) and module.quantise:
                module.weight.copy_(demo.fake_nvfp4(module.weight, (0, 1)))
            elif isinstance(module, demo.Experts):
                module.gate_up.copy_(demo.fake_nvfp4(module.gate_up, (1, 2)))
                module.down.copy_(demo.fake_nvfp4(module.down, (1, 2)))
                module.shared_gate_up.copy_(demo.fake_nvfp4(module.shared_gate_up, (0, 1)))
    return q


def rounded_copy(m):
    q = copy.deepcopy(m)
    q.set_qat(False)
    with torch.no_grad():
        for name, p in q.named_parameters():
            if not name.endswith(("A_log", "mixer.norm")):
                p.copy_(p.bfloat16().float())
    return q


@torch.no_grad()
def evaluate(m, items, longest=360):
    """{task: exact match}, {task: MTP draft-1 acceptance}, wrong samples."""
    stop = [TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")]
    prompts = [TOKENIZER.encode(prompt_text(s["messages"], s["tools"], s["thinking"])).ids for s in items]
    with torch.autocast("cuda", torch.bfloat16):
        outputs = m.generate(prompts, stop, longest)
    score, wrong, drafts = {}, [], {}
    for s, ids in zip(items, outputs):
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        ok = correct(text, s["thinking"], s["expect"], s["tools"])
        key = s["task"] + (".think" if s["thinking"] else ".direct")
        score.setdefault(key, []).append(ok)
        if not ok:
            wrong.append({"task": key, "user": s["messages"][-1]["content"], "got": text, "want": s["expect"]})
    for at in range(0, len(items), 64):
        rows = [p + o for p, o in zip(prompts[at:at + 64], outputs[at:at + 64])]
        width = -(-max(len(r) for r in rows) // demo.CHUNK) * demo.CHUNK
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        for i, r in enumerate(rows):
            tokens[i, :len(r)] = torch.tensor(r)
        tokens = tokens.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            _, h, _ = m.hidden(tokens, torch.zeros_like(tokens))
            guess = m.head(h, torch.bfloat16).argmax(-1).cpu()
        for i, r in enumerate(rows):
            start = len(prompts[at + i])
            s = items[at + i]
            hits = [int(guess[i, t]) == r[t + 2] for t in range(start - 1, len(r) - 2)]
            total = drafts.setdefault(s["task"] + (".think" if s["thinking"] else ".direct"), [0, 0])
            total[0] += sum(hits)
            total[1] += len(hits)
    return {k: sum(v) / len(v) for k, v in sorted(score.items())}, drafts, wrong


def summary(score, drafts, items):
    count = {}
    for s in items:
        key = s["task"] + (".think" if s["thinking"] else ".direct")
        count[key] = count.get(key, 0) + 1
    overall = sum(score[k] * count[k] for k in score) / sum(count.values())
    accepted, drafted = (sum(v[i] for v in drafts.values()) for i in (0, 1))
    return overall, accepted / max(1, drafted)


@torch.no_grad()
def activation_ranges(m, run):
    """Largest input magnitude per quantised linear while `run()` uses the model, for the checkpoint's input_scale: {path: value or list per expert}."""
    ranges, hooks = {}, []

    def note(name, value):
        ranges[name] = torch.maximum(ranges[name], value) if name in ranges else value

    for name, module in m.named_modules():
        if isinstance(module, demo.Linear) and module.quantise:
            hooks.append(module.register_forward_pre_hook(lambda mod, args, n=name: note(n, args[0].abs().amax().float())))
        elif isinstance(module, demo.Experts):
            def look(mod, args, n=name):
                x = args[0]
                _, weight = mod.route(x)
                chosen = weight > 0
                gu = F.linear(x, mod.gate_up.flatten(0, 1).to(x.dtype)).unflatten(-1, (mod.e, 2 * mod.i)).float()
                h = (F.silu(gu[..., :mod.i]) * gu[..., mod.i:]).abs().amax(-1)
                xin = x.float().abs().amax(-1, keepdim=True).expand_as(weight)
                flat = tuple(range(x.dim() - 1))
                note(n + ".in", torch.where(chosen, xin, 0).amax(flat))
                note(n + ".hidden", torch.where(chosen, h, 0).amax(flat))
                note(n + ".shared", x.abs().amax().float())
            hooks.append(module.register_forward_pre_hook(look))
    with torch.autocast(next(m.parameters()).device.type, torch.bfloat16):
        run()
    for h in hooks:
        h.remove()
    return {name: value.tolist() for name, value in ranges.items()}


def save_weights(m, out):
    state = {n: (p.detach().float().cpu() if n.endswith(("A_log", "mixer.norm")) else p.detach().bfloat16().cpu()).contiguous()
             for n, p in m.named_parameters()}
    parts, sizes = [{}, {}, {}], [0, 0, 0]
    for name, t in sorted(state.items(), key=lambda p: -p[1].nbytes):
        i = sizes.index(min(sizes))
        parts[i][name] = t
        sizes[i] += t.nbytes
    for i, part in enumerate(parts):
        save_file(part, os.path.join(out, f"weights_{i}.safetensors"))


def load_weights(m, directory):
    state = {}
    for i in range(3):
        state.update(load_file(os.path.join(directory, f"weights_{i}.safetensors")))
    own = dict(m.named_parameters())
    assert set(own) == set(state), set(own) ^ set(state)
    with torch.no_grad():
        for n, p in own.items():
            p.copy_(state[n].float())


def main():
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokenizer", default=os.path.join(HERE, "../../models/demo/tokenizer.json"))
    parser.add_argument("--resume")
    parser.add_argument("--qat", action="store_true")
    parser.add_argument("--seconds", type=float, default=420, help="training stops at this wall time; measuring comes after")
    parser.add_argument("--peak", type=float, default=1.0, help="share of the learning rates to start from")
    parser.add_argument("--anneal", action="store_true", help="let the learning rates fall from the start (as --qat does)")
    parser.add_argument("--warm-up", type=int, default=150, help="steps")
    parser.add_argument("--measure", default="bf16,nvfp4", help="roundings to measure")
    parser.add_argument("--rows", type=int, default=32, help="rows of 1024 tokens per step")
    parser.add_argument("--muon-lr", type=float, default=5e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--total-rows", type=int, default=450000)
    parser.add_argument("--items", type=int, default=150, help="held-out items per task")
    parser.add_argument("--ask", help="file with questions, one per line, that the NVFP4 rounding answers into the log")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    log = open(os.path.join(args.out, "log.txt"), "w")

    def say(*words):
        line = f"[{time.time() - began:6.1f}] " + " ".join(str(w) for w in words)
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    load_tokenizer(args.tokenizer)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("fork")
    pool = context.Pool(args.workers)
    per_job = 3000
    jobs = [(args.seed * 100000 + i, per_job, "train") for i in range(max(1, args.total_rows * ROW // (150 * per_job)))]
    feed = Feed(pool, jobs)

    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    m = demo.Model(demo.DEMO).cuda()
    if args.resume:
        load_weights(m, args.resume)
    m.set_qat(args.qat)
    say(sum(p.numel() for p in m.parameters()), "parameters", torch.cuda.get_device_name(), torch.__version__)
    layer_forward = demo.Layer.forward
    demo.Layer.forward = torch.compile(layer_forward, dynamic=False)

    @torch.compile(dynamic=False)
    def cross_entropy(h, head, target, weight):
        logits = F.linear(h.bfloat16(), head.bfloat16()).float()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none") * weight.flatten()
        return loss.sum() / weight.sum()

    hidden, rest, heads = split_parameters(m)
    muon = Muon(hidden)
    adam = torch.optim.AdamW([{"params": heads, "scale": 1.0}, {"params": rest, "scale": 1.0}], lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def step(lr_scale):
        tokens, document, kind = feed.batch(args.rows)
        tokens, document, kind = tokens.long(), document.long(), kind.long()
        x, d = tokens[:, :ROW], document[:, :ROW]
        table = torch.tensor([0.0, PROMPT_WEIGHT, 1.0], device="cuda")
        w1 = table[kind[:, 1:ROW + 1]] * (document[:, 1:ROW + 1] == d)
        w2 = table[kind[:, 2:]] * (document[:, 2:] == d)
        with torch.autocast("cuda", torch.bfloat16):
            h, mh, balance = m.hidden(x, d)
        loss = cross_entropy(h, m.lm_head, tokens[:, 1:ROW + 1], w1)
        mtp = cross_entropy(mh, m.lm_head, tokens[:, 2:], w2)
        (loss + 0.3 * mtp + 0.01 * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(rest + heads, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * lr_scale
        adam.step()
        muon.step(args.muon_lr * lr_scale)
        m.zero_grad(set_to_none=True)
        return loss.detach(), mtp.detach(), balance.detach(), norm

    held_out = [s for name, (_, _, kept) in data.TASKS.items() if kept for s in data.stream(2026, "eval", args.items, name)]
    steps, started = 0, None
    while True:
        now = time.time() - began
        if now > args.seconds:
            break
        progress = 0.0 if started is None else (now - started) / (args.seconds - started)
        falling = 1.0 - progress if args.qat or args.anneal else 2.0 * (1.0 - progress)
        scale = args.peak * min(1.0, (steps + 1) / args.warm_up) * min(1.0, falling + 0.005)
        result = step(scale)
        steps += 1
        if steps == 5:
            torch.cuda.synchronize()
            started = time.time() - began
            say("compiled")
        if steps % 250 == 0 or steps in (1, 20, 60):
            loss, mtp, balance, norm = (v.item() for v in result)
            elapsed = time.time() - began - (started or 0)
            say(f"step {steps} loss {loss:.4f} mtp {mtp:.4f} balance {balance:.3f} norm {norm:.2f} rate {(steps - 5) * args.rows * ROW / max(elapsed, 1e-3) / 1e3:.0f}k tok/s",
                f"rows made {feed.rows} mem {torch.cuda.max_memory_allocated() / 2**30:.0f}G")
            if not loss == loss:
                say("loss is NaN, stopping")
                break
    torch.cuda.synchronize()
    say(f"trained {steps} steps, {steps * args.rows * ROW / 1e6:.0f}M tokens")
    save_weights(m, args.out)
    say("saved")
    pool.terminate()
    demo.Layer.forward = layer_forward
    results = {"steps": steps, "tokens": steps * args.rows * ROW, "seconds": args.seconds, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
               "qat": args.qat, "items_per_task": args.items}
    for name, make in (("bf16", rounded_copy), ("nvfp4", lambda x: quantised_copy(rounded_copy(x)))):
        if name not in args.measure.split(","):
            continue
        q = make(m)
        score, drafts, wrong = evaluate(q, held_out)
        overall, acceptance = summary(score, drafts, held_out)
        results[name] = {"overall": overall, "mtp_acceptance": acceptance, "tasks": score,
                         "mtp_by_task": {k: v[0] / max(1, v[1]) for k, v in sorted(drafts.items())}, "wrong": wrong[:60]}
        say(f"{name}: overall {overall:.4f} mtp acceptance {acceptance:.4f}", json.dumps({k: round(v, 3) for k, v in score.items()}))
        for w in wrong[:8]:
            say("  wrong:", json.dumps(w, ensure_ascii=False)[:500])
    if args.ask:
        with open(args.ask) as f:
            asked = [(line.strip(), thinking) for line in f if line.strip() for thinking in (False, True)]
        stop = [TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")]
        prompts = [TOKENIZER.encode(prompt_text([{"role": "user", "content": q}], None, thinking)).ids for q, thinking in asked]
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            outputs = q.generate(prompts, stop, 360)
        with open(os.path.join(args.out, "answers.txt"), "w") as f:
            for (question, thinking), ids in zip(asked, outputs):
                f.write(f"{question}\n  {'think' if thinking else 'direct'}: {TOKENIZER.decode(ids, skip_special_tokens=False)}\n")
    part = feed.parts[0]
    rounded = rounded_copy(m)
    tokens, document = (torch.from_numpy(x[:64, :ROW]).long().cuda() for x in part[:2])
    results["ranges"] = activation_ranges(rounded, lambda: rounded.hidden(tokens, document))
    with open(os.path.join(args.out, "results.json"), "w") as f:
        json.dump(results, f, indent=1)
    say("done")


if __name__ == "__main__":
    main()
