"""Llama, Mistral, Qwen2, Qwen3 and Phi-3."""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import one_window, partial_rope, qwen_windows, rope
from edgeq.converters.families.rearranged import fused_gate_up
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.json_records import check_integer
from edgeq.network.mlp import GATED
from edgeq.network.stack import MAX_SIZES

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
NO_EXPERTS: dict[str, tuple[Any, ...]] = {"num_local_experts": (None, 0), "num_experts": (None, 0)}
NEUTRAL_LAYER: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
}
NEUTRAL = NEUTRAL_LAYER | NO_EXPERTS | {"partial_rotary_factor": (None, 1)}
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
QKV = ("q", "k", "v")
MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""transformers' own where a Ministral 3 has none."""


def llama_settings(values: Values) -> dict[str, Any]:
    return head_settings(values) | {"rope": rope(values)}


def head_settings(values: Values) -> dict[str, Any]:
    """What the Llama line reads besides its rope.  UnsupportedError: an activation that its gate is not tried with."""
    activation = values.get("hidden_activation", values["hidden_act"])
    if activation not in GATED:
        raise UnsupportedError(f"hidden_act {activation!r} is not supported; supported: {', '.join(GATED)}")
    heads, head_dim, kv_heads = values["num_attention_heads"], values["head_dim"], values["num_key_value_heads"]
    return {
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": values["hidden_size"] // heads if head_dim is None else head_dim,
        "rms_norm_eps": values["rms_norm_eps"],
    }


def qwen3_settings(values: Values) -> dict[str, Any]:
    return llama_settings(values) | {"qk_norm": True}


def ministral_settings(values: Values) -> dict[str, Any]:
    """Queries grow with their positions from the original context on; here the context ends there, and they do not."""
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where]
    if not isinstance(settings, dict):
        raise FormatError(f"{where} is {settings!r:.80}; expected an object")
    read = ("llama_4_scaling_beta", "max_position_embeddings")
    found = llama_settings({**values, where: {key: value for key, value in settings.items() if key not in read}})
    longest = values["max_position_embeddings"]
    original = settings.get("original_max_position_embeddings", longest)
    if not settings.get("llama_4_scaling_beta"):
        return found
    for key, length in (("max_position_embeddings", longest), ("original_max_position_embeddings", original)):
        check_integer(key, length, 1, MAX_SIZES["max_position_embeddings"])
    return found | {"max_position_embeddings": min(longest, original)}


def phi3_settings(values: Values) -> dict[str, Any]:
    """UnsupportedError: "yarn", which transformers takes for longrope in this family; no checkpoint has it."""
    for where in ("rope_scaling", "rope_parameters"):
        settings = values[where]
        if isinstance(settings, dict) and "yarn" in (settings.get("rope_type"), settings.get("type")):
            raise UnsupportedError(f"{where}: rope kind 'yarn' is not supported here; supported: default, longrope")
    return head_settings(values) | {"rope": partial_rope(values)}


def phi3_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Rows of q, k, v lie one below the other in one matrix, and so do those of gate and up."""
    q, kv, hidden = config.query_size, config.kv_size, config.hidden_size
    sources = {}
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        matrix, shape = f"{p}self_attn.qkv_proj.weight", (q + 2 * kv, hidden)
        for part, row, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            sources[f"{p}self_attn.{part}_proj.weight"] = TensorSource(matrix, shape, (rows, hidden), row)
    return sources | fused_gate_up(config)


LLAMA_FAMILIES = (
    FamilyDescription("LlamaForCausalLM", DEFAULTS, NEUTRAL, llama_settings),
    FamilyDescription(
        "MistralForCausalLM",
        DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        NEUTRAL | {"layer_types": (None,)},
        llama_settings,
        one_window,
    ),
    FamilyDescription(
        "Ministral3ForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "rope_parameters": MINISTRAL_ROPE,
            "sliding_window": None,
        },
        NEUTRAL | {"layer_types": (None,)},
        ministral_settings,
        one_window,
    ),
    FamilyDescription(
        "Qwen2ForCausalLM",
        DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32768} | QWEN_WINDOW,
        NEUTRAL,
        llama_settings,
        qwen_windows,
        biases=QKV,
    ),
    FamilyDescription(
        "Qwen3ForCausalLM",
        DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768} | QWEN_WINDOW,
        NEUTRAL,
        qwen3_settings,
        qwen_windows,
    ),
    FamilyDescription(
        "Phi3ForCausalLM",
        DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
        NEUTRAL_LAYER | NO_EXPERTS | {"layer_types": (None,)},
        phi3_settings,
        one_window,
        sources=phi3_sources,
    ),
)
