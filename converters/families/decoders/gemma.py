"""Gemma, Gemma 2, Gemma 3, the text model, and EmbeddingGemma, which is one whose tokens see both ways.

The token embedding is multiplied by sqrt(hidden_size), not rounded.  transformers rounds that number to the type it computes
in (50.5 instead of 50.596 for hidden_size 2560 in bfloat16), and in float32, with which results are compared here, not at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, head_settings, llama_settings
from edgeq.converters.families.family import (
    AFTER_VALUES,
    MLP_MAPPINGS,
    NORM,
    FamilyDescription,
    ScaleMapping,
    Values,
)
from edgeq.converters.families.positions import rope_of, typed_windows, window
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig
from edgeq.network.stack import Stack

# Module of torch_decoder.py -> transformers' own; all hold w of a gain 1 + w.
GAINS = {
    "input_layernorm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
HEAD_GAINS = ("self_attn.q_norm", "self_attn.k_norm")
FIRST_GAINS = ("input_layernorm", "post_attention_layernorm")
"""Those of the first Gemma, under names that are its own."""


def first_gemma_settings(values: Values) -> dict[str, Any]:
    """The first files say "gelu" and mean its approximation, which they were trained with."""
    act = "gelu_pytorch_tanh" if values["hidden_act"] == "gelu" else values["hidden_act"]
    found = llama_settings({**values, "hidden_act": act})
    return found | {"hidden_act": act, "embedding_multiplier": values["hidden_size"] ** 0.5}


def first_gemma_sources(config: ModelConfig) -> dict[str, TensorSource]:
    shape, layers = (config.hidden_size,), range(config.num_hidden_layers)
    names = [NORM, *(f"model.layers.{layer}.{module}.weight" for layer in layers for module in FIRST_GAINS)]
    return {name: TensorSource(name, shape, shape, added=1.0) for name in names}


def gemma_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, all but every `sliding_window_pattern`-th."""
    types, pattern = values["layer_types"], values["sliding_window_pattern"]
    if types is None:
        if type(pattern) is not int or pattern < 1:
            raise FormatError(f"sliding_window_pattern is {pattern!r}; expected a positive integer")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    found = window(values)
    if not found:
        raise FormatError("sliding_window is null; local layers need a positive integer")
    return typed_windows(found, types, layers)


def gemma_settings(values: Values) -> dict[str, Any]:
    """Both spellings: `rope_theta`, `rope_scaling`, `rope_local_base_freq`, and `rope_parameters` by type of layer."""
    by_type = values["rope_parameters"] or {}
    if not isinstance(by_type, dict) or not set(by_type) <= {"full_attention", "sliding_attention"}:
        raise FormatError(f"rope_parameters is {by_type!r}; expected one object for each of the layer_types")
    scaling = by_type.get("full_attention", values["rope_scaling"]) or {}
    local = by_type.get("sliding_attention") or {}
    return head_settings(values) | {
        "rope": rope_of(values, "rope_parameters of full_attention", scaling, values["rope_theta"]),
        "local_rope": rope_of(values, "rope_parameters of sliding_attention", local, values["rope_local_base_freq"]),
        "qk_norm": True,
        "post_norms": True,
        "embedding_multiplier": values["hidden_size"] ** 0.5,
        "query_pre_attn_scalar": values["query_pre_attn_scalar"],
    }


def second_gemma_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it every second one, the first among them."""
    found, types = window(values), values["layer_types"]
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)] if types is None else types
    return typed_windows(found, types, layers)


def second_gemma_settings(values: Values) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return llama_settings(values) | {
        "post_norms": True,
        "embedding_multiplier": values["hidden_size"] ** 0.5,
        "query_pre_attn_scalar": values["query_pre_attn_scalar"],
        **{key: values[key] for key in caps},
    }


def gemma_sources(config: ModelConfig) -> dict[str, TensorSource]:
    hidden, head = (config.hidden_size,), (config.head_dim,)
    sources = {NORM: TensorSource(NORM, hidden, hidden, added=1.0)}
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        for module, theirs in GAINS.items():
            sources[f"{p}{module}.weight"] = TensorSource(f"{p}{theirs}.weight", hidden, hidden, added=1.0)
        for module in HEAD_GAINS if config.qk_norm else ():
            sources[f"{p}{module}.weight"] = TensorSource(f"{p}{module}.weight", head, head, added=1.0)
    return sources


def gemma_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """Without the norm before q, k, v: after them come norms of their own, and scales were found to hurt there."""
    return (AFTER_VALUES, *MLP_MAPPINGS)


def bidirectional(values: Values) -> bool:
    found = values["use_bidirectional_attention"]
    if found not in (None, False, True):
        raise FormatError(f"use_bidirectional_attention is {found!r:.80}; expected true or false")
    return bool(found)


def embedding_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Those of `gemma_windows`; where tokens see both ways one half of a window is before a token and one half after it."""
    found = window(values)
    halved = found // 2 + 1 if found and bidirectional(values) else found
    return gemma_windows({**values, "sliding_window": halved or None}, layers)


def embedding_settings(values: Values) -> dict[str, Any]:
    return gemma_settings(values) | {"bidirectional": bidirectional(values)}


GEMMA = FamilyDescription(
    "GemmaForCausalLM",
    DEFAULTS
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    NEUTRAL | {"use_bidirectional_attention": (None, False)},
    first_gemma_settings,
    sources=first_gemma_sources,
)
GEMMA_2 = FamilyDescription(
    "Gemma2ForCausalLM",
    DEFAULTS
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    {key: values for key, values in NEUTRAL.items() if not key.endswith("_logit_softcapping")}
    | {"use_bidirectional_attention": (None, False)},
    second_gemma_settings,
    second_gemma_windows,
    keys={"hidden_act": "hidden_activation"},
    sources=gemma_sources,
    mappings=gemma_mappings,
)
GEMMA_3 = FamilyDescription(
    "Gemma3ForCausalLM",
    DEFAULTS
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
    },
    NEUTRAL | {"use_bidirectional_attention": (None, False)},
    gemma_settings,
    gemma_windows,
    keys={"hidden_act": "hidden_activation"},
    sources=gemma_sources,
    mappings=gemma_mappings,
)
EMBEDDING_GEMMA = replace(
    GEMMA_3,
    architecture="Gemma3TextModel",
    defaults={**GEMMA_3.defaults, "use_bidirectional_attention": False},
    neutral=NEUTRAL,
    settings=embedding_settings,
    windows=embedding_windows,
    headless=True,
)
GEMMA_FAMILIES = (GEMMA, GEMMA_2, GEMMA_3, EMBEDDING_GEMMA)
