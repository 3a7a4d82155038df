"""The Qwen3.5-MoE text model in plain PyTorch, shaped for training a small one: every expert is computed densely (the routing weights of the
experts that were not chosen are zero), the delta rule runs in chunks, and rows may hold several packed conversations.

Shapes: B rows, T tokens, H hidden, E experts, I expert width; linear weights are [out, in]."""
import math

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 64

DEMO = dict(vocab_size=2048, hidden_size=256, num_hidden_layers=8, full_attention_interval=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=256, partial_rotary_factor=0.25, rope_theta=10000000.0, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=24, num_experts_per_tok=4,
            moe_intermediate_size=64, shared_expert_intermediate_size=128, rms_norm_eps=1e-6)


# ---- NVFP4 ------------------------------------------------------------------------------------------------------------------------

def round_e2m1(a):
    """|x| on the e2m1 grid {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code."""
    return (0.5 * ((a > 0.25).to(a.dtype) + (a >= 0.75).to(a.dtype) + (a > 1.25).to(a.dtype) + (a >= 1.75).to(a.dtype))
            + (a > 2.5).to(a.dtype) + (a >= 3.5).to(a.dtype) + 2.0 * (a > 5.0).to(a.dtype))


def nvfp4_parts(w, group_dims):
    """w [..., K] fp32 -> (codes as values on the grid with sign [..., K/16, 16], block scales [..., K/16] on the e4m3 grid, tensor scale).
    The tensor scale is shared over `group_dims` of w (kept as size 1)."""
    tensor_scale = (w.abs().amax(dim=group_dims, keepdim=True) / (6.0 * 448.0)).clamp_min(1e-12)
    blocks = w.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1)
    scale = (amax / 6.0 / tensor_scale).clamp(2.0 ** -9, 448.0).to(torch.float8_e4m3fn).to(torch.float32)
    full = (scale * tensor_scale).unsqueeze(-1)
    return torch.sign(blocks) * round_e2m1((blocks / full).abs()), scale, tensor_scale


def fake_nvfp4(w, group_dims):
    codes, scale, tensor_scale = nvfp4_parts(w.float(), group_dims)
    return (codes * (scale * tensor_scale).unsqueeze(-1)).flatten(-2)


def through(w, group_dims, on):
    """Quantised value forward, identity backward."""
    return w + (fake_nvfp4(w.detach(), group_dims) - w.detach()) if on else w


# ---- layers -----------------------------------------------------------------------------------------------------------------------

def rms(x, weight, eps=1e-6):
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


class Linear(nn.Module):
    def __init__(self, n, k, gain=1.0, quantise=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * gain / math.sqrt(k))
        self.quantise = quantise
        self.qat = False

    def forward(self, x):
        return F.linear(x, through(self.weight, (0, 1), self.qat and self.quantise).to(x.dtype))


def rope_tables(position, dim, theta):
    inv = theta ** (-torch.arange(0, dim, 2, device=position.device, dtype=torch.float32) / dim)
    angle = position.float().unsqueeze(-1) * inv
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x [B,T,heads,D]; the first 2*len(cos) dims turn, pairs (i, i + half)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.hq, self.hkv, self.d = c["num_attention_heads"], c["num_key_value_heads"], d
        self.rotary = int(d * c["partial_rotary_factor"])
        self.theta = c["rope_theta"]
        self.q_proj = Linear(2 * self.hq * d, h)
        self.k_proj = Linear(self.hkv * d, h)
        self.v_proj = Linear(self.hkv * d, h)
        self.o_proj = Linear(h, self.hq * d, 0.3)
        self.q_norm = nn.Parameter(torch.zeros(d))
        self.k_norm = nn.Parameter(torch.zeros(d))

    def project(self, x, position):
        q, gate = self.q_proj(x).unflatten(-1, (self.hq, 2 * self.d)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.hkv, self.d))
        v = self.v_proj(x).unflatten(-1, (self.hkv, self.d))
        cos, sin = rope_tables(position, self.rotary, self.theta)
        q = rotate(rms(q, self.q_norm), cos, sin).to(x.dtype)
        k = rotate(rms(k, self.k_norm), cos, sin).to(x.dtype)
        return q, k, v, gate.flatten(-2)

    def attend(self, q, k, v, gate, mask):
        group = self.hq // self.hkv
        q = q.transpose(1, 2)
        k, v = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
        score = (q @ k.transpose(-1, -2)).float() * self.d ** -0.5
        p = score.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
        o = (p @ v).transpose(1, 2).flatten(-2)
        return self.o_proj(o * torch.sigmoid(gate.float()).to(o.dtype))

    def forward(self, x, position, mask, first):
        return self.attend(*self.project(x, position), mask)

    def empty(self, rows, length, device, dtype):
        return [torch.zeros(rows, length, self.hkv, self.d, device=device, dtype=dtype) for _ in range(2)]

    def step(self, x, t, cache):
        position = torch.full(x.shape[:2], t, device=x.device)
        q, k, v, gate = self.project(x, position)
        cache[0][:, t:t + 1], cache[1][:, t:t + 1] = k, v
        mask = torch.ones(1, 1, 1, t + 1, dtype=torch.bool, device=x.device)
        return self.attend(q, cache[0][:, :t + 1], cache[1][:, :t + 1], gate, mask)


def unit_lower_inverse(a):
    """(I + a)^-1 for strictly lower triangular a [..., 64, 64]: 16 x 16 blocks by (I - a)(I + a^2)(I + a^4)(I + a^8), then merged pairwise."""
    n, size = a.shape[-1], 16
    eye = torch.eye(size, device=a.device, dtype=a.dtype)
    diagonal = torch.stack([a[..., i:i + size, i:i + size] for i in range(0, n, size)], -3)
    inverse, power = eye - diagonal, diagonal @ diagonal
    for i in range(3):
        inverse = inverse @ (eye + power)
        if i < 2:
            power = power @ power
    blocks = list(inverse.unbind(-3))
    while size < n:
        merged = []
        for i in range(0, len(blocks), 2):
            top, bottom = blocks[i], blocks[i + 1]
            r = (i + 1) * size
            corner = -(bottom @ a[..., r:r + size, r - size:r] @ top)
            merged.append(torch.cat((torch.cat((top, torch.zeros_like(top)), -1), torch.cat((corner, bottom), -1)), -2))
        blocks, size = merged, size * 2
    return blocks[0]


def delta_rule(q, k, v, g, beta):
    """Chunked gated delta rule. q,k,v [B,h,T,d] fp32 (q scaled, q and k normalised), g,beta [B,h,T]; T a multiple of CHUNK."""
    q, k, v = (t.unflatten(2, (-1, CHUNK)) for t in (q, k, v))
    g, beta = (t.unflatten(2, (-1, CHUNK)) for t in (g, beta))
    c = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    a = (beta.unsqueeze(-1) * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    inverse = unit_lower_inverse(a)
    u = inverse @ (beta.unsqueeze(-1) * v)
    w = inverse @ ((beta * c.exp()).unsqueeze(-1) * k)
    last = c[..., -1:]
    kd = k * (last - c).exp().unsqueeze(-1)
    eye = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    m = last.exp().unsqueeze(-1) * eye - kd.transpose(-1, -2) @ w
    b = kd.transpose(-1, -2) @ u
    rows = q.shape[0] * q.shape[1]
    m, b = m.flatten(0, 1), b.flatten(0, 1)
    state = torch.zeros(rows, k.shape[-1], v.shape[-1], device=k.device, dtype=k.dtype)
    states = []
    for n in range(m.shape[1]):
        states.append(state)
        state = torch.baddbmm(b[:, n], m[:, n], state)
    states = torch.stack(states, 1).unflatten(0, q.shape[:2])
    delta = u - w @ states
    o = (c.exp().unsqueeze(-1) * q) @ states + ((q @ k.transpose(-1, -2)) * decay) @ delta
    return o.flatten(2, 3)


class DeltaNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden_size"]
        self.hk, self.hv, self.d = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"]
        self.kd, self.vd = self.hk * self.d, self.hv * self.d
        self.taps = c["linear_conv_kernel_dim"]
        self.in_proj_qkv = Linear(2 * self.kd + self.vd, h)
        self.in_proj_z = Linear(self.vd, h)
        self.in_proj_b = Linear(self.hv, h, quantise=False)
        self.in_proj_a = Linear(self.hv, h, 0.3, quantise=False)
        self.conv = nn.Parameter(torch.randn(2 * self.kd + self.vd, self.taps) * 0.3)
        with torch.no_grad():
            self.conv[:, -1] += 0.7
        self.A_log = nn.Parameter(torch.empty(self.hv).uniform_(1, 16).log())
        dt = torch.exp(torch.rand(self.hv) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = nn.Parameter(torch.ones(self.d))
        self.out_proj = Linear(h, self.vd, 0.3)

    def gates(self, x):
        beta = torch.sigmoid(self.in_proj_b(x).float())
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return beta, g

    def heads(self, conv):
        q, k, v = conv.float().split((self.kd, self.kd, self.vd), -1)
        q, k, v = (t.unflatten(-1, (-1, self.d)) for t in (q, k, v))
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * self.d ** -0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        repeat = self.hv // self.hk
        return q.repeat_interleave(repeat, -2), k.repeat_interleave(repeat, -2), v

    def finish(self, x, o):
        n = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm
        z = self.in_proj_z(x).unflatten(-1, (self.hv, self.d))
        return self.out_proj((n * F.silu(z.float())).flatten(-2).to(x.dtype))

    def forward(self, x, position, mask, first):
        u = self.in_proj_qkv(x)
        t = u.shape[1]
        padded = F.pad(u, (0, 0, self.taps - 1, 0))
        conv = 0
        for j in range(self.taps):
            back = self.taps - 1 - j
            term = padded[:, j:j + t] * self.conv[:, j]
            conv = conv + (term * (position >= back).unsqueeze(-1) if back else term)
        q, k, v = self.heads(F.silu(conv))
        beta, g = self.gates(x)
        g = torch.where(first.unsqueeze(-1), -30.0, g)  # a new conversation forgets the one packed before it
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule(*(s.transpose(1, 2) for s in (q, k, v)), g.transpose(1, 2), beta.transpose(1, 2))
        return self.finish(x, o.transpose(1, 2))

    def empty(self, rows, length, device, dtype):
        return [torch.zeros(rows, self.taps - 1, 2 * self.kd + self.vd, device=device, dtype=dtype),
                torch.zeros(rows, self.hv, self.d, self.d, device=device)]

    def step(self, x, t, cache):
        window = torch.cat((cache[0], self.in_proj_qkv(x)), 1)
        cache[0] = window[:, 1:]
        conv = F.silu((window * self.conv.t()).sum(1, keepdim=True))
        q, k, v = (s.squeeze(1) for s in self.heads(conv))
        beta, g = self.gates(x)
        beta, g = beta.squeeze(1), g.squeeze(1)
        with torch.autocast(x.device.type, enabled=False):
            state = cache[1] * g.exp()[..., None, None]
            read = (k.unsqueeze(-2) @ state).squeeze(-2)
            state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - read)).unsqueeze(-2)
            cache[1] = state
            o = (q.unsqueeze(-2) @ state).squeeze(-2).unsqueeze(1)
        return self.finish(x, o)


class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, e, i, s = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
        self.e, self.i, self.k = e, i, c["num_experts_per_tok"]
        self.gate = nn.Parameter(torch.randn(e, h) / math.sqrt(h))
        self.gate_up = nn.Parameter(torch.randn(e, 2 * i, h) / math.sqrt(h))
        self.down = nn.Parameter(torch.randn(e, h, i) * 0.3 / math.sqrt(i))
        self.shared_gate_up = nn.Parameter(torch.randn(2 * s, h) / math.sqrt(h))
        self.shared_down = Linear(h, s, 0.3)
        self.shared_gate = nn.Parameter(torch.zeros(1, h))
        self.qat = False

    def route(self, x):
        logits = F.linear(x, self.gate.to(x.dtype)).float()
        p = logits.softmax(-1)
        top, index = p.topk(self.k, -1)
        weight = torch.zeros_like(p).scatter(-1, index, top / top.sum(-1, keepdim=True))
        return p, weight

    def forward(self, x):
        p, weight = self.route(x)
        gate_up = through(self.gate_up, (1, 2), self.qat).to(x.dtype)
        down = through(self.down, (1, 2), self.qat).to(x.dtype)
        gu = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (self.e, 2 * self.i))
        h = F.silu(gu[..., :self.i].float()) * gu[..., self.i:].float() * weight.unsqueeze(-1)
        y = h.flatten(-2).to(x.dtype) @ down.transpose(1, 2).flatten(0, 1)
        sg, su = F.linear(x, through(self.shared_gate_up, (0, 1), self.qat).to(x.dtype)).chunk(2, -1)
        shared = self.shared_down((F.silu(sg.float()) * su.float()).to(x.dtype))
        gate = torch.sigmoid(F.linear(x, self.shared_gate.to(x.dtype)).float())
        # Load balance: experts times (share of tokens that chose it) times (mean probability), 1 when even.
        dims = tuple(range(p.dim() - 1))
        balance = self.e * ((weight > 0).float().mean(dims) / self.k * p.mean(dims)).sum()
        return y + shared * gate.to(y.dtype), balance


class Layer(nn.Module):
    def __init__(self, c, full):
        super().__init__()
        self.input_norm = nn.Parameter(torch.zeros(c["hidden_size"]))
        self.post_norm = nn.Parameter(torch.zeros(c["hidden_size"]))
        self.mixer = Attention(c) if full else DeltaNet(c)
        self.mlp = Experts(c)

    def forward(self, x, position, mask, first, work):
        x = x + self.mixer(rms(x, self.input_norm).to(work), position, mask, first)
        y, balance = self.mlp(rms(x, self.post_norm).to(work))
        return x + y, balance

    def step(self, x, t, cache, work):
        x = x + self.mixer.step(rms(x, self.input_norm).to(work), t, cache)
        return x + self.mlp(rms(x, self.post_norm).to(work))[0]


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden_size"]
        self.c = c
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], h) * 0.3)
        self.layers = nn.ModuleList(Layer(c, (i + 1) % c["full_attention_interval"] == 0) for i in range(c["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.zeros(h))
        self.lm_head = nn.Parameter(torch.randn(c["vocab_size"], h) * 0.02)
        self.mtp_fc = Linear(h, 2 * h, quantise=False)
        self.mtp_norm_embedding = nn.Parameter(torch.zeros(h))
        self.mtp_norm_hidden = nn.Parameter(torch.zeros(h))
        self.mtp_norm = nn.Parameter(torch.zeros(h))
        self.mtp_layer = Layer(c, True)

    def set_qat(self, on):
        for m in self.modules():
            if hasattr(m, "qat"):
                m.qat = on

    def head(self, x, work):
        return F.linear(x.to(work), self.lm_head.to(work)).float()

    @staticmethod
    def places(document):
        """document [B,T] (which packed conversation a token belongs to) -> (is it the first of its conversation, its position, what it attends to)."""
        first = torch.ones_like(document, dtype=torch.bool)
        first[:, 1:] = document[:, 1:] != document[:, :-1]
        index = torch.arange(document.shape[1], device=document.device).expand_as(document)
        position = index - torch.where(first, index, 0).cummax(1).values
        mask = ((document.unsqueeze(1) == document.unsqueeze(2)) & (index[:1].unsqueeze(1) <= index[:1].unsqueeze(2))).unsqueeze(1)
        return first, position, mask

    def trunk(self, tokens, document, work=torch.bfloat16):
        """tokens, document [B,T] -> (hidden after the norm, the layers' balance together)."""
        first, position, mask = self.places(document)
        x = self.embed[tokens].float()
        balance = 0
        for layer in self.layers:
            x, b = layer(x, position, mask, first, work)
            balance = balance + b
        return rms(x, self.norm), balance

    def mtp_input(self, following, h, work=torch.bfloat16):
        """What the MTP layer starts from: tokens [B,T], each the one behind the position whose hidden state after the norm is h [B,T,H]."""
        embedding = rms(self.embed[following].float(), self.mtp_norm_embedding)
        return self.mtp_fc(torch.cat((embedding, rms(h, self.mtp_norm_hidden)), -1).to(work)).float()

    def hidden(self, tokens, document, work=torch.bfloat16):
        """tokens, document [B,T] -> (trunk hidden after the norm, MTP hidden, balance).
        MTP slot t reads token t+1; its last slot of a row is meaningless."""
        first, position, mask = self.places(document)
        h, balance = self.trunk(tokens, document, work)
        m, b = self.mtp_layer(self.mtp_input(tokens.roll(-1, 1), h, work), position, mask, first, work)
        return h, rms(m, self.mtp_norm), (balance + b) / (len(self.layers) + 1)

    @torch.no_grad()
    def generate(self, prompts, stop, longest, work=torch.bfloat16):
        """Greedy continuation of a list of token lists, all rows in lockstep: row r reads its prompt, then what it wrote itself."""
        device = self.embed.device
        order = len(prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        total = max(len(p) for p in prompts) + longest
        tokens = torch.zeros(order, total, dtype=torch.long, device=device)
        for i, p in enumerate(prompts):
            tokens[i, :len(p)] = torch.tensor(p, device=device)
        caches = [layer.mixer.empty(order, total, device, work) for layer in self.layers]
        done = torch.full((order,), total, device=device)
        stops = torch.tensor(stop, device=device)
        for t in range(total - 1):
            x = self.embed[tokens[:, t:t + 1]].float()
            for layer, cache in zip(self.layers, caches):
                x = layer.step(x, t, cache, work)
            new = self.head(rms(x, self.norm), work).squeeze(1).argmax(-1)
            writing = (t + 1 >= lengths) & (t + 1 < torch.minimum(done, lengths + longest))
            tokens[:, t + 1] = torch.where(writing, new, tokens[:, t + 1])
            done = torch.where(writing & torch.isin(new, stops) & (done == total), t + 2, done)
            if t % 32 == 0 and bool((t + 1 >= torch.minimum(done, lengths + longest)).all()):
                break
        out, rows, ends, starts = [], tokens.cpu().tolist(), torch.minimum(done, lengths + longest).tolist(), lengths.tolist()
        for row, s, e in zip(rows, starts, ends):
            out.append(row[s:e])
        return out
