"""Cohere (Command R, Aya) and Cohere 2 (Command R7B, Command A): attention and MLP read one norm, a LayerNorm without a bias.

Neighbouring channels of a head are turned against each other; logits have a factor, which the last gain takes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, llama_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import typed_windows, window
from edgeq.converters.families.rearranged import Sources, from_pairs, multiplier, norms_without_biases, scaled_logits
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig


def cohere_settings(values: Values) -> dict[str, Any]:
    return llama_settings(values) | {
        "rms_norm_eps": values["layer_norm_eps"],
        "layer_norm": True,
        "parallel_blocks": "one_norm",
    }


def cohere2_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, all but every `sliding_window_pattern`-th."""
    found, types, pattern = window(values), values["layer_types"], values["sliding_window_pattern"]
    if types is None:
        if type(pattern) is not int or pattern < 1:
            raise FormatError(f"sliding_window_pattern is {pattern!r:.80}; expected a positive integer")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    return typed_windows(found, types, layers)


def cohere2_settings(values: Values) -> dict[str, Any]:
    """Layers without a window do not rotate their queries and keys."""
    layers = values["num_hidden_layers"]
    windows = cohere2_windows(values, layers) or (0,) * layers
    still = tuple(layer for layer, size in enumerate(windows) if not size)
    # No head size of its own.
    return cohere_settings({**values, "head_dim": None}) | {"layers_without_rope": still}


def cohere_sources(config: ModelConfig, scale: float) -> Sources:
    return from_pairs(config, ()) | norms_without_biases(config, ("input_layernorm",)) | scaled_logits(config, scale)


def described(base: FamilyDescription, hf: Values) -> FamilyDescription:
    scale = multiplier({**base.defaults, **hf}, "logit_scale")
    return replace(base, sources=partial(cohere_sources, scale=scale))


COHERE_DEFAULTS = DEFAULTS | {
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "logit_scale": 0.0625,
}
COHERE_NEUTRAL = {key: values for key, values in NEUTRAL.items() if key != "logit_scale"} | {"use_qk_norm": (None, False)}
COHERE = FamilyDescription(
    "CohereForCausalLM",
    COHERE_DEFAULTS | {"rope_theta": 500000.0},
    COHERE_NEUTRAL,
    cohere_settings,
)
COHERE2 = FamilyDescription(
    "Cohere2ForCausalLM",
    COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
    COHERE_NEUTRAL,
    cohere2_settings,
    cohere2_windows,
)
COHERE_FAMILIES = tuple(replace(base, variants=partial(described, base)) for base in (COHERE, COHERE2))
