"""Checkpoints of Qwen3.5 with a layer that drafts tokens, which transformers does not have, and what it computes, in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def add_draft_layer(folder: Path, change: Callable[[dict[str, Any]], None] = lambda tensors: None) -> None:
    """Random tensors of the layer beside those in a folder, in their type; `change`: of all of them, by name."""
    import torch
    from safetensors.torch import load_file, save_file

    written = json.loads((folder / "config.json").read_text())
    config = written.get("text_config", written)
    hidden, inner, head = config["hidden_size"], config.get("intermediate_size", 0), config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = "mtp.layers.0."
    matrices = {
        "mtp.fc": (hidden, 2 * hidden),
        f"{layer}self_attn.q_proj": (2 * heads * head, hidden),
        f"{layer}self_attn.k_proj": (kv_heads * head, hidden),
        f"{layer}self_attn.v_proj": (kv_heads * head, hidden),
        f"{layer}self_attn.o_proj": (hidden, heads * head),
    }
    owners = {"mlp.": inner}
    if experts := config.get("num_experts"):
        matrices |= {f"{layer}mlp.gate": (experts, hidden), f"{layer}mlp.shared_expert_gate": (1, hidden)}
        owners = {f"mlp.experts.{i}.": config["moe_intermediate_size"] for i in range(experts)}
        owners["mlp.shared_expert."] = config["shared_expert_intermediate_size"]
    for owner, width in owners.items():
        matrices |= {f"{layer}{owner}{part}_proj": (width, hidden) for part in ("gate", "up")}
        matrices[f"{layer}{owner}down_proj"] = (hidden, width)
    gains = {f"mtp.{name}": hidden for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    gains |= {f"{layer}{name}": hidden for name in ("input_layernorm", "post_attention_layernorm")}
    gains |= {f"{layer}self_attn.{name}": head for name in ("q_norm", "k_norm")}
    tensors = load_file(folder / "model.safetensors")
    kind, random = next(iter(tensors.values())).dtype, torch.Generator().manual_seed(11)
    for name, shape in matrices.items():
        tensors[f"{name}.weight"] = (0.1 * torch.randn(shape, generator=random)).to(kind)
    for name, width in gains.items():
        tensors[f"{name}.weight"] = (0.3 * torch.randn(width, generator=random)).to(kind)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def plan_drafts(tensors: dict[str, Any], right: bool) -> None:
    """Change a checkpoint whose head is its own: the token after t is (5 t + 3) mod the vocabulary, whatever came before, and
    the layer drafts just that, or a token that never comes."""
    import torch

    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) or "norm" in name:
            tensors[name] = torch.zeros_like(tensor)
        if name.endswith("linear_attn.norm.weight"):
            tensors[name] = torch.ones_like(tensor)
    table = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"].float(), dim=1)
    count, hidden = table.shape
    head = torch.empty_like(table)
    head[(5 * torch.arange(count) + 3) % count] = table
    kind = tensors["lm_head.weight"].dtype
    tensors["lm_head.weight"] = head.to(kind)
    unit = torch.eye(hidden)
    tensors["mtp.fc.weight"] = torch.cat([unit if right else -unit, torch.zeros_like(unit)], dim=1).to(kind)


def read_tensors(folder: Path) -> dict[str, Array]:
    from safetensors.torch import load_file

    return {name: tensor.double().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def drafted_states(folder: Path, tensors: Mapping[str, Array], tokens: Sequence[int], hidden: Array) -> Array:
    """What the layer gives after its norm, float64 [len(tokens), hidden size], row t of token t and row t of `hidden`: the
    state of the decoder, or what the layer itself gave, at the token before.  Row 0 has none, and is not read."""
    config = json.loads((folder / "config.json").read_text())
    eps, head, p = config["rms_norm_eps"], config["head_dim"], "mtp.layers.0."
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def rms(x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + tensors[f"{name}.weight"])

    def linear(x: Array, name: str) -> Array:
        return x @ tensors[f"{name}.weight"].T

    embedded = rms(tensors["model.embed_tokens.weight"][list(tokens)], "mtp.pre_fc_norm_embedding")
    x = linear(np.concatenate([embedded, rms(hidden, "mtp.pre_fc_norm_hidden")], axis=1), "mtp.fc")
    normed, count = rms(x, f"{p}input_layernorm"), len(tokens)
    q, gate = np.split(linear(normed, f"{p}self_attn.q_proj").reshape(count, heads, 2 * head), 2, axis=2)
    k, v = (linear(normed, f"{p}self_attn.{name}_proj").reshape(count, kv_heads, head) for name in "kv")
    rope = config["rope_parameters"]
    turned = int(head * rope["partial_rotary_factor"])
    angles = np.arange(count)[:, None] * rope["rope_theta"] ** (-np.arange(0, turned, 2) / turned)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotated(x: Array) -> Array:
        a, b, rest = np.split(x, [turned // 2, turned], axis=2)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=2)

    q, k = rotated(rms(q, f"{p}self_attn.q_norm")), rotated(rms(k, f"{p}self_attn.k_norm"))
    k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
    attended = np.zeros((count, heads, head))
    for t in range(1, count):
        scores = np.einsum("hd,thd->ht", q[t], k[1 : t + 1]) * head**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended[t] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v[1 : t + 1])
    x = x + linear((attended / (1 + np.exp(-gate))).reshape(count, -1), f"{p}self_attn.o_proj")
    normed = rms(x, f"{p}post_attention_layernorm")

    def mlp(x: Array, owner: str) -> Array:
        g = linear(x, f"{owner}gate_proj")
        return linear(g / (1 + np.exp(-g)) * linear(x, f"{owner}up_proj"), f"{owner}down_proj")

    if not config.get("num_experts"):
        return rms(x + mlp(normed, f"{p}mlp."), "mtp.norm")
    scores = np.exp(linear(normed, f"{p}mlp.gate"))
    found = mlp(normed, f"{p}mlp.shared_expert.") / (1 + np.exp(-linear(normed, f"{p}mlp.shared_expert_gate")))
    for t in range(count):
        chosen = np.argsort(-scores[t])[: config["num_experts_per_tok"]]
        # Qwen3.5 has no key for it.
        total = scores[t, chosen if config.get("norm_topk_prob", True) else slice(None)].sum()
        for e in chosen:
            found[t] += scores[t, e] / total * mlp(normed[t], f"{p}mlp.experts.{e}.")
    return rms(x + found, "mtp.norm")
