"""Granite 4: layers of a state space, Mamba-2's, among those of attention; with or without experts beside an MLP.

Its multipliers are those of the dense models (granite.py): the residual stream is divided by one of them, and so are the
epsilons of the norms that read it, but not that of the norm in a state space.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.experts import expert_mappings
from edgeq.converters.families.decoders.granite import (
    MULTIPLIERS,
    gate_up_down,
    granite_expert_settings,
    granite_settings,
    granite_sources,
)
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, NO_EXPERTS
from edgeq.converters.families.family import FamilyDescription, Values, network_mappings
from edgeq.converters.families.rearranged import Sources, convolution, flag, multiplier
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_integer
from edgeq.network.ssd import StateSpace
from edgeq.network.stack import MAX_SIZES

STATE_SPACE, ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")
"""Names of each kind of layer, as transformers saves them and as published checkpoints have them."""


def ssd_layers(values: Values) -> tuple[int, ...]:
    """Layers of a state space, as `layer_types` says, or `layers_block_type`; without them all."""
    layers = values["num_hidden_layers"]
    types = values["layers_block_type"] if values["layer_types"] is None else values["layer_types"]
    if types is None:
        return tuple(range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise FormatError(f"layer_types is not a list of {layers} entries, one per layer")
    kinds = (*STATE_SPACE, *ATTENTION)
    if unknown := sorted({str(each) for each in types} - set(kinds)):
        raise UnsupportedError(f"layer_types {unknown[0]!r:.80} is not supported; supported: {', '.join(kinds)}")
    return tuple(i for i, each in enumerate(types) if each in STATE_SPACE)


def time_step_limits(values: Values, key: str) -> dict[str, Any]:
    """Fields of `StateSpace` of two limits in a list; transformers writes {"__float__": "Infinity"} for no upper one."""
    limits = values[key]
    if not isinstance(limits, list) or len(limits) != 2:
        raise FormatError(f"{key} is {str(limits)[:80]}; expected a list of two numbers")
    least, most = (math.inf if each == {"__float__": "Infinity"} else each for each in limits)
    return {"time_step_min": least, "time_step_max": None if most == math.inf else most}


def space_of(values: Values, layers: tuple[int, ...], inner: int, **others: Any) -> StateSpace:
    """The state space that keys of `mamba_` describe, of so many inner channels; others: fields that not all families have."""
    heads = values["mamba_n_heads"]
    check_integer("mamba_n_heads", heads, 1, MAX_SIZES["num_attention_heads"])
    head_dim = inner // heads if values["mamba_d_head"] == "auto" else values["mamba_d_head"]
    if type(head_dim) is not int or head_dim * heads != inner:
        raise FormatError(f"mamba_d_head is {head_dim!r:.80} for {heads} mamba_n_heads; times each other they must be {inner}")
    return StateSpace(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        groups=values["mamba_n_groups"],
        state_dim=values["mamba_d_state"],
        taps=values["mamba_d_conv"],
        norm_eps=values["rms_norm_eps"],
        **time_step_limits(values, "time_step_limit"),
        **others,
    )


def expanded(values: Values) -> int:
    """Inner channels of a state space, where they are a multiple of the stream's."""
    check_integer("mamba_expand", values["mamba_expand"], 1, MAX_SIZES["hidden_size"])
    return int(values["mamba_expand"] * values["hidden_size"])


def hybrid_settings(values: Values) -> dict[str, Any]:
    layers, experts = values["num_hidden_layers"], values["num_local_experts"]
    still, found = values["position_embedding_type"] != "rope", ssd_layers(values)
    space = space_of(values, found, expanded(values)) if found else None
    settings = {"ssd": space, "layers_without_rope": tuple(range(layers)) if still else ()}
    if not experts:
        return granite_settings(values) | settings | {"intermediate_size": values["shared_intermediate_size"]}
    return granite_expert_settings(values) | settings


def hybrid_sources(config: ModelConfig, logits: float, biased: bool) -> Sources:
    sources, inner = granite_sources(config, logits), (config.intermediate_size, config.hidden_size)
    for p in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers) if not config.num_experts):
        sources |= gate_up_down(f"{p}mlp.", f"{p}shared_mlp.", inner)
    for layer in config.ssd_layers:
        sources |= state_space_sources(config, f"model.layers.{layer}.", "mamba.", biased)
    return sources


def state_space_sources(
    config: ModelConfig, p: str, owner: str, biased: bool, factors: tuple[float, ...] = (1.0,) * 6
) -> Sources:
    """The tensors of a layer of a state space; rows of one matrix are the gate, x, B, C and dt.

    biased    whether its convolution has a bias
    factors   of the rows of these five, and of what the layer gives
    """
    net, hidden = config.ssd, config.hidden_size
    assert net is not None
    inner, channels, heads = net.inner_size, net.channels, net.heads
    ours, theirs, rows = f"{p}self_attn.", f"{p}{owner}", (inner + channels + heads, hidden)
    sizes, at = (inner, inner, net.groups * net.state_dim, net.groups * net.state_dim, heads), (f"{theirs}in_proj.weight", rows)
    gate, *xbc, dt = (TensorSource(*at, (size, hidden), sum(sizes[:i]), factor=factors[i]) for i, size in enumerate(sizes))
    vectors = {
        "decay.weight": ("A_log", (heads, 1)),
        "skip.weight": ("D", (heads, 1)),
        "norm.weight": ("norm.weight", (net.groups, inner // net.groups)),
    }
    if net.norm == "none":
        del vectors["norm.weight"]
    return {
        f"{ours}in_proj.weight": TensorSource("", (), (channels + inner, hidden), parts=(*xbc, gate)),
        f"{ours}dt_rates.weight": dt,
        f"{ours}conv.weight": convolution(f"{theirs}conv1d.weight", (channels, net.taps)),
        f"{ours}conv.bias": TensorSource(f"{theirs}conv1d.bias" if biased else "", (channels,) if biased else (), (channels,)),
        f"{ours}dt.bias": TensorSource(f"{theirs}dt_bias", (heads,), (heads,)),
        **{f"{ours}{mine}": flattened(f"{theirs}{name}", shape) for mine, (name, shape) in vectors.items()},
        f"{ours}out_proj.weight": TensorSource(
            f"{theirs}out_proj.weight", (hidden, inner), (hidden, inner), factor=factors[-1]
        ),
    }


def flattened(name: str, shape: tuple[int, int]) -> TensorSource:
    """A vector that is a matrix in GGUF files."""
    size = (shape[0] * shape[1],)
    return TensorSource(name, shape, size, otherwise=TensorSource(name, size, size))


def granite_hybrid(hf: Values) -> FamilyDescription:
    values = {**GRANITE_HYBRID.defaults, **hf}
    logits, biased = multiplier(values, "logits_scaling"), flag(values, "mamba_conv_bias")
    found = replace(GRANITE_HYBRID, sources=partial(hybrid_sources, logits=logits, biased=biased))
    return found if values["num_local_experts"] else replace(found, mappings=network_mappings)


GRANITE_HYBRID = FamilyDescription(
    "GraniteMoeHybridForCausalLM",
    DEFAULTS
    | dict.fromkeys(MULTIPLIERS, 1.0)
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
        "layers_block_type": None,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "time_step_limit": [0.0, math.inf],
    },
    {key: values for key, values in NEUTRAL.items() if key not in (*MULTIPLIERS, *NO_EXPERTS)}
    | {"hidden_act": ("silu",), "mamba_proj_bias": (None, False), "position_embedding_type": (None, "nope", "rope")},
    hybrid_settings,
    mappings=expert_mappings,
    variants=granite_hybrid,
)
