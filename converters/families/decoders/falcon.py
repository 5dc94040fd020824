"""Falcon 7B, 40B and 180B: parallel blocks, MLPs without a gate, few heads of keys and values.

Those with ALiBi instead of a rotation (Falcon-RW) add its slopes before scores are scaled, so that they are scaled too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.families.decoders.gpt import (
    ALL_BIASES,
    BY_HEADS,
    fused_sources,
    norm_sources,
    plain_settings,
    table_sources,
    whole_heads,
)
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL
from edgeq.converters.families.family import HEAD, FamilyDescription, Values
from edgeq.converters.families.positions import rope
from edgeq.converters.families.rearranged import Sources, flag
from edgeq.errors import UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope


def blocks(values: Values) -> str:
    """How attention and MLP follow each other, as `Stack.parallel_blocks` says it.

    UnsupportedError: norms that go with neither architecture.
    """
    newer, norms = flag(values, "new_decoder_architecture"), values["num_ln_in_parallel_attn"]
    if not flag(values, "parallel_attn"):
        if newer:
            raise UnsupportedError("parallel_attn is False; with new_decoder_architecture it is supported with: True")
        return "none"
    if norms not in (None, 1, 2) or (norms == 2 and not newer):
        raise UnsupportedError(
            f"num_ln_in_parallel_attn is {norms!r:.80}; supported: 1, and 2 with new_decoder_architecture, or null"
        )
    return "two_norms" if newer and norms != 1 else "one_norm"


def falcon_settings(values: Values) -> dict[str, Any]:
    hidden, heads, inner = values["hidden_size"], values["num_attention_heads"], values["ffn_hidden_size"]
    kv_heads = values["num_kv_heads"] if values["num_kv_heads"] is not None else heads
    if not flag(values, "new_decoder_architecture"):
        kv_heads = 1 if flag(values, "multi_query") else heads
    head_dim = whole_heads(hidden, heads)
    slopes = Rope(theta=10000.0, kind="alibi", attention_factor=head_dim**-0.5)
    return plain_settings(values, "activation") | {
        "rms_norm_eps": values["layer_norm_epsilon"],
        "intermediate_size": 4 * hidden if inner is None else inner,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope": slopes if values["alibi"] is not None and flag(values, "alibi") else rope(values),
        "parallel_blocks": blocks(values),
    }


def falcon_sources(config: ModelConfig, biases: tuple[str, ...], mixed: bool) -> Sources:
    p = "transformer."
    linears = {"qkv": "self_attention.query_key_value", "o": "self_attention.dense"}
    linears |= {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    norms = {
        "none": {each: each for each in ("input_layernorm", "post_attention_layernorm")},
        "one_norm": {"input_layernorm": "input_layernorm"},
        "two_norms": {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
    }[config.parallel_blocks]
    return {
        **table_sources(config, f"{p}word_embeddings.weight", HEAD),
        **norm_sources(config, f"{p}h.", norms, f"{p}ln_f"),
        **fused_sources(config, f"{p}h.", linears, biases, mixed=mixed),
    }


def falcon(hf: Values) -> FamilyDescription:
    values = {**FALCON.defaults, **hf}
    biases = ALL_BIASES if flag(values, "bias") else ()
    # Only with one head of keys and values are those of queries, keys and values apart.
    mixed = flag(values, "new_decoder_architecture") or not flag(values, "multi_query")
    mixed = mixed and flag(values, BY_HEADS)
    return replace(FALCON, biases=biases, sources=partial(falcon_sources, biases=biases, mixed=mixed))


FALCON = FamilyDescription(
    "FalconForCausalLM",
    DEFAULTS
    | {
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "ffn_hidden_size": None,
        "num_kv_heads": None,
        "num_ln_in_parallel_attn": None,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        BY_HEADS: True,
        "tie_word_embeddings": True,
    },
    NEUTRAL,
    falcon_settings,
    # Its size is checked; settings say what an absent ffn_hidden_size means.
    keys={"intermediate_size": "hidden_size", "hidden_act": "activation"},
    variants=falcon,
)
