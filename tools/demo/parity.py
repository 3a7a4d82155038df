"""Checks this folder's model against transformers' Qwen3_5MoeForCausalLM on random weights, in fp32: parallel form, packed form and step by step.

  python3 tools/demo/parity.py        prints the largest logit differences; exits 1 above 2e-4
"""
import torch

from network import model as ours
from network.export import PREFIX, Collector, config_json, layer_tensors


def reference(m):
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    config, _ = config_json(m.c, {k: 1 for k in ("<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")}, False, [])
    c = Qwen3_5MoeTextConfig(**config["text_config"])
    c._attn_implementation = "eager"
    c._experts_implementation = "eager"
    ref = Qwen3_5MoeForCausalLM(c).float().eval()
    out = Collector(False)
    for i, layer in enumerate(m.layers):
        layer_tensors(layer, f"model.layers.{i}.", out)
    state = {k: v.float() for k, v in out.tensors.items()}
    for i, layer in enumerate(m.layers):
        base = f"model.layers.{i}.mlp.experts."
        for e in range(m.c["num_experts"]):
            for part in ("gate_proj", "up_proj", "down_proj"):
                del state[f"{base}{e}.{part}.weight"]
        state[base + "gate_up_proj"], state[base + "down_proj"] = layer.mlp.gate_up.detach(), layer.mlp.down.detach()
    state["model.embed_tokens.weight"], state["model.norm.weight"], state["lm_head.weight"] = m.embed.detach(), m.norm.detach(), m.lm_head.detach()
    missing = ref.load_state_dict(state, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    return ref


def main():
    torch.manual_seed(1)
    m = ours.Model(ours.DEMO)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.dim() == 1 and "A_log" not in name and "dt_bias" not in name:
                p.add_(torch.randn_like(p) * 0.2)
            p.copy_(p.to(torch.bfloat16).float())
        m.lm_head.mul_(10)
    ref = reference(m)
    tokens = torch.randint(0, m.c["vocab_size"], (2, 128))
    with torch.no_grad():
        want = ref(input_ids=tokens).logits
        got = m.head(m.hidden(tokens, torch.zeros_like(tokens), torch.float32)[0], torch.float32)
        worst = (want - got).abs().max().item()
        # the same tokens packed as two conversations of 50 and 78
        document = torch.zeros_like(tokens)
        document[:, 50:] = 1
        packed = m.head(m.hidden(tokens, document, torch.float32)[0], torch.float32)
        alone = ref(input_ids=tokens[:, 50:]).logits
        worst_packed = max((packed[:, :50] - want[:, :50]).abs().max().item(), (packed[:, 50:] - alone).abs().max().item())
        caches = [layer.mixer.empty(2, 128, "cpu", torch.float32) for layer in m.layers]
        worst_step = 0
        for t in range(40):
            x = m.embed[tokens[:, t:t + 1]]
            for layer, cache in zip(m.layers, caches):
                x = layer.step(x, t, cache, torch.float32)
            logits = m.head(ours.rms(x, m.norm), torch.float32)
            worst_step = max(worst_step, (logits[:, 0] - want[:, t]).abs().max().item())
    print(f"largest logit {want.abs().max():.2f}; differences: whole {worst:.2e}, packed {worst_packed:.2e}, steps {worst_step:.2e}")
    print(sum(p.numel() for p in m.parameters()), "parameters")
    raise SystemExit(1 if max(worst, worst_packed, worst_step) > 2e-4 else 0)


if __name__ == "__main__":
    main()
