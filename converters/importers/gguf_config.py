"""The configuration of a GGUF file as transformers' config.json has it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.importers.gguf_architectures import RMS_EPSILON, Architecture
from edgeq.converters.importers.gguf_keys import EMBEDDING, FREQUENCIES, HEAD, GgufKeys, Settings
from edgeq.errors import CheckpointError, UnsupportedError

LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
"""Numbers of the rotary embedding of Llama 3.1 and later that llama.cpp does not store; all published models have these."""
TOLERANCE = 1e-5
YARN = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""Key after `rope.scaling.` -> key of `rope_scaling`; llama.cpp's numbers where they are absent are transformers'."""

POOLINGS, RANKS = {1: "mean", 2: "cls", 3: "last"}, 4
"""Values of `pooling_type`; 0 says nothing."""


def config_of(kind: Architecture, keys: GgufKeys) -> Settings:
    """Keys of config.json, and the read ones marked in `keys`.

    CheckpointError: a key missing or of another type.  UnsupportedError: a value that edgeq does not run.
    """
    embedding = keys.shapes.get(EMBEDDING)
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{keys.place}: no tensor {EMBEDDING}; the file is incomplete or no language model")
    # Its rows say the same; files differ in whether they have the key.
    keys.value("vocab_size")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not heads:
        raise keys.wrong("attention.head_count", heads, "a positive integer")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if (values := keys.integer("attention.value_length", head_dim)) != head_dim or head_dim < 2 or head_dim % 2:
        raise UnsupportedError(f"{keys.place}: heads of {head_dim} and {values}; supported: keys and values of one even size")
    rotated = keys.integer("rope.dimension_count", head_dim)
    settings = kind.settings(keys)
    # Of a model whose layers all have experts some files say the width of a layer without.
    elsewhere = "moe_intermediate_size" in settings or "intermediate_size" in settings
    width = keys.value("feed_forward_length") if elsewhere else keys.integer("feed_forward_length")
    if "num_key_value_heads" not in settings:
        settings["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads)
    config = {
        "architectures": [kind.family],
        "model_type": kind.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        kind.epsilon: keys.number(f"attention.layer_norm_{'rms_' * (kind.epsilon == RMS_EPSILON)}epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": HEAD not in keys.shapes,
        "partial_rotary_factor": rotated / head_dim,
        **settings,
    }
    scaling = _scaling(keys, head_dim, config["rope_theta"])
    return config | ({"rope_scaling": {**scaling, **kind.scaling}} if scaling else {})


def pooling_of(kind: Architecture, keys: GgufKeys) -> str | None:
    """How the states of a text become one vector; None: the file does not say so, or the model ranks documents.

    CheckpointError: a number that has no meaning.  UnsupportedError: it ranks documents, and has no head for that.
    """
    found = keys.integer("pooling_type", 0)
    if found > RANKS:
        raise keys.wrong("pooling_type", found, f"0 to {RANKS}")
    if kind.ranks:
        return None
    if found == RANKS:
        raise UnsupportedError(
            f"{keys.place}: {keys.architecture}.pooling_type is {RANKS}, a reranker, and the file has no head of one "
            "that edgeq knows; supported: rerankers of BERT, XLM-R and ModernBERT with cls and cls.output"
        )
    return POOLINGS.get(found)


def _scaling(keys: GgufKeys, head_dim: int, theta: float) -> Settings | None:
    """`rope_scaling`: what stretches a rotary embedding beyond the length that it was trained for."""
    kind, factor, factors = keys.value("rope.scaling.type", "none"), keys.value("rope.scaling.factor"), keys.factors
    original, attention = keys.value("rope.scaling.original_context_length"), keys.value("rope.scaling.attn_factor")
    if FREQUENCIES in factors and kind == "none":
        return _llama3(keys, factors[FREQUENCIES], head_dim, theta)
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        longrope = {
            "rope_type": "longrope",
            "long_factor": _decimals(factors["rope_factors_long.weight"]),
            "short_factor": _decimals(factors["rope_factors_short.weight"]),
            "original_max_position_embeddings": original,
        }
        return longrope | ({} if attention is None else {"attention_factor": attention})
    if factors:
        raise UnsupportedError(
            f"{keys.place}: has {', '.join(factors)} and rope.scaling.type {kind!r:.40}; supported: rope_freqs alone, or "
            "long and short factors together"
        )
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(keys)
    raise UnsupportedError(
        f"{keys.place}: rope.scaling.type is {kind!r:.40}; supported: none, linear, yarn, the factors of Llama 3 and LongRoPE"
    )


def _yarn(keys: GgufKeys) -> Settings:
    keys.only("rope.scaling.yarn_ext_factor", 1.0)
    numbers = {name: keys.value(f"rope.scaling.{key}") for key, name in YARN.items()}
    return {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        **{name: value for name, value in numbers.items() if value is not None},
    }


def _decimals(values: NDArray[np.float32]) -> list[float]:
    """The shortest decimals of numbers, which whoever wrote them had."""
    return [float(str(value)) for value in values]


def _llama3(keys: GgufKeys, divisors: NDArray[np.float32], head_dim: int, theta: float) -> Settings:
    """The settings whose divisors of frequencies these are.  UnsupportedError: they are others."""
    factor = float(divisors.max(initial=0))
    found = {"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH}
    turns = ORIGINAL / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = ((turns - LOW) / (HIGH - LOW)).clip(0, 1)
    if factor > 0 and divisors.shape == smooth.shape:
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if np.abs(wanted - divisors).max() <= TOLERANCE * factor:
            return found | {"original_max_position_embeddings": ORIGINAL}
    raise UnsupportedError(
        f"{keys.place}: {FREQUENCIES} are not those of Llama 3 with any factor; supported: low_freq_factor {LOW:g}, "
        f"high_freq_factor {HIGH:g}, original_max_position_embeddings {ORIGINAL}"
    )
