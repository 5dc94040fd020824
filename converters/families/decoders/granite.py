"""Granite, the dense models: four multipliers.

That of embeddings and that of scores are settings of the network.  What attention and MLP add to the stream is multiplied in
the rows of their last linear layers, logits are divided in the gain of the last norm: the head may be the embedding too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, llama_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.rearranged import Sources, multiplied, multiplier, scaled_logits
from edgeq.network.config import ModelConfig

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def granite_settings(values: Values) -> dict[str, Any]:
    return llama_settings(values) | {
        "embedding_multiplier": multiplier(values, "embedding_multiplier"),
        # Scores are divided by its square root.
        "query_pre_attn_scalar": multiplier(values, "attention_multiplier") ** -2,
    }


def granite_sources(config: ModelConfig, residual: float, logits: float) -> Sources:
    branches = multiplied(config, ("o", "down"), residual) if residual != 1 else {}
    return branches | scaled_logits(config, 1 / logits)


def granite(hf: Values) -> FamilyDescription:
    values = {**GRANITE.defaults, **hf}
    residual, logits = multiplier(values, "residual_multiplier"), multiplier(values, "logits_scaling")
    return replace(GRANITE, sources=partial(granite_sources, residual=residual, logits=logits))


GRANITE = FamilyDescription(
    "GraniteForCausalLM",
    DEFAULTS | dict.fromkeys(MULTIPLIERS, 1.0),
    {key: values for key, values in NEUTRAL.items() if key not in MULTIPLIERS},
    granite_settings,
    variants=granite,
)
