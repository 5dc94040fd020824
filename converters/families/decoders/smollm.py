"""SmolLM3: the Llama line with layers that do not rotate their queries and keys.

Such layers attend by content alone (Yang et al. 2025, arXiv 2501.18795).  Where windows are used, these layers have them.
"""

from __future__ import annotations

from typing import Any

from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, llama_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import typed_windows, window
from edgeq.errors import FormatError, UnsupportedError


def rotated_layers(values: Values, layers: int) -> list[bool]:
    """Whether each layer rotates: `no_rope_layers` holds 1 for those that do (sic); without it, all but every n-th do."""
    flags, interval = values["no_rope_layers"], values["no_rope_layer_interval"]
    if flags is None:
        if type(interval) is not int or interval < 1:
            raise FormatError(f"no_rope_layer_interval is {interval!r}; expected a positive integer")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise FormatError(f"no_rope_layers is {str(flags)[:80]}; expected a list of {layers} times 0 or 1, one per layer")
    return [bool(flag) for flag in flags[:layers]]


def smollm3_settings(values: Values) -> dict[str, Any]:
    rotated = rotated_layers(values, values["num_hidden_layers"])
    return llama_settings(values) | {"layers_without_rope": tuple(layer for layer, flag in enumerate(rotated) if not flag)}


def smollm3_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Windows where `layer_types` says so; without it, in the layers that do not rotate."""
    found, types = window(values) if values["use_sliding_window"] else 0, values["layer_types"]
    if types is None:
        types = ["full_attention" if flag else "sliding_attention" for flag in rotated_layers(values, layers)]
    elif not found and isinstance(types, list) and "sliding_attention" in types:
        # transformers' implementations of attention differ here: some take the window, some do not.
        raise UnsupportedError("layer_types has sliding_attention; supported: with use_sliding_window and a sliding_window")
    return typed_windows(found, types, layers)


SMOLLM_FAMILIES = (
    FamilyDescription(
        "SmolLM3ForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        {key: values for key, values in NEUTRAL.items() if key != "no_rope_layers"},
        smollm3_settings,
        smollm3_windows,
    ),
)
