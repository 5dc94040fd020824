"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano: every layer is one block, a state space (Mamba-2's), attention without rope, or
an MLP of relu^2; in Nemotron 3 experts of relu^2, and one more for all tokens, in place of every MLP.

A layer has one norm and one `mixer`, whatever that is.  transformers (5.23) raises the steps of a state space to
`time_step_min` where it reads a prompt, and not where it reads a token; the limits of the published models' own code are
`time_step_limit`, which are read here.

A router of experts gives each a sigmoid; those whose sigmoid and own bias add up to most are chosen, and weighted by the
sigmoid alone, times `routed_scaling_factor`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL
from edgeq.converters.families.family import (
    EMBEDDING,
    NORM,
    FamilyDescription,
    ScaleMapping,
    Values,
    mixer_mappings,
    network_mappings,
)
from edgeq.converters.families.rearranged import Sources, flag, multiplier
from edgeq.converters.families.state_spaces.granite_hybrid import space_of, state_space_sources
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_integer
from edgeq.network.rope import Rope
from edgeq.network.stack import MAX_SIZES, Stack

KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "ssd"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "experts"),
}
"""What a layer is, by its character in `hybrid_override_pattern` and by its names in lists."""
LAYER_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Where the layers are described; the first that is there counts, as in transformers."""
SPACE_KEYS = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "rms_norm_eps": "layer_norm_epsilon",
}
"""Keys that describe the state space in other families -> what they are called here."""


def layer_kinds(values: Values) -> list[str]:
    """What each layer is: "ssd", "attention", and "mlp" or "experts"."""
    key = next((each for each in LAYER_KEYS if values.get(each) is not None), None)
    if key is None:
        raise FormatError(f"config.json says of no layer what it is; expected {' or '.join(LAYER_KEYS)}")
    found, kind = values[key], str if key == "hybrid_override_pattern" else list
    if type(found) is not kind or not 1 <= len(found) <= MAX_SIZES["num_hidden_layers"]:
        raise FormatError(f"{key} is {str(found)[:80]!r}; expected a {kind.__name__} of layers")
    for each in found:
        if not isinstance(each, str) or each not in KINDS:
            raise UnsupportedError(f"{key} has {str(each)[:80]!r}; supported: {', '.join(KINDS)}")
    kinds = [KINDS[each] for each in found]
    if {"mlp", "experts"} <= set(kinds):
        raise UnsupportedError(f"{key} has MLPs and experts; supported: models with one of them")
    for needed in ("ssd", "attention", "experts" if "experts" in kinds else "mlp"):
        if needed not in kinds:
            raise UnsupportedError(f"{key} has no layer of kind {needed!r}; supported: models with layers of every kind")
    return kinds


def nemotron_h_settings(values: Values) -> dict[str, Any]:
    kinds, head_dim = layer_kinds(values), values["head_dim"]
    if len(kinds) != values["num_hidden_layers"]:
        raise FormatError(f"num_hidden_layers is {values['num_hidden_layers']}; {len(kinds)} layers are described")
    layers = {kind: tuple(i for i, each in enumerate(kinds) if each == kind) for kind in set(kinds)}
    named: Values = {**values, **{ours: values[theirs] for ours, theirs in SPACE_KEYS.items()}}
    for key in ("mamba_num_heads", "mamba_head_dim"):
        check_integer(key, values[key], 1, MAX_SIZES["intermediate_size"])
    inner = values["mamba_num_heads"] * values["mamba_head_dim"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    inside = layers.get("mlp") or layers["experts"]
    return (expert_settings(values) if "experts" in layers else {}) | {
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": values["attention_head_dim"] if head_dim is None else head_dim,
        "rms_norm_eps": values["layer_norm_epsilon"],
        "rope": Rope(10000.0),
        "layers_without_rope": tuple(range(len(kinds))),
        "ssd": space_of(named, layers["ssd"], inner, mlp_layers=inside),
    }


def expert_settings(values: Values) -> dict[str, Any]:
    """UnsupportedError: experts of a width of their own, or of groups of which some are chosen first."""
    if values["moe_latent_size"] is not None:
        raise UnsupportedError(
            f"moe_latent_size is {str(values['moe_latent_size'])[:80]}; supported: experts as wide as the stream (null)"
        )
    for key in ("n_group", "topk_group", "n_shared_experts"):
        if values[key] != 1 or type(values[key]) is not int:
            raise UnsupportedError(f"{key} is {str(values[key])[:80]}; supported: 1")
    experts, shared = values["n_routed_experts"], values["moe_shared_expert_intermediate_size"]
    check_integer("moe_shared_expert_intermediate_size", shared, 1, MAX_SIZES["intermediate_size"])
    return {
        "intermediate_size": values["moe_intermediate_size"],
        "num_experts": experts,
        "num_experts_per_tok": values["num_experts_per_tok"],
        "norm_topk_prob": flag(values, "norm_topk_prob"),
        "expert_scores": "sigmoid",
        "routed_scaling_factor": multiplier(values, "routed_scaling_factor"),
        "shared_expert_intermediate_size": shared,
        "shared_expert_gate": False,
    }


def expert_sources(config: ModelConfig, layer: int) -> Sources:
    """The experts of a layer, one after another in a tensor of each kind, or apart, as in published checkpoints."""
    ours, theirs = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.mixer."
    hidden, count, shared = config.hidden_size, config.num_experts, config.shared_expert_intermediate_size
    router, sources = (count, hidden), Sources()
    sources[f"{ours}gate.weight"] = TensorSource(f"{theirs}gate.weight", router, router)
    sources[f"{ours}expert_biases.weight"] = TensorSource(f"{theirs}gate.e_score_correction_bias", (count,), (count,))
    for part, shape in (("up", (shared, hidden)), ("down", (hidden, shared))):
        sources[f"{ours}shared_expert.{part}_proj.weight"] = TensorSource(
            f"{theirs}shared_experts.{part}_proj.weight", shape, shape
        )
    inner = config.intermediate_size
    for part, shape in (("up", (inner, hidden)), ("down", (hidden, inner))):
        for expert in range(count):
            apart = TensorSource(f"{theirs}experts.{expert}.{part}_proj.weight", shape, shape)
            sources[f"{ours}experts.{expert}.{part}_proj.weight"] = TensorSource(
                f"{theirs}experts.{part}_proj", (count, *shape), shape, shape[0] * expert, otherwise=apart
            )
    return sources


def nemotron_h_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """The norm before experts is read by all of them and by their router; no factor passes their relu^2."""
    if not config.num_experts:
        return network_mappings(config)
    readers = (*(f"experts.{expert}.up" for expert in range(config.num_experts)), "shared.up")
    return (*mixer_mappings(config), ScaleMapping("mlp_norm", readers, "mlp", followers=("router",)))


def nemotron_h_sources(config: ModelConfig, conv_bias: bool, mlp_bias: bool) -> Sources:
    hidden, inner, queries, keys = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    size, matrix = (hidden,), (config.vocab_size, hidden)
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    mlp = {"up": (inner, hidden), "down": (hidden, inner)}
    sources = {
        EMBEDDING: TensorSource("model.embeddings.weight", matrix, matrix),
        NORM: TensorSource("model.norm_f.weight", size, size),
    }
    for layer in range(config.num_hidden_layers):
        p, (mixes, _) = f"model.layers.{layer}.", config.blocks(layer)
        norm = "input_layernorm" if mixes else "post_attention_layernorm"
        sources[f"{p}{norm}.weight"] = TensorSource(f"{p}norm.weight", size, size)
        if layer in config.ssd_layers:
            sources |= state_space_sources(config, p, "mixer.", conv_bias)
            continue
        if config.num_experts and not mixes:
            sources |= expert_sources(config, layer)
            continue
        for part, shape in (attention if mixes else mlp).items():
            ours, theirs = f"{p}{'self_attn' if mixes else 'mlp'}.{part}_proj", f"{p}mixer.{part}_proj"
            sources[f"{ours}.weight"] = TensorSource(f"{theirs}.weight", shape, shape)
            if mlp_bias and not mixes:
                sources[f"{ours}.bias"] = TensorSource(f"{theirs}.bias", shape[:1], shape[:1])
    return sources


def drafting(config: Any, tensor: str) -> bool:
    """Layers that draft tokens, which are not run."""
    return tensor.startswith("mtp.")


def nemotron_h(hf: Values) -> FamilyDescription:
    """Newer checkpoints leave the number of layers out."""
    values = {**NEMOTRON_H.defaults, **hf}
    mlp_bias, conv_bias, kinds = flag(values, "mlp_bias"), flag(values, "use_conv_bias"), layer_kinds(values)
    if mlp_bias and "experts" in kinds:
        raise UnsupportedError("mlp_bias is True beside experts; supported: experts without biases")
    return replace(
        NEMOTRON_H,
        defaults={**NEMOTRON_H.defaults, "num_hidden_layers": len(kinds)},
        biases=("up", "down") if mlp_bias else (),
        sources=partial(nemotron_h_sources, conv_bias=conv_bias, mlp_bias=mlp_bias),
    )


NEMOTRON_H = FamilyDescription(
    "NemotronHForCausalLM",
    {key: value for key, value in DEFAULTS.items() if not key.startswith(("rope", "rms_norm"))}
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_limit": [0.0, math.inf],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    {key: values for key, values in NEUTRAL.items() if key != "mlp_bias"}
    | {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": (None, "silu"),
        "mamba_proj_bias": (None, False),
        "use_bias": (None, False),
        "sliding_window": (None,),
        "tie_word_embeddings": (False,),
    },
    nemotron_h_settings,
    keys={"hidden_act": "mlp_hidden_act"},
    renamed={"backbone.": "model."},
    mappings=nemotron_h_mappings,
    unused=drafting,
    variants=nemotron_h,
)
