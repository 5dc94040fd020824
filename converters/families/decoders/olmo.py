"""OLMo 2 and 3 and EXAONE 4: norms after attention and MLP instead of before them."""

from __future__ import annotations

from typing import Any

from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, head_settings, llama_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import rope_of, typed_windows, window
from edgeq.converters.families.rearranged import Sources, layer_norms
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig

NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
AFTER_BLOCKS = {"pre_norms": False, "post_norms": True, "qk_norm": True}


def olmo_settings(values: Values) -> dict[str, Any]:
    return llama_settings(values) | AFTER_BLOCKS | {"qk_norm_kind": "whole"}


def olmo3_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, all but every fourth."""
    types = values["layer_types"]
    if types is None:
        types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    if not (found := window(values)):
        raise FormatError("sliding_window is null; local layers need a positive integer")
    return typed_windows(found, types, layers)


def olmo3_settings(values: Values) -> dict[str, Any]:
    """One rope for layers without a window, which `rope_scaling` stretches, and a plain one for the others."""
    by_type = values["rope_parameters"] or {}
    if not isinstance(by_type, dict) or not set(by_type) <= {"full_attention", "sliding_attention"}:
        raise FormatError(f"rope_parameters is {str(by_type)[:80]}; expected one object for each of the layer_types")
    full = values["rope_scaling"] or by_type.get("full_attention") or {}
    local = by_type.get("sliding_attention") or {}
    return head_settings(values) | {
        **AFTER_BLOCKS,
        "qk_norm_kind": "whole",
        "rope": rope_of(values, "rope_parameters of full_attention", full, values["rope_theta"]),
        "local_rope": rope_of(values, "rope_parameters of sliding_attention", local, values["rope_theta"]),
    }


def exaone_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, all but every `sliding_window_pattern`-th."""
    found, types, pattern = window(values), values["layer_types"], values["sliding_window_pattern"]
    if types is None and not found:
        return ()
    if types is None:
        if type(pattern) is not int or pattern < 1:
            raise FormatError(f"sliding_window_pattern is {pattern!r:.80}; expected a positive integer, or layer_types")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if not found and isinstance(types, list) and "sliding_attention" in types:
        raise FormatError("sliding_window is null; layer_types has sliding_attention, which needs a positive integer")
    return typed_windows(found, types, layers)


def exaone_settings(values: Values) -> dict[str, Any]:
    """Where layers have windows, the others do not rotate their queries and keys."""
    windows = exaone_windows(values, values["num_hidden_layers"])
    still = tuple(layer for layer, size in enumerate(windows) if not size)
    if window(values) and not windows:
        still = tuple(range(values["num_hidden_layers"]))
    return llama_settings(values) | AFTER_BLOCKS | {"layers_without_rope": still}


def post_norm_sources(config: ModelConfig) -> Sources:
    return layer_norms(config, NORMS)


OLMO_FAMILIES = (
    FamilyDescription(
        "Olmo2ForCausalLM",
        DEFAULTS | {"rms_norm_eps": 1e-5},
        NEUTRAL,
        olmo_settings,
        sources=post_norm_sources,
    ),
    FamilyDescription(
        "Olmo3ForCausalLM",
        DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
        NEUTRAL,
        olmo3_settings,
        olmo3_windows,
        sources=post_norm_sources,
    ),
    FamilyDescription(
        "Exaone4ForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        NEUTRAL,
        exaone_settings,
        exaone_windows,
        sources=post_norm_sources,
    ),
)
