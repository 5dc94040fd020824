"""What the keys of a GGUF file say of a BLOOM or an MPT, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings

BIAS = "attention.max_alibi_bias"
BLOOM_BIAS = 8.0
"""llama.cpp's own: files of BLOOM do not have the key."""


def bloom(keys: GgufKeys) -> Settings:
    """llama.cpp's converter parts queries, keys and values."""
    keys.only(BIAS, BLOOM_BIAS)
    keys.only("feed_forward_length", 4 * keys.integer("embedding_length"))
    return {"seq_length": keys.integer("context_length"), "qkv_by_heads": False}


def mpt(keys: GgufKeys) -> Settings:
    """A file without slopes has a table of positions, which is another network."""
    bias, hidden, width = keys.number(BIAS, 0.0), keys.integer("embedding_length"), keys.integer("feed_forward_length")
    if bias <= 0:
        raise keys.wrong(BIAS, bias, "a positive number")
    if not hidden or width % hidden:
        raise keys.wrong("feed_forward_length", width, f"a multiple of embedding_length, {hidden}")
    return {
        "d_model": hidden,
        "n_heads": keys.integer("attention.head_count"),
        "n_layers": keys.layers(),
        "max_seq_len": keys.integer("context_length"),
        "expansion_ratio": width // hidden,
        "attn_config": {"alibi_bias_max": bias, "clip_qkv": keys.number("attention.clamp_kqv", 0.0)},
    }
