"""Falcon-H1: a state space beside the attention of every layer, and twelve multipliers, which are factors of weights here."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, llama_settings
from edgeq.converters.families.family import NORM, FamilyDescription, Values
from edgeq.converters.families.rearranged import Sources, flag, layer_norms, multiplier
from edgeq.converters.families.state_spaces.granite_hybrid import expanded, space_of, state_space_sources
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_integer
from edgeq.network.stack import MAX_SIZES

MULTIPLIERS = ("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier",
               "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")  # fmt: skip
LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def factors_of(values: Values) -> dict[str, float]:
    """All multipliers by their keys; those of a list as "mlp_multipliers 0" and so on."""
    found = {key: multiplier(values, key) for key in MULTIPLIERS}
    for key, count in LISTS.items():
        given = [1.0] * count if values[key] is None else values[key]
        if not isinstance(given, list) or len(given) != count:
            raise FormatError(f"{key} is {str(given)[:80]}; expected a list of {count} numbers")
        found |= {f"{key} {i}": multiplier({f"{key} {i}": each}, f"{key} {i}") for i, each in enumerate(given)}
    return found


def falcon_h1_settings(values: Values) -> dict[str, Any]:
    inner, layers = values["mamba_d_ssm"], tuple(range(values["num_hidden_layers"]))
    if inner is None:
        inner = expanded(values)
    check_integer("mamba_d_ssm", inner, 1, MAX_SIZES["intermediate_size"])
    before = "before_gate" if flag(values, "mamba_norm_before_gate") else "after_gate"
    norm = before if flag(values, "mamba_rms_norm") else "none"
    space = space_of(values, layers, inner, norm=norm, beside_attention=True)
    return llama_settings(values) | {"ssd": space, "embedding_multiplier": multiplier(values, "embedding_multiplier")}


def falcon_h1_sources(config: ModelConfig, factors: Values, biased: bool) -> Sources:
    hidden, inner, queries, keys = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    attends = factors["attention_in_multiplier"]
    matrices: dict[str, tuple[str, tuple[int, int], float]] = {
        "self_attn.q_proj": ("self_attn.q_proj", (queries, hidden), attends),
        "self_attn.k_proj": ("self_attn.k_proj", (keys, hidden), attends * factors["key_multiplier"]),
        "self_attn.v_proj": ("self_attn.v_proj", (keys, hidden), attends),
        "self_attn.o_proj": ("self_attn.o_proj", (hidden, queries), factors["attention_out_multiplier"]),
        "mlp.gate_proj": ("feed_forward.gate_proj", (inner, hidden), factors["mlp_multipliers 0"]),
        "mlp.up_proj": ("feed_forward.up_proj", (inner, hidden), 1.0),
        "mlp.down_proj": ("feed_forward.down_proj", (hidden, inner), factors["mlp_multipliers 1"]),
    }
    rows = tuple(factors["ssm_in_multiplier"] * factors[f"ssm_multipliers {i}"] for i in range(5))
    # States that are pooled stay as they are; factors of logits are in the gain.
    last = 1.0 if config.pooling is not None else factors["lm_head_multiplier"]
    sources = layer_norms(config, {"post_attention_layernorm": "pre_ff_layernorm"})
    sources[NORM] = TensorSource("model.final_layernorm.weight", (hidden,), (hidden,), factor=last)
    for p in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers)):
        for ours, (theirs, shape, factor) in matrices.items():
            sources[f"{p}{ours}.weight"] = TensorSource(f"{p}{theirs}.weight", shape, shape, factor=factor)
        sources |= state_space_sources(config, p, "mamba.", biased, (*rows, factors["ssm_out_multiplier"]))
    return sources


def falcon_h1(hf: Values) -> FamilyDescription:
    values = {**FALCON_H1.defaults, **hf}
    factors, biased = factors_of(values), flag(values, "mamba_conv_bias")
    return replace(FALCON_H1, sources=partial(falcon_h1_sources, factors=factors, biased=biased))


FALCON_H1 = FamilyDescription(
    "FalconH1ForCausalLM",
    DEFAULTS
    | dict.fromkeys(MULTIPLIERS, 1.0)
    | dict.fromkeys(LISTS)
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "time_step_limit": [0.0, math.inf],
    },
    {key: values for key, values in NEUTRAL.items() if key not in MULTIPLIERS}
    | {"hidden_act": ("silu",), "mamba_proj_bias": (None, False), "projectors_bias": (None, False)},
    falcon_h1_settings,
    variants=falcon_h1,
)
