"""MPT (MosaicML 2023): ALiBi, limits of queries, keys and values, LayerNorm and linear layers without biases.

`attn_config` of config.json is an object with settings of attention.  transformers 5.23 leaves its `alibi_bias_max` and
`logit_scale` out; the code that the models were trained with reads both, and so does edgeq.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.gpt import fused_sources, table_sources, whole_heads
from edgeq.converters.families.family import HEAD, NORM, FamilyDescription, Values
from edgeq.converters.families.rearranged import Sources, multiplier, norms_without_biases
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_positive
from edgeq.network.rope import Rope

NORMS = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}
ATTENTION_DEFAULTS: dict[str, Any] = {
    "clip_qkv": None,
    "softmax_scale": None,
    "alibi": True,
    "alibi_bias_max": 8,
}
ATTENTION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_type": (None, "multihead_attention"),
    "prefix_lm": (None, False),
    "qk_ln": (None, False),
    "qk_gn": (None, False),
    "attn_uses_sequence_id": (None, False),
    "alibi": (True,),
    "rope": (None, False),
    "sliding_window_size": (None, -1),
    "kv_n_heads": (None,),
}
"""Keys of `attn_config` -> values under which the network is this one."""
INVERSE_ROOT = "inv_sqrt_d_model"
"""A `logit_scale`: one over the root of the hidden size."""


def attention_settings(values: Values) -> dict[str, Any]:
    """`attn_config`, completed by its defaults.  UnsupportedError: a key that makes another network."""
    found = values["attn_config"]
    if found is not None and not isinstance(found, dict):
        raise FormatError(f"attn_config is {str(found)[:80]}; expected an object or null")
    settings = ATTENTION_DEFAULTS | (found or {})
    for key, neutral in ATTENTION_NEUTRAL.items():
        if settings.get(key) not in neutral:
            supported = " or ".join(repr(value) for value in neutral if value is not None) or "absent"
            raise UnsupportedError(
                f"attn_config: {key} is {settings[key]!r:.80}; MptForCausalLM is supported with: {supported}"
            )
    return settings


def mpt_settings(values: Values) -> dict[str, Any]:
    hidden, heads, attention = values["d_model"], values["n_heads"], attention_settings(values)
    ratio, scale = values["expansion_ratio"], attention["softmax_scale"]
    if type(ratio) not in (int, float) or not 0 < ratio <= 1 << 10:
        raise FormatError(f"expansion_ratio is {ratio!r:.80}; expected a positive number")
    # transformers and the models' own code take 0 for no limit.
    limit = attention["clip_qkv"] or None
    check_positive("alibi_bias_max", attention["alibi_bias_max"])
    for name, value in (("softmax_scale", scale), ("clip_qkv", limit)):
        if value is not None:
            check_positive(name, value)
    return {
        "hidden_act": "gelu",
        "gated_mlp": False,
        "layer_norm": True,
        "rms_norm_eps": values["layer_norm_epsilon"],
        "intermediate_size": int(hidden * ratio),
        "num_key_value_heads": heads,
        "head_dim": whole_heads(hidden, heads),
        "rope": Rope(theta=10000.0, kind="alibi", alibi_bias_max=float(attention["alibi_bias_max"])),
        "clip_qkv": None if limit is None else float(limit),
        "query_pre_attn_scalar": None if scale is None else scale**-2.0,
    }


def logit_factor(values: Values) -> float:
    found = values["logit_scale"]
    if found == INVERSE_ROOT and type(values.get("d_model")) is int and values["d_model"] > 0:
        inverse: float = float(values["d_model"]) ** -0.5
        return inverse
    return 1.0 if found is None else multiplier(values, "logit_scale")


def mpt_sources(config: ModelConfig, factor: float) -> Sources:
    p, size = "transformer.", (config.hidden_size,)
    linears = {"qkv": "attn.Wqkv", "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"}
    norms = {
        f"model.layers.{layer}.{ours}.weight": TensorSource(f"{p}blocks.{layer}.{theirs}.weight", size, size)
        for layer in range(config.num_hidden_layers)
        for ours, theirs in NORMS.items()
    }
    last = factor if config.pooling is None else 1.0
    return {
        **table_sources(config, f"{p}wte.weight", HEAD),
        **norms,
        **norms_without_biases(config, NORMS),
        NORM: TensorSource(f"{p}norm_f.weight", size, size, factor=last),
        **fused_sources(config, f"{p}blocks.", linears, (), mixed=False),
    }


def mpt(hf: Values) -> FamilyDescription:
    return replace(MPT, sources=partial(mpt_sources, factor=logit_factor({**MPT.defaults, **hf})))


MPT = FamilyDescription(
    "MptForCausalLM",
    {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "attn_config": None,
        "logit_scale": None,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    {"no_bias": (None, True), "norm_type": (None, "low_precision_layernorm", "layernorm")},
    mpt_settings,
    keys={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        # Its size is checked; settings multiply it by expansion_ratio.
        "intermediate_size": "d_model",
    },
    variants=mpt,
)
