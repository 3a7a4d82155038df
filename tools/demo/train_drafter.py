"""Teaches the demo model's MTP head to draft several tokens in a row; the trunk, and so every answer, stays as it is.

  python3 tools/demo/train_drafter.py models/demo --seconds 900 [--out DIR] [--device cuda]

A second draft has no hidden state of the trunk to start from, only the head's own output for the first one: a head that was trained for one
draft has never seen that. Here the head runs as the engine runs it. From each position of an answer it makes --drafts drafts, each from its own
output before, with keys and values of the trunk's states for what is certain and its own for what it drafted, on weights rounded to NVFP4
(straight-through). It learns the trunk's distribution at each of these positions, and with less weight at some positions of prompts: text that
the model would not write itself keeps the head from knowing its usual answers only.

Reads a directory as tools/demo/pack.py writes it and replaces the tensors mtp.* of its model.safetensors (or of a copy in --out), input scales
measured over all drafts. Runs on a CPU: most is learnt in some twenty minutes.
"""
import argparse
import json
import os
import shutil
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import torch
import torch.nn.functional as F

import train
from network import model as demo
from network.export import read, replace_drafter
from pack import input_scales

ROW = train.ROW
READ_SHARE, READ_WEIGHT = 0.2, 0.5  # of the positions of prompts, and what one of them counts


class Trunk:
    """What the head learns from, for rows of packed conversations: hidden states, the tokens that the trunk would choose, and from where to draft."""

    def __init__(self, m, tokens, document, kind, drafts):
        tokens, document, kind = (x[:, :ROW].long() for x in (tokens, document, kind))
        self.tokens, self.document = tokens, document
        with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
            self.hidden = m.trunk(tokens, document)[0].to(torch.bfloat16)
        _, self.position, _ = m.places(document)
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        # Drafts start behind a token that has just been written: what the trunk knows is the state of the token before.
        size = tokens.shape[1] - drafts - 1
        self.kind = kind
        start = (kind[:, 1:size + 1] == 2) | (torch.rand(kind[:, :size].shape, device=kind.device) < READ_SHARE)
        start = start & (document[:, 1:size + 1] == document[:, :size])
        count = int(start.sum(1).max())
        order = torch.where(start, index[:, :size], tokens.shape[1]).sort(1).values[:, :count]
        self.valid = order < tokens.shape[1]
        self.start = torch.where(self.valid, order, 0)

    def at(self, values, offset):
        """[B,T,...] -> [B,S,...]: values of the starts' positions plus offset."""
        index = self.start + offset
        return values.gather(1, index) if values.dim() == 2 else values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def drafts_of(m, trunk, count):
    """The head's hidden states after its norm for each draft, [B,S,H] each; draft k of start t is for token t + k + 2 (k from 0)."""
    layer, attention, work = m.mtp_layer, m.mtp_layer.mixer, torch.bfloat16
    document, position = trunk.document, trunk.position

    # Keys and values of the whole rows, from the trunk's states.
    r = m.mtp_input(trunk.tokens.roll(-1, 1), trunk.hidden.float())
    _, keys, values, _ = attention.project(demo.rms(r, layer.input_norm).to(work), position)
    index = torch.arange(document.shape[1], device=document.device)
    mask = (trunk.at(document, 0).unsqueeze(2) == document.unsqueeze(1)) & (index <= trunk.start.unsqueeze(2))  # [B,S,T]
    group = attention.hq // attention.hkv
    keys, values = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (keys, values))  # [B,h,T,D]
    own_keys, own_values, out = [], [], []
    residual = trunk.at(r, 0)
    for k in range(count):
        if k > 0:
            residual = m.mtp_input(trunk.at(trunk.tokens, k + 1), out[-1])
        x = demo.rms(residual, layer.input_norm).to(work)
        q, key, value, gate = attention.project(x, trunk.at(position, 0) + k)
        q = q.transpose(1, 2)
        score = (q @ keys.transpose(-1, -2)).float().masked_fill(~mask.unsqueeze(1), float("-inf"))
        if k > 0:
            own_keys.append(key.repeat_interleave(group, 2).transpose(1, 2))
            own_values.append(value.repeat_interleave(group, 2).transpose(1, 2))
            own = torch.stack([(q * other).float().sum(-1) for other in own_keys], -1)
            score = torch.cat((score, own), -1)
        p = (score * attention.d ** -0.5).softmax(-1).to(work)
        o = p[..., :keys.shape[2]] @ values
        for j, other in enumerate(own_values):
            o = o + p[..., keys.shape[2] + j, None] * other
        o = o.transpose(1, 2).flatten(-2)
        residual = residual + attention.o_proj(o * torch.sigmoid(gate.float()).to(o.dtype))
        y, _ = layer.mlp(demo.rms(residual, layer.post_norm).to(work))
        out.append(demo.rms(residual + y, m.mtp_norm))
    return out


def compare(m, trunk, count, learn):
    """(loss, accepted [2][count], reached [2][count]): the trunk's choices against the drafts', where all drafts before were right; in answers and
    in prompts."""
    head = m.lm_head.detach().to(torch.bfloat16)
    loss, accepted, reached = 0.0, [[], []], [[], []]
    alive = trunk.valid
    written = trunk.at(trunk.kind, 1) == 2
    for k, hidden in enumerate(drafts_of(m, trunk, count)):
        # The draft is for the token behind t + k + 1, whose distribution is the trunk's at that position.
        alive = alive & (trunk.at(trunk.document, k + 1) == trunk.at(trunk.document, 0))
        logits = F.linear(hidden.to(torch.bfloat16)[alive], head).float()
        with torch.no_grad():
            truth = F.linear(trunk.at(trunk.hidden, k + 1)[alive], head).float()
            right = logits.argmax(-1) == truth.argmax(-1)
        answer = written[alive]
        if learn:
            weight = torch.where(answer, 1.0, READ_WEIGHT)
            loss = loss + (F.cross_entropy(logits, truth.softmax(-1), reduction="none") * weight).sum() / weight.sum().clamp_min(1)
        for i, which in enumerate((answer, ~answer)):
            accepted[i].append(int((right & which).sum()))
            reached[i].append(int(which.sum()))
        if not learn:
            alive = alive.masked_scatter(alive.clone(), right)
        else:  # behind a token that the trunk would not have chosen there is nothing to draft
            following = trunk.at(trunk.tokens, k + 2)[alive]
            alive = alive.masked_scatter(alive.clone(), truth.argmax(-1) == following)
    return loss, accepted, reached


def main():
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--out", help="directory for the result (default: in place)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--rows", type=int, default=4, help="rows of 1024 tokens a step")
    parser.add_argument("--uses", type=int, default=3, help="times that a row is learnt from")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=31)
    args = parser.parse_args()

    def say(*words):
        print(f"[{time.time() - began:6.1f}]", *words, flush=True)

    train.load_tokenizer(os.path.join(args.directory, "tokenizer.json"))
    torch.manual_seed(args.seed)
    m = demo.Model(demo.DEMO)
    read(m, os.path.join(args.directory, "model.safetensors"))
    m = m.to(args.device)
    learnt = [(n, p) for n, p in m.named_parameters() if n.startswith("mtp_")]
    for n, p in m.named_parameters():
        p.requires_grad_(n.startswith("mtp_"))
    for module in m.mtp_layer.modules():
        if hasattr(module, "qat"):
            module.qat = True
    say(sum(p.numel() for _, p in learnt), "parameters of the MTP head learn, on", args.device)

    def batches(seed, split):
        parts = [torch.from_numpy(part).to(args.device) for part in train.make_rows((seed, 150 * args.rows // 4, split))]
        for at in range(0, len(parts[0]) - args.rows + 1, args.rows):
            yield Trunk(m, *(part[at:at + args.rows] for part in parts), args.drafts)

    def measure(held_out):
        total = [[[0, 0] for _ in range(args.drafts)] for _ in range(2)]
        with torch.no_grad(), torch.autocast(args.device, torch.bfloat16):
            for trunk in held_out:
                _, accepted, reached = compare(m, trunk, args.drafts, False)
                for where, got, of in zip(total, accepted, reached):
                    for t, a, r in zip(where, got, of):
                        t[0] += a
                        t[1] += r
        return "; ".join(", ".join(f"{100 * a / max(1, r):.2f}" for a, r in where) for where in total)

    held_out = [t for seed in range(4) for t in batches(90000 + seed, "eval")][:12]
    say("held out, accepted of each draft that was reached, percent, in answers; in prompts:", measure(held_out))

    matrices, rest, _ = train.split_parameters(m)
    matrices = [(p, view) for p, view in matrices if p.requires_grad]
    rest = [p for p in rest if p.requires_grad]
    muon = train.Muon(matrices, decay=0.0)
    adam = torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    store, steps, seed = [], 0, args.seed * 100000
    fresh, reports, started = None, 0, time.time()
    while True:
        progress = (time.time() - started) / args.seconds
        if progress >= 1:
            break
        # One batch in `uses` is new; the others are among the last ones.
        if steps % args.uses == 0:
            trunk = None if fresh is None else next(fresh, None)
            if trunk is None:
                fresh, seed = batches(seed, "train"), seed + 1
                trunk = next(fresh, None)
                if trunk is None:
                    continue
            store.append(trunk)
            store = store[-400:]
        else:
            trunk = store[int(torch.randint(len(store), (1,)))]
        scale = min(1.0, (steps + 1) / 30) * (1.0 - progress)
        with torch.autocast(args.device, torch.bfloat16):
            loss, _, _ = compare(m, trunk, args.drafts, True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.lr * scale
        adam.step()
        muon.step(args.lr * scale)
        m.zero_grad(set_to_none=True)
        steps += 1
        if time.time() - started > (reports + 1) * args.seconds / 10:
            reports += 1
            say(f"step {steps} loss {loss.item():.4f}, {steps * args.rows * ROW // args.uses} fresh tokens; held out:", measure(held_out))
    for p in [p for _, p in learnt]:
        p.requires_grad_(False)

    def all_drafts():
        with torch.autocast(args.device, torch.bfloat16):
            for trunk in store[-8:]:
                drafts_of(m, trunk, args.drafts)

    ranges = {name: value for name, value in train.activation_ranges(m, all_drafts).items() if name.startswith("mtp_layer.")}
    out = args.out or args.directory
    if os.path.realpath(out) != os.path.realpath(args.directory):
        shutil.copytree(args.directory, out, dirs_exist_ok=True)
    replace_drafter(m, os.path.join(out, "model.safetensors"), input_scales(ranges))
    say("held out, at the end:", measure(held_out))
    say(json.dumps({"steps": steps, "fresh_tokens": steps * args.rows * ROW // args.uses, "seconds": args.seconds, "device": args.device}))


if __name__ == "__main__":
    main()
