"""BLOOM (BigScience 2022, arXiv 2211.05100): ALiBi, a norm of token embeddings, LayerNorm and biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.gpt import (
    ALL_BIASES,
    BY_HEADS,
    fused_sources,
    norm_sources,
    table_sources,
    whole_heads,
)
from edgeq.converters.families.family import EMBEDDING_NORM, HEAD, FamilyDescription, Values
from edgeq.converters.families.rearranged import Sources, flag
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope

OTHER_NAMES = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
"""Keys -> what some published files call them; transformers reads both, and writes the second of layers and heads."""
BEGINNINGS = {each: f"transformer.{each}" for each in ("word_embeddings.", "word_embeddings_layernorm.", "h.", "ln_f.")}
"""Checkpoints that were saved without their head."""


def bloom_settings(values: Values) -> dict[str, Any]:
    hidden, heads = (values[key] for key in (_named(values, "hidden_size"), _named(values, "num_attention_heads")))
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "gated_mlp": False,
        "layer_norm": True,
        "rms_norm_eps": values["layer_norm_epsilon"],
        "intermediate_size": 4 * hidden,
        "num_key_value_heads": heads,
        "head_dim": whole_heads(hidden, heads),
        "rope": Rope(theta=10000.0, kind="alibi"),
        "embedding_norm": True,
        "normed_residual": "all" if flag(values, "apply_residual_connection_post_layernorm") else "none",
    }


def bloom_sources(config: ModelConfig, mixed: bool) -> Sources:
    """Rows of queries, keys and values lie head by head (`mixed`), or part by part."""
    p, size = "transformer.", (config.hidden_size,)
    linears = {"qkv": "self_attention.query_key_value", "o": "self_attention.dense"}
    linears |= {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    norms = {each: each for each in ("input_layernorm", "post_attention_layernorm")}
    return {
        **table_sources(config, f"{p}word_embeddings.weight", HEAD),
        **{
            f"{EMBEDDING_NORM}.{kind}": TensorSource(f"{p}word_embeddings_layernorm.{kind}", size, size)
            for kind in ("weight", "bias")
        },
        **norm_sources(config, f"{p}h.", norms, f"{p}ln_f"),
        **fused_sources(config, f"{p}h.", linears, ALL_BIASES, mixed=mixed),
    }


def _named(values: Values, key: str) -> str:
    """What the file calls a key."""
    other = OTHER_NAMES[key]
    return other if other in values else key


def bloom(hf: Values) -> FamilyDescription:
    values = {**BLOOM.defaults, **hf}
    keys = {key: _named(hf, key) for key in OTHER_NAMES}
    # Its size is checked; settings say that the MLP is four times as wide.
    keys |= {"intermediate_size": keys["hidden_size"], "max_position_embeddings": "seq_length"}
    return replace(BLOOM, keys=keys, sources=partial(bloom_sources, mixed=flag(values, BY_HEADS)))


BLOOM = FamilyDescription(
    "BloomForCausalLM",
    {
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        BY_HEADS: True,
    },
    {},
    bloom_settings,
    biases=ALL_BIASES,
    renamed=BEGINNINGS,
    variants=bloom,
)
