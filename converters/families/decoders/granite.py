"""Granite, the dense models: four multipliers.

That of embeddings and that of scores are settings of the network.  Logits are divided in the gain of the last norm: the head
may be the embedding too.  What attention and MLP add to the stream is not multiplied by r: the stream is divided by it instead.
All that reads the stream are norms, and x / r under an epsilon of e / r^2 gives what x gives under e.  So no matrix changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, llama_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.rearranged import Sources, multiplier, scaled_logits
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_positive

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def granite_settings(values: Values) -> dict[str, Any]:
    found, residual = llama_settings(values), multiplier(values, "residual_multiplier")
    check_positive("rms_norm_eps", found["rms_norm_eps"])
    return found | {
        "embedding_multiplier": multiplier(values, "embedding_multiplier") / residual,
        "rms_norm_eps": found["rms_norm_eps"] / residual**2,
        # Scores are divided by its square root.
        "query_pre_attn_scalar": multiplier(values, "attention_multiplier") ** -2,
    }


def granite_sources(config: ModelConfig, logits: float) -> Sources:
    return scaled_logits(config, 1 / logits)


def granite(hf: Values) -> FamilyDescription:
    logits = multiplier({**GRANITE.defaults, **hf}, "logits_scaling")
    return replace(GRANITE, sources=partial(granite_sources, logits=logits))


GRANITE = FamilyDescription(
    "GraniteForCausalLM",
    DEFAULTS | dict.fromkeys(MULTIPLIERS, 1.0),
    {key: values for key, values in NEUTRAL.items() if key not in MULTIPLIERS},
    granite_settings,
    variants=granite,
)
