"""Finds the family of a config.json and the network that it describes."""

from __future__ import annotations

from typing import Any

from edgeq.config import LIMITS, ModelConfig
from edgeq.converters.families.experts import EXPERT_FAMILIES
from edgeq.converters.families.family import Family, FamilyDescription, Values
from edgeq.converters.families.gemma import GEMMA_FAMILIES
from edgeq.converters.families.llama import LLAMA_FAMILIES
from edgeq.converters.families.opt import OPT_FAMILIES
from edgeq.converters.families.smollm import SMOLLM_FAMILIES
from edgeq.errors import CheckpointError, FormatError, UnsupportedError

DESCRIPTIONS = (*LLAMA_FAMILIES, *SMOLLM_FAMILIES, *GEMMA_FAMILIES, *OPT_FAMILIES, *EXPERT_FAMILIES)
FAMILIES = {description.architecture: description for description in DESCRIPTIONS}


def recognise(hf: Values) -> tuple[Family, ModelConfig]:
    """The family of a config.json and the network it describes.

    UnsupportedError: names the key, what was found and what is supported.  CheckpointError: a key missing or out of range, or a
    checkpoint that is already quantized.
    """
    if hf.get("quantization_config") is not None:
        method = hf["quantization_config"].get("quant_method") if isinstance(hf["quantization_config"], dict) else None
        raise CheckpointError(
            f"config.json: quantization_config: the checkpoint is already quantized ({method or 'method not named'}); "
            "convert the original checkpoint instead"
        )
    architectures = hf.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"config.json: architectures is {architectures!r} (model_type {hf.get('model_type')!r}); "
            f"supported: {', '.join(FAMILIES)}"
        )
    description = FAMILIES[name]
    for key, neutral in description.neutral.items():
        if hf.get(key) not in neutral:
            supported = " or ".join(repr(value) for value in neutral if value is not None) or "absent"
            raise UnsupportedError(f"config.json: {key} is {hf[key]!r}; {name} is supported with: {supported}")
    try:
        config = _model_config(description, {**description.defaults, **hf})
    except FormatError as error:
        raise CheckpointError(f"config.json: {error}") from None
    except UnsupportedError as error:
        raise UnsupportedError(f"config.json: {error}") from None
    return Family(description, config), config


def _model_config(description: FamilyDescription, values: Values) -> ModelConfig:
    def value(key: str) -> Any:
        return values[description.keys.get(key, key)]

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in sizes:
        theirs = description.keys.get(key, key)
        found = values.get(theirs)
        if type(found) is not int or not 1 <= found <= LIMITS[key]:
            raise FormatError(f"{theirs} is {found!r}; expected an integer from 1 to {LIMITS[key]}")
    return ModelConfig(
        model_type=str(values.get("model_type")),
        max_position_embeddings=values["max_position_embeddings"],
        tie_word_embeddings=values["tie_word_embeddings"],
        sliding_windows=description.windows(values, values["num_hidden_layers"]),
        **{key: value(key) for key in (*sizes, "hidden_act")},
        **description.settings(values),
    )
