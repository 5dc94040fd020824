"""Granite 3: four multipliers; without experts, with them (1B-A400M, 3B-A800M), and with one more for all tokens.

That of embeddings and that of scores are settings of the network.  Logits are divided in the gain of the last norm: the head
may be the embedding too.  What attention and MLP add to the stream is not multiplied by r: the stream is divided by it instead.
All that reads the stream are norms, and x / r under an epsilon of e / r^2 gives what x gives under e.  So no matrix changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.experts import expert_mappings, local_experts
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, NO_EXPERTS, llama_settings
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


def granite_expert_settings(values: Values) -> dict[str, Any]:
    return granite_settings(values) | local_experts(values) | shared_expert(values["shared_intermediate_size"])


def shared_expert(inner: Any) -> dict[str, Any]:
    """One for all tokens, of so many channels; 0: there is none, and so nothing that could have a gate."""
    return {"shared_expert_intermediate_size": inner, "shared_expert_gate": False} if inner != 0 else {}


def granite_sources(config: ModelConfig, logits: float) -> Sources:
    hidden, router, sources = config.hidden_size, (config.num_experts, config.hidden_size), scaled_logits(config, 1 / logits)
    for p in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers) if config.num_experts):
        if shared := config.shared_expert_intermediate_size:
            sources |= gate_up_down(f"{p}mlp.shared_expert.", f"{p}shared_mlp.", (shared, hidden))
        owner = f"{p}block_sparse_moe."
        sources[f"{p}mlp.gate.weight"] = TensorSource(f"{owner}router.layer.weight", router, router)
        for expert in range(config.num_experts):
            shape, of = (config.intermediate_size, hidden), (config.num_experts, expert)
            sources |= gate_up_down(f"{p}mlp.experts.{expert}.", owner, shape, of)
    return sources


def gate_up_down(ours: str, theirs: str, shape: tuple[int, int], of: tuple[int, int] | None = None) -> Sources:
    """Gate above up in `input_linear`, down in `output_linear`; of: how many such matrices follow one another, and which.

    In GGUF files they are apart.
    """
    (inner, hidden), (count, index) = shape, of or (1, 0)
    many = (count,) if of else ()
    wide, narrow = (*many, 2 * inner, hidden), (*many, hidden, inner)
    fused = {
        "gate": TensorSource(f"{theirs}input_linear.weight", wide, (inner, hidden), 2 * inner * index),
        "up": TensorSource(f"{theirs}input_linear.weight", wide, (inner, hidden), 2 * inner * index + inner),
        "down": TensorSource(f"{theirs}output_linear.weight", narrow, (hidden, inner), hidden * index),
    }
    names = {f"{ours}{part}_proj.weight": source for part, source in fused.items()}
    return {name: TensorSource(name, source.shape, source.shape, otherwise=source) for name, source in names.items()}


def with_logits(family: FamilyDescription) -> FamilyDescription:
    """The same; its sources know what logits are divided by, which is no setting of the network."""

    def of(hf: Values) -> FamilyDescription:
        logits = multiplier({**family.defaults, **hf}, "logits_scaling")
        return replace(family, sources=partial(granite_sources, logits=logits))

    return replace(family, variants=of)


GRANITE = FamilyDescription(
    "GraniteForCausalLM",
    DEFAULTS | dict.fromkeys(MULTIPLIERS, 1.0),
    {key: values for key, values in NEUTRAL.items() if key not in MULTIPLIERS},
    granite_settings,
)
GRANITE_MOE = FamilyDescription(
    "GraniteMoeForCausalLM",
    {**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    {key: values for key, values in GRANITE.neutral.items() if key not in NO_EXPERTS},
    granite_expert_settings,
    mappings=expert_mappings,
)
GRANITE_MOE_SHARED = replace(GRANITE_MOE, architecture="GraniteMoeSharedForCausalLM")
GRANITE_FAMILIES = tuple(with_logits(family) for family in (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED))
