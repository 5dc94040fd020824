"""GLM-4 and ERNIE 4.5: neighbouring channels of a head are turned against each other, not its halves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.families.decoders.llama import (
    DEFAULTS,
    NEUTRAL,
    NEUTRAL_LAYER,
    NO_EXPERTS,
    QKV,
    head_settings,
    llama_settings,
)
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import partial_rope
from edgeq.converters.families.rearranged import Sources, flag, from_pairs, fused_gate_up, layer_norms
from edgeq.network.config import ModelConfig

GLM_NORMS = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
EVERY_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


def glm_settings(values: Values) -> dict[str, Any]:
    return head_settings(values) | {"rope": partial_rope(values), "post_norms": True}


def glm_sources(config: ModelConfig, biases: tuple[str, ...]) -> Sources:
    return from_pairs(config, biases) | fused_gate_up(config) | layer_norms(config, GLM_NORMS)


def glm4(hf: Values) -> FamilyDescription:
    biases = QKV if flag({**GLM4.defaults, **hf}, "attention_bias") else ()
    return replace(GLM4, biases=biases, sources=partial(glm_sources, biases=biases))


def ernie4_5(hf: Values) -> FamilyDescription:
    biases = EVERY_LINEAR if flag({**ERNIE.defaults, **hf}, "use_bias") else ()
    return replace(ERNIE, biases=biases, sources=partial(from_pairs, biases=biases))


GLM4 = FamilyDescription(
    "Glm4ForCausalLM",
    DEFAULTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    {key: values for key, values in (NEUTRAL_LAYER | NO_EXPERTS).items() if key != "attention_bias"},
    glm_settings,
    variants=glm4,
)
ERNIE = FamilyDescription(
    "Ernie4_5ForCausalLM",
    DEFAULTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "use_bias": False,
    },
    NEUTRAL,
    llama_settings,
    variants=ernie4_5,
)
GLM_FAMILIES = (GLM4, ERNIE)
