"""What llama.cpp's converter makes of checkpoints whose layers have states: metadata and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


DRAFTS = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm"}
DRAFTS |= {"mtp.norm": "shared_head_norm"}


def draft_name(config: Mapping[str, Any], name: str) -> str:
    """The name of a tensor whose layer, if it drafts tokens, comes after the others; what only it has by llama.cpp's name."""
    after = config["num_hidden_layers"]
    module, _, end = name.rpartition(".")
    return (
        f"blk.{after}.nextn.{DRAFTS[module]}.{end}"
        if module in DRAFTS
        else name.replace("mtp.layers.0.", f"model.layers.{after}.")
    )


def delta_net_metadata(config: Mapping[str, Any], own: str) -> dict[str, Any]:
    drafts = config.get("mtp_num_hidden_layers", 0)
    heads = config["linear_num_value_heads"]
    keys = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "attention.recurrent_layers": [each == "linear_attention" for each in config["layer_types"]] + [False] * drafts,
    }
    if drafts:
        keys |= {"block_count": config["num_hidden_layers"] + drafts, "nextn_predict_layers": drafts}
    return keys | ({} if own == "qwen3next" else {"rope.dimension_sections": [11, 11, 10, 0]})


def delta_net_tensors(config: Mapping[str, Any], name: str, values: Array) -> dict[str, Array]:
    """A tensor of these families as llama.cpp's converter has it."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: values + 1}
    stem, _, part = name.partition("linear_attn.")
    if part == "in_proj_qkvz.weight":
        shared, wide = heads // keys, (config["linear_key_head_dim"], config["linear_value_head_dim"])
        cuts = np.cumsum([wide[0], wide[0], shared * wide[1]])
        q, k, v, z = np.split(values.reshape(keys, -1, values.shape[-1]), cuts, 1)
        q, k, v, z = (each.reshape(-1, values.shape[-1]) for each in (q, k, v, z))
        return {
            f"{stem}linear_attn.in_proj_qkv.weight": np.concatenate([q, k, v]),
            f"{stem}linear_attn.in_proj_z.weight": z,
        }
    if part.startswith("conv1d"):
        values = values[:, 0]
    if part == "A_log":
        values = -np.exp(values)
    if part not in ("", "norm.weight") and config["model_type"] != "qwen3_next":
        whole = {"in_proj_qkv.weight": 2, "conv1d.weight": 2}.get(part, 0) * keys * config["linear_key_head_dim"]
        turned = values.T if part == "out_proj.weight" else values
        moved = turned[whole:].reshape(keys, heads // keys, -1, *turned.shape[1:]).swapaxes(0, 1)
        turned = np.concatenate([turned[:whole], moved.reshape(-1, *turned.shape[1:])])
        values = np.ascontiguousarray(turned.T if part == "out_proj.weight" else turned)
    return {name.replace("dt_bias", "dt_proj.bias"): values}


NEMOTRON_H_KEYS = {"mamba_n_heads": "mamba_num_heads", "mamba_d_state": "ssm_state_size", "mamba_n_groups": "n_groups"}
NEMOTRON_H_KEYS |= {"mamba_d_conv": "conv_kernel", "layer_types": "layers_block_type", "rms_norm_eps": "layer_norm_epsilon"}


def nemotron_h_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the keys of other families with state spaces."""
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    found = {**config, **{ours: config[theirs] for ours, theirs in NEMOTRON_H_KEYS.items()}, "mamba_d_ssm": inner}
    found["num_hidden_layers"] = len(found["layer_types"])
    if "moe" not in found["layer_types"]:
        del found["moe_intermediate_size"]
        return found
    shared = config["moe_shared_expert_intermediate_size"]
    return found | {"num_experts": config["n_routed_experts"], "shared_expert_intermediate_size": shared}


def state_space_metadata(config: Mapping[str, Any], own: str) -> dict[str, Any]:
    keys = {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"],
    }
    if own in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        attends = [each in ("attention", "full_attention") for each in config["layer_types"]]
        keys["attention.head_count_kv"] = [config["num_key_value_heads"] * each for each in attends]
    if own in ("nemotron_h", "nemotron_h_moe"):
        inside, size = ("mlp", "intermediate_size") if own == "nemotron_h" else ("moe", "moe_intermediate_size")
        keys["attention.layer_norm_epsilon"] = config["layer_norm_epsilon"]
        keys["feed_forward_length"] = [config[size] * (each == inside) for each in config["layer_types"]]
    if own == "nemotron_h_moe":
        keys |= {"expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1, "expert_gating_func": 2}
        keys |= {"expert_weights_norm": config["norm_topk_prob"], "expert_weights_scale": config["routed_scaling_factor"]}
    if own == "granitehybrid":
        keys["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
        shared = config["shared_intermediate_size"]
        keys |= {"expert_shared_feed_forward_length" if config["num_local_experts"] else "feed_forward_length": shared}
    return keys


def state_space_tensors(config: Mapping[str, Any], name: str, values: Array) -> dict[str, Array]:
    """A tensor of these families as llama.cpp's converter has it."""
    if config["model_type"] == "falcon_h1":
        values = values * multiplied(config, name)
    part = name.rpartition(".mixer." if config["model_type"] == "nemotron_h" else ".mamba.")[2]
    if part == "conv1d.weight":
        values = values[:, 0]
    if part in ("A_log", "D"):
        values = (-np.exp(values) if part == "A_log" else values)[:, None]
    if part == "norm.weight" and name != part:
        values = values.reshape(config["mamba_n_groups"], -1)
    if ".mixer.experts." in name:
        return {name.replace(".mixer.experts.", ".mlp.experts.").replace("backbone.", "model."): values}
    return {name.replace("dt_bias", "dt_proj.bias").replace("correction_bias", "correction.bias"): values}


def multiplied(config: Mapping[str, Any], name: str) -> np.float32 | Array:
    """The multipliers of a Falcon-H1 that llama.cpp's converter puts into a tensor, for all rows or for each."""
    attends, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    found = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": attends,
        "k_proj": attends * config["key_multiplier"],
        "v_proj": attends,
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "out_proj": config["ssm_out_multiplier"],
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module != "in_proj":
        return np.float32(found.get(module, 1))
    inner = config["mamba_d_ssm"] or config["mamba_expand"] * config["hidden_size"]
    shared = config["mamba_n_groups"] * config["mamba_d_state"]
    factors = np.array(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
    return np.repeat(factors, [inner, inner, shared, shared, config["mamba_n_heads"]]).astype(np.float32)[:, None]
