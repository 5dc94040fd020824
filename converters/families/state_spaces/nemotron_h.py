"""Nemotron-H and Nemotron Nano 2: every layer is one block, a state space (Mamba-2's), attention without rope, or an MLP of
relu^2.

A layer has one norm and one `mixer`, whatever that is.  transformers (5.23) raises the steps of a state space to
`time_step_min` where it reads a prompt, and not where it reads a token; the limits of the published models' own code are
`time_step_limit`, which are read here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL
from edgeq.converters.families.family import EMBEDDING, NORM, FamilyDescription, Values
from edgeq.converters.families.rearranged import Sources, flag
from edgeq.converters.families.state_spaces.granite_hybrid import space_of, state_space_sources
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_integer
from edgeq.network.rope import Rope
from edgeq.network.stack import MAX_SIZES

KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "ssd"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
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
    """What each layer is: "ssd", "attention" or "mlp"."""
    key = next((each for each in LAYER_KEYS if values.get(each) is not None), None)
    if key is None:
        raise FormatError(f"config.json says of no layer what it is; expected {' or '.join(LAYER_KEYS)}")
    found, kind = values[key], str if key == "hybrid_override_pattern" else list
    if type(found) is not kind or not 1 <= len(found) <= MAX_SIZES["num_hidden_layers"]:
        raise FormatError(f"{key} is {str(found)[:80]!r}; expected a {kind.__name__} of layers")
    for each in found:
        if each in ("E", "moe"):
            raise UnsupportedError(
                f"{key} has {each!r}, layers of experts (Nemotron 3), which are not supported; supported: models whose layers "
                "are state spaces (M), attention (*) and MLPs (-): Nemotron-H, Nemotron Nano 2"
            )
        if not isinstance(each, str) or each not in KINDS:
            raise UnsupportedError(f"{key} has {str(each)[:80]!r}; supported: {', '.join(KINDS)}")
    kinds = [KINDS[each] for each in found]
    for needed in ("ssd", "attention", "mlp"):
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
    return {
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": values["attention_head_dim"] if head_dim is None else head_dim,
        "rms_norm_eps": values["layer_norm_epsilon"],
        "rope": Rope(10000.0),
        "layers_without_rope": tuple(range(len(kinds))),
        "ssd": space_of(named, layers["ssd"], inner, mlp_layers=layers["mlp"]),
    }


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
    mlp_bias, conv_bias = flag(values, "mlp_bias"), flag(values, "use_conv_bias")
    return replace(
        NEMOTRON_H,
        defaults={**NEMOTRON_H.defaults, "num_hidden_layers": len(layer_kinds(values))},
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
    unused=drafting,
    variants=nemotron_h,
)
