"""Writes a trained model as a Hugging Face directory: bf16, or NVFP4 in modelopt form (packed e2m1, e4m3 block scales, tensor scales)."""
import json
import os

import torch
from safetensors.torch import load_file, save_file

from .model import nvfp4_parts

PREFIX = "model.language_model."


def layer_tensors(layer, prefix, out):
    """`out(name, tensor, how)`: how is "quantise", "plain" or "float"."""
    out(prefix + "input_layernorm.weight", layer.input_norm, "plain")
    out(prefix + "post_attention_layernorm.weight", layer.post_norm, "plain")
    m = layer.mixer
    if hasattr(m, "q_proj"):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out(f"{prefix}self_attn.{name}.weight", getattr(m, name).weight, "quantise")
        out(prefix + "self_attn.q_norm.weight", m.q_norm, "plain")
        out(prefix + "self_attn.k_norm.weight", m.k_norm, "plain")
    else:
        for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
            out(f"{prefix}linear_attn.{name}.weight", getattr(m, name).weight, "quantise")
        for name in ("in_proj_b", "in_proj_a"):
            out(f"{prefix}linear_attn.{name}.weight", getattr(m, name).weight, "plain")
        out(prefix + "linear_attn.conv1d.weight", m.conv.unsqueeze(1), "plain")
        out(prefix + "linear_attn.A_log", m.A_log, "float")
        out(prefix + "linear_attn.dt_bias", m.dt_bias, "plain")
        out(prefix + "linear_attn.norm.weight", m.norm, "float")
    e = layer.mlp
    out(prefix + "mlp.gate.weight", e.gate, "plain")
    out(prefix + "mlp.shared_expert_gate.weight", e.shared_gate, "plain")
    s = e.shared_gate_up.shape[0] // 2
    # gate and up share the tensor scale, as the published exports do
    out.pair(prefix + "mlp.shared_expert.gate_proj.weight", prefix + "mlp.shared_expert.up_proj.weight", e.shared_gate_up[:s], e.shared_gate_up[s:])
    out(prefix + "mlp.shared_expert.down_proj.weight", e.shared_down.weight, "quantise")
    for n in range(e.e):
        base = f"{prefix}mlp.experts.{n}."
        out.pair(base + "gate_proj.weight", base + "up_proj.weight", e.gate_up[n, :e.i], e.gate_up[n, e.i:])
        out(base + "down_proj.weight", e.down[n], "quantise")


class Collector:
    def __init__(self, quantise, input_scales=None):
        self.tensors, self.quantise, self.input_scales, self.plain = {}, quantise, input_scales or {}, []

    def __call__(self, name, tensor, how, tensor_scale=None):
        w = tensor.detach().float().cpu()
        if how == "quantise" and self.quantise:
            module = name[:-len(".weight")]
            if tensor_scale is None:
                tensor_scale = w
            codes, scale, ws2 = nvfp4_parts(w, (0, 1)) if tensor_scale is w else self.with_scale(w, tensor_scale)
            self.tensors[name] = pack(codes)
            self.tensors[module + ".weight_scale"] = scale.to(torch.float8_e4m3fn)
            self.tensors[module + ".weight_scale_2"] = ws2.reshape(())
            self.tensors[module + ".input_scale"] = torch.tensor(float(self.input_scales.get(module, 1.0)), dtype=torch.float32)
        else:
            self.tensors[name] = w.clone() if how == "float" else w.to(torch.bfloat16)
            self.plain.append(name)

    @staticmethod
    def with_scale(w, both):
        codes, scale, ws2 = nvfp4_parts(both, (0, 1))
        n = w.shape[0]
        first = torch.equal(both[:n], w)
        return (codes[:n] if first else codes[n:]), (scale[:n] if first else scale[n:]), ws2

    def pair(self, gate_name, up_name, gate, up):
        both = torch.cat((gate, up)).detach().float().cpu()
        self(gate_name, gate, "quantise", both)
        self(up_name, up, "quantise", both)


def pack(codes):
    """Signed grid values [N, K/16, 16] -> uint8 [N, K/2], even element in the low nibble."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    index = torch.bucketize(codes.abs(), grid).to(torch.uint8)
    nibble = (index | ((codes < 0).to(torch.uint8) << 3)).flatten(1)
    return nibble[:, 0::2] | (nibble[:, 1::2] << 4)


def config_json(c, eos, quantised, plain):
    layers = c["num_hidden_layers"]
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": c["vocab_size"], "hidden_size": c["hidden_size"], "num_hidden_layers": layers,
        "full_attention_interval": c["full_attention_interval"],
        "layer_types": ["full_attention" if (i + 1) % c["full_attention_interval"] == 0 else "linear_attention" for i in range(layers)],
        "num_attention_heads": c["num_attention_heads"], "num_key_value_heads": c["num_key_value_heads"], "head_dim": c["head_dim"],
        "attn_output_gate": True, "attention_bias": False, "attention_dropout": 0.0,
        "linear_num_key_heads": c["linear_num_key_heads"], "linear_num_value_heads": c["linear_num_value_heads"],
        "linear_key_head_dim": c["linear_key_head_dim"], "linear_value_head_dim": c["linear_value_head_dim"],
        "linear_conv_kernel_dim": c["linear_conv_kernel_dim"], "mamba_ssm_dtype": "float32",
        "num_experts": c["num_experts"], "num_experts_per_tok": c["num_experts_per_tok"], "moe_intermediate_size": c["moe_intermediate_size"],
        "shared_expert_intermediate_size": c["shared_expert_intermediate_size"], "router_aux_loss_coef": 0.001, "output_router_logits": False,
        "tie_word_embeddings": False, "rms_norm_eps": c["rms_norm_eps"], "hidden_act": "silu", "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": c["rope_theta"], "partial_rotary_factor": c["partial_rotary_factor"],
                            "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "partial_rotary_factor": c["partial_rotary_factor"], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "bos_token_id": None, "eos_token_id": eos["<|endoftext|>"], "pad_token_id": None, "dtype": "bfloat16", "initializer_range": 0.02,
        "use_cache": True}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
              "image_token_id": eos["<|image_pad|>"], "video_token_id": eos["<|video_pad|>"], "vision_start_token_id": eos["<|vision_start|>"],
              "vision_end_token_id": eos["<|vision_end|>"], "dtype": "bfloat16", "transformers_version": "5.17.0", "text_config": text}
    quantisation = None
    if quantised:
        ignore = ["lm_head", PREFIX + "embed_tokens", "mtp.fc"]
        for i in range(layers):
            base = f"{PREFIX}layers.{i}."
            ignore += [base + "mlp.gate", base + "mlp.shared_expert_gate"]
            if text["layer_types"][i] == "linear_attention":
                ignore += [base + "linear_attn.conv1d", base + "linear_attn.in_proj_a", base + "linear_attn.in_proj_b"]
        ignore += ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
        four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        config["quantization_config"] = {"config_groups": {"group_0": {"input_activations": four, "weights": four, "targets": ["Linear"]}},
                                         "ignore": ignore, "quant_algo": "NVFP4", "quant_method": "modelopt", "producer": {"name": "fourfold"}}
        quantisation = {"producer": {"name": "fourfold"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                                                                          "exclude_modules": ignore}}
    return config, quantisation


def drafter_tensors(model, out):
    out("mtp.fc.weight", model.mtp_fc.weight, "plain")
    out("mtp.pre_fc_norm_embedding.weight", model.mtp_norm_embedding, "plain")
    out("mtp.pre_fc_norm_hidden.weight", model.mtp_norm_hidden, "plain")
    out("mtp.norm.weight", model.mtp_norm, "plain")
    layer_tensors(model.mtp_layer, "mtp.layers.0.", out)


def write(model, directory, token_ids, quantised, input_scales=None):
    out = Collector(quantised, input_scales)
    out(PREFIX + "embed_tokens.weight", model.embed, "plain")
    out(PREFIX + "norm.weight", model.norm, "plain")
    out("lm_head.weight", model.lm_head, "plain")
    for i, layer in enumerate(model.layers):
        layer_tensors(layer, f"{PREFIX}layers.{i}.", out)
    drafter_tensors(model, out)
    os.makedirs(directory, exist_ok=True)
    save_file({k: v.contiguous() for k, v in out.tensors.items()}, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
    config, quantisation = config_json(model.c, token_ids, quantised, out.plain)
    files = {"config.json": config, "hf_quant_config.json": quantisation, "generation_config.json": {
        "bos_token_id": None, "eos_token_id": [token_ids["<|im_end|>"], token_ids["<|endoftext|>"]], "pad_token_id": token_ids["<|endoftext|>"],
        "do_sample": False, "transformers_version": "5.17.0"}}
    for name, value in files.items():
        if value is not None:
            with open(os.path.join(directory, name), "w") as f:
                json.dump(value, f, indent=2)
                f.write("\n")


class Reader:
    """The other way: called as a Collector is, it fills the model's parameters from a checkpoint's tensors, NVFP4 as what it stands for."""

    def __init__(self, file):
        self.tensors = load_file(file)

    @torch.no_grad()
    def __call__(self, name, tensor, how):
        module = name[:-len(".weight")]
        value = self.tensors[name]
        if module + ".weight_scale" in self.tensors:
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            codes = torch.stack((value & 15, value >> 4), -1).flatten(1).long()
            scale = self.tensors[module + ".weight_scale"].float() * self.tensors[module + ".weight_scale_2"]
            value = (grid[codes].unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(1)
        tensor.copy_(value.float().reshape(tensor.shape))

    def pair(self, gate_name, up_name, gate, up):
        self(gate_name, gate, "quantise")
        self(up_name, up, "quantise")


def read(model, file):
    """Fills `model` with what write() wrote."""
    reader = Reader(file)
    reader(PREFIX + "embed_tokens.weight", model.embed, "plain")
    reader(PREFIX + "norm.weight", model.norm, "plain")
    reader("lm_head.weight", model.lm_head, "plain")
    for i, layer in enumerate(model.layers):
        layer_tensors(layer, f"{PREFIX}layers.{i}.", reader)
    drafter_tensors(model, reader)


def replace_drafter(model, file, input_scales):
    """Writes the MTP head anew into a checkpoint in NVFP4; all other tensors keep their bytes."""
    out = Collector(True, input_scales)
    drafter_tensors(model, out)
    tensors = load_file(file)
    assert set(out.tensors) == {name for name in tensors if name.startswith("mtp.")}
    tensors.update({k: v.contiguous() for k, v in out.tensors.items()})
    save_file(tensors, file + ".new", metadata={"format": "pt"})
    os.replace(file + ".new", file)
