"""What the keys of a GGUF file say of a Falcon, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings

SECOND_NORM = "attn_norm_2.weight"
"""A norm of attention's own, beside that of the MLP, of the larger models."""


def falcon(keys: GgufKeys) -> Settings:
    """llama.cpp stores no activation: published models have this one.  Its converter parts queries, keys and values."""
    keys.only("tensor_data_layout", "jploski")
    heads = keys.integer("attention.head_count_kv", 1)
    two_norms = keys.has(SECOND_NORM)
    return {
        "activation": "gelu",
        "num_kv_heads": heads,
        "num_key_value_heads": heads,
        "new_decoder_architecture": two_norms or heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "multi_query": heads == 1,
        "parallel_attn": True,
        "bias": False,
        "ffn_hidden_size": keys.integer("feed_forward_length"),
        "qkv_by_heads": False,
    }
