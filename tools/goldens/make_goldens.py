"""Computes the goldens of tests/model/truth_test.cpp with Hugging Face transformers: fp32, dequantised weights, eager attention.

  python3 tools/goldens/make_goldens.py --binary build/release/bin/fourfold               all of tests/goldens/model/checkpoints.txt
  python3 tools/goldens/make_goldens.py --binary PATH --only NAME --device cuda
  python3 tools/goldens/make_goldens.py --checkpoint DIR --name NAME --tokens 48          one directory in Hugging Face layout
  python3 tools/goldens/make_goldens.py --compare OTHER                                   two folders of goldens

Each golden is NAME.safetensors with tokens I64 [n], logits F32 [n, vocabulary], hidden.N F32 [n, hidden size] (the residual stream after layer N) and,
for checkpoints with an MTP head, mtp.logits F32 [n-1, vocabulary]: row t from the final-normed hidden state t and the embedding of token t+1.
Understands bf16/f16/f32, modelopt NVFP4 and FP8, FP8 with block scales, and compressed-tensors NVFP4 and FP8; fused or per-expert tensors.
Needs torch, transformers (with Qwen3_5Moe), safetensors; tokenizers only for checkpoints that have a tokenizer.json.
"""
import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
GOLDENS = os.path.join(ROOT, "tests/goldens/model")
LIMIT = 1_000_000  # bytes per golden; hidden states of middle layers are left out where all of them do not fit
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SUFFIXES = ("weight_packed", "weight_scale_inv", "weight_scale_2", "weight_scale", "weight_global_scale", "input_global_scale", "input_scale", "k_scale",
            "v_scale", "weight")
TEXT = ("<|im_start|>user\nTom has 17 apples and gives 5 to Mia. How many are left?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "17 - 5 = 12. Tom has 12 apples left.<|im_end|>\n<|im_start|>user\nWhat is 8 * 7?<|im_end|>\n<|im_start|>assistant\n")


def canonical(name):
    """The name in the layout of transformers' text model (model.X, lm_head.weight) or mtp.X; None for tensors of other parts."""
    if "visual." in name or name.endswith("rotary_emb.inv_freq"):
        return None
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        if name.startswith(prefix):
            name = name[len(prefix):]
            break
    if name.startswith(("mtp.", "lm_head.")):
        return name
    return "model." + name


def read_tensors(directory):
    tensors = {}
    for file in sorted(os.listdir(directory)):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(directory, file), "pt") as f:
                for key in f.keys():
                    name = canonical(key)
                    if name is not None:
                        assert name not in tensors, f"{file}: {key} is there twice"
                        tensors[name] = f.get_tensor(key)
    return tensors


def dequantise(base, parts):
    """The fp32 matrix of one module from its stored tensors {suffix: tensor}; formats by what is stored."""
    if "weight_packed" in parts or ("weight" in parts and parts["weight"].dtype == torch.uint8):
        packed = parts.get("weight_packed", parts.get("weight"))
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
        scales = parts["weight_scale"].float()
        if "weight_packed" in parts:
            scale = scales / parts["weight_global_scale"].float().reshape(-1)[0]
        else:
            scale = scales * parts["weight_scale_2"].float().reshape(-1)[0]
        return E2M1[codes] * scale.repeat_interleave(16, -1)
    weight = parts["weight"]
    if weight.dtype != torch.float8_e4m3fn:
        assert weight.is_floating_point() and not any(s.startswith("weight_") for s in parts), f"{base}: {weight.dtype} with {sorted(parts)}"
        return weight.float()
    weight = weight.float()
    if "weight_scale_inv" in parts:
        scale = parts["weight_scale_inv"].float().repeat_interleave(128, 0)[:weight.shape[0]].repeat_interleave(128, 1)[:, :weight.shape[1]]
    else:
        scale = parts["weight_scale"].float()
        scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    return weight * scale


def load_state(directory):
    """{transformers name: fp32 tensor} with fused experts."""
    modules, state = {}, {}
    for name, tensor in read_tensors(directory).items():
        base, _, suffix = name.rpartition(".")
        if suffix in SUFFIXES:
            modules.setdefault(base, {})[suffix] = tensor
        else:
            state[name] = tensor.float()  # A_log, dt_bias, fused experts
    for base, parts in modules.items():
        if "weight" in parts or "weight_packed" in parts:
            state[base + ".weight"] = dequantise(base, parts)
    experts = {}
    for name in list(state):
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found:
            experts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = state.pop(name)
    for base, kinds in experts.items():
        stack = {k: torch.stack([v[i] for i in range(len(v))]) for k, v in kinds.items()}
        state[base + ".gate_up_proj"] = torch.cat([stack["gate"], stack["up"]], 1)
        state[base + ".down_proj"] = stack["down"]
    return state


def load_model(directory):
    """(model, MTP parts or None, config)"""
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse
    with open(os.path.join(directory, "config.json")) as f:
        raw = json.load(f)
    raw = raw.get("text_config", raw)
    raw.pop("quantization_config", None)
    moe = raw.get("num_experts", 0) > 0
    kind = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    config = kind(**{k: v for k, v in raw.items() if k not in ("dtype", "torch_dtype", "model_type")})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    config.dtype = torch.float32
    state = load_state(directory)
    model = (transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM)(config).float().eval()
    if raw.get("tie_word_embeddings"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    head = {k: v for k, v in state.items() if k.startswith("mtp.")}
    result = model.load_state_dict({k: v for k, v in state.items() if not k.startswith("mtp.")}, strict=False)
    assert not result.missing_keys and not result.unexpected_keys, result
    if not head:
        return model, None, config
    module = sparse if moe else dense
    norm = module.Qwen3_5MoeRMSNorm if moe else module.Qwen3_5RMSNorm
    single = copy.deepcopy(config)
    single.layer_types, single.num_hidden_layers = ["full_attention"], 1
    single._attn_implementation = single._experts_implementation = "eager"
    mtp = torch.nn.Module()
    mtp.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
    mtp.layers = torch.nn.ModuleList([(module.Qwen3_5MoeDecoderLayer if moe else module.Qwen3_5DecoderLayer)(single, 0)])
    mtp.float().eval()
    mtp.load_state_dict({k[len("mtp."):]: v for k, v in head.items()}, strict=True)
    return model, mtp, config


def choose_tokens(directory, count, vocabulary, seed):
    path = os.path.join(directory, "tokenizer.json")
    if os.path.exists(path):
        from tokenizers import Tokenizer
        ids = Tokenizer.from_file(path).encode(TEXT).ids
        assert len(ids) >= count, f"the text has {len(ids)} tokens, {count} are wanted"
        return torch.tensor(ids[:count])
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def golden(directory, count, seed, device):
    model, mtp, config = load_model(directory)
    model.to(device)
    tokens = choose_tokens(directory, count, config.vocab_size, seed)
    ids = tokens[None].to(device)
    stream, final = {}, {}
    hooks = [layer.register_forward_hook(lambda m, a, out, i=i: stream.__setitem__(i, out[0] if isinstance(out, tuple) else out))
             for i, layer in enumerate(model.model.layers)]
    hooks.append(model.model.norm.register_forward_hook(lambda m, a, out: final.__setitem__("h", out)))
    logits = model(input_ids=ids, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    out = {"tokens": tokens, "logits": logits}
    if mtp is not None:
        mtp.to(device)
        x = mtp.fc(torch.cat([mtp.pre_fc_norm_embedding(model.model.embed_tokens(ids[:, 1:])), mtp.pre_fc_norm_hidden(final["h"][:, :-1])], -1))
        rows = x.shape[1]
        positions = torch.arange(rows, device=device)[None]
        mask = torch.full((rows, rows), float("-inf"), device=device).triu(1)[None, None]
        rotary = model.model.rotary_emb(x, positions[None].expand(3, 1, rows))
        x = mtp.layers[0](x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        x = x[0] if isinstance(x, tuple) else x
        out["mtp.logits"] = model.lm_head(mtp.norm(x))[0]
    room = LIMIT - 4000 - sum(t.nbytes for t in out.values())
    fits = room // (count * config.hidden_size * 4)
    layers = config.num_hidden_layers
    assert fits >= 1, "not even one hidden state fits, take fewer tokens"
    kept = range(layers) if fits >= layers else sorted({round(i * (layers - 1) / max(1, fits - 1)) for i in range(fits)} | {layers - 1})[-fits:]
    for i in kept:
        out[f"hidden.{i}"] = stream[i].reshape(count, -1)
    return {k: v.detach().cpu().contiguous() for k, v in out.items()}


def describe(out):
    sorted_logits = out["logits"].sort(-1).values
    gap = sorted_logits[:, -1] - sorted_logits[:, -2]
    return (f"{len(out['tokens'])} tokens, hidden {sorted(int(k[7:]) for k in out if k.startswith('hidden.'))}, largest logit {out['logits'].abs().max():.2f}, "
            f"logit std {out['logits'].std():.2f}, smallest top-2 gap {gap.min():.4f}, rows with gap over 0.05: {(gap > 0.05).sum()}")


def compare(other):
    for file in sorted(f for f in os.listdir(GOLDENS) if f.endswith(".safetensors")):
        if not os.path.exists(os.path.join(other, file)):
            continue
        with safe_open(os.path.join(GOLDENS, file), "pt") as a, safe_open(os.path.join(other, file), "pt") as b:
            assert set(a.keys()) == set(b.keys()), file
            parts = []
            for key in sorted(a.keys()):
                x, y = a.get_tensor(key), b.get_tensor(key)
                if x.is_floating_point():
                    parts.append(f"{key} {((x - y).norm() / x.norm()).item():.1e}")
                else:
                    assert torch.equal(x, y), (file, key)
        print(f"{file}: relative differences", ", ".join(parts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build/release/bin/fourfold"), help="the program whose `generate` makes the random checkpoints")
    parser.add_argument("--prepared", metavar="DIR", help="take DIR/NAME instead of generating (for a machine without the program)")
    parser.add_argument("--only", action="append", help="names in checkpoints.txt (default: all)")
    parser.add_argument("--checkpoint", help="a directory in Hugging Face layout instead of checkpoints.txt")
    parser.add_argument("--name", help="with --checkpoint: the golden's name")
    parser.add_argument("--tokens", type=int, default=0, help="length of the token sequence (default 64; 48 with a tokenizer)")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default=GOLDENS)
    parser.add_argument("--compare", metavar="DIR")
    args = parser.parse_args()
    if args.compare:
        return compare(args.compare)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    os.makedirs(args.out, exist_ok=True)
    if args.checkpoint:
        jobs = [(args.name or os.path.basename(os.path.normpath(args.checkpoint)), "dir " + os.path.abspath(args.checkpoint))]
    else:
        with open(os.path.join(GOLDENS, "checkpoints.txt")) as f:
            jobs = [line.strip().split(": ", 1) for line in f if ": " in line and not line.startswith("#")]
        jobs = [j for j in jobs if not args.only or j[0] in args.only]
    for name, arguments in jobs:
        with tempfile.TemporaryDirectory() as work:
            if arguments.startswith("dir "):
                directory = os.path.join(ROOT, arguments[4:])
            elif args.prepared:
                directory = os.path.join(args.prepared, name)
            else:
                directory = os.path.join(work, "checkpoint")
                subprocess.run([args.binary, "generate", directory, *arguments.split()], check=True, stderr=subprocess.DEVNULL)
            count = args.tokens or (48 if os.path.exists(os.path.join(directory, "tokenizer.json")) else 64)
            out = golden(directory, count, args.seed, args.device)
        path = os.path.join(args.out, name + ".safetensors")
        save_file(out, path)
        print(f"{path}: {os.path.getsize(path)} bytes; {describe(out)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
