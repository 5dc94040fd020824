"""Gemma 4, the text model; vision/gemma4.py has its tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.experts import qwen_expert_sources
from edgeq.converters.families.decoders.gemma import GAINS
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, head_settings
from edgeq.converters.families.family import (
    LAYER_ROWS,
    MLP_MAPPINGS,
    ROW_CONTEXT,
    ROW_CONTEXT_NORM,
    FamilyDescription,
    ScaleMapping,
    Values,
    linear_module,
)
from edgeq.converters.families.positions import rope_of, typed_windows, window
from edgeq.converters.families.rearranged import flag
from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.manifest import table_shapes
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.network.stack import Stack

PATTERN = 6
"""Without `layer_types` every so many-th layer sees all positions."""
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
"""transformers' own where there are no rope_parameters."""
PER_LAYER = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Keys of a layer in `per_layer_config`, as transformers writes them -> as published configurations have them."""
VISION = ("model.vision_tower.", "model.embed_vision.")
AUDIO = ("model.audio_tower.", "model.embed_audio.")


def layer_types(values: Values, layers: int) -> list[Any]:
    """The type of each layer; that of the last is full_attention, whatever it is called."""
    types = values["layer_types"]
    if types is None:
        types = ["full_attention" if i % PATTERN == PATTERN - 1 else "sliding_attention" for i in range(layers)]
    return [*types[:-1], "full_attention"] if isinstance(types, list) and types else types


def gemma4_windows(values: Values, layers: int) -> tuple[int, ...]:
    found = window(values)
    if not found:
        raise FormatError("sliding_window is null; local layers need a positive integer")
    return typed_windows(found, layer_types(values, layers), layers)


def global_heads(values: Values) -> dict[str, Any]:
    """Sizes of heads in layers without a window, in both spellings.  UnsupportedError: these layers differ from one another."""
    found = {key: values[key] for key in PER_LAYER.values()}
    by_layer, layers = values["per_layer_config"], values["num_hidden_layers"]
    if by_layer is not None:
        types = layer_types(values, layers)
        seeing = [str(i) for i in range(layers) if types[i : i + 1] == ["full_attention"]]
        first = by_layer.get(seeing[0]) if isinstance(by_layer, dict) and seeing else None
        if not isinstance(first, dict) or by_layer != dict.fromkeys(seeing, first) or not set(first) <= set(PER_LAYER):
            raise UnsupportedError(
                f"per_layer_config is {str(by_layer)[:80]}; supported: the same head_dim and num_key_value_heads for every "
                "full_attention layer, and nothing for others"
            )
        found = {ours: first.get(key) for key, ours in PER_LAYER.items()}
    elif not values["attention_k_eq_v"]:
        found["num_global_key_value_heads"] = None
    own = {"global_head_dim": values["head_dim"], "num_global_key_value_heads": values["num_key_value_heads"]}
    return {key: 0 if number in (None, own[key]) else number for key, number in found.items()}


def gemma4_rope(values: Values, kind: str) -> Rope:
    """The rope of layers of a type.  "proportional": `partial_rotary_factor` of all pairs of a head turn."""
    given = ROPES if values["rope_parameters"] is None else values["rope_parameters"]
    if not isinstance(given, dict) or set(given) != set(ROPES) or not all(isinstance(each, dict) for each in given.values()):
        raise FormatError(f"rope_parameters is {str(given)[:80]}; expected one object for each of the layer_types")
    where, settings = f"rope_parameters of {kind}", dict(given[kind])
    if settings.get("rope_type") != "proportional":
        return rope_of(values, where, settings, ROPES[kind]["rope_theta"])
    share, factor = settings.pop("partial_rotary_factor", 1.0), settings.pop("factor", 1.0)
    if factor != 1:
        raise UnsupportedError(f"{where}: factor is {factor!r:.80}; supported with rope kind 'proportional': 1.0")
    plain = rope_of(values, where, settings | {"rope_type": "default"}, ROPES[kind]["rope_theta"])
    return replace(plain, kind="proportional", partial_rotary_factor=share)


def gemma4_experts(values: Values) -> dict[str, Any]:
    """With experts the MLP beside them has the size that config.json calls intermediate_size."""
    if not flag(values, "enable_moe_block"):
        return {}
    return {
        "num_experts": values["num_experts"],
        "num_experts_per_tok": values["top_k_experts"],
        "norm_topk_prob": True,
        "intermediate_size": values["moe_intermediate_size"],
        "shared_expert_intermediate_size": values["intermediate_size"],
        "experts_beside_mlp": True,
    }


def gemma4_settings(values: Values) -> dict[str, Any]:
    """UnsupportedError: the table of rows for layers has other tokens than the embedding."""
    tokens = values["vocab_size_per_layer_input"]
    if values["hidden_size_per_layer_input"] and tokens != values["vocab_size"]:
        raise UnsupportedError(f"vocab_size_per_layer_input is {tokens!r:.80}; supported: vocab_size, {values['vocab_size']}")
    return (
        head_settings(values)
        | global_heads(values)
        | gemma4_experts(values)
        | {
            "rope": gemma4_rope(values, "full_attention"),
            "local_rope": gemma4_rope(values, "sliding_attention"),
            "qk_norm": True,
            "value_norm": True,
            "post_norms": True,
            "layer_scalars": True,
            "embedding_multiplier": values["hidden_size"] ** 0.5,
            # Scores are not divided: queries and keys are normed.
            "query_pre_attn_scalar": 1,
            **{
                key: values[key]
                for key in ("attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp", "final_logit_softcapping")
            },
            "hidden_size_per_layer_input": values["hidden_size_per_layer_input"] or 0,
        }
    )


def gemma4_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Gains are stored as they are multiplied, unlike those of Gemma 1 to 3."""
    hidden, size, sources = (config.hidden_size,), config.hidden_size_per_layer_input, dict[str, TensorSource]()
    of_rows: dict[str, tuple[str, tuple[int, ...]]] = {
        "rows.gate_proj": ("per_layer_input_gate", (size, *hidden)),
        "rows.out_proj": ("per_layer_projection", (*hidden, size)),
        "rows.norm": ("post_per_layer_input_norm", hidden),
    }
    for p in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers)):
        names: dict[str, tuple[str, tuple[int, ...]]] = {module: (theirs, hidden) for module, theirs in GAINS.items()}
        names |= of_rows if size else {}
        for module, (theirs, shape) in names.items():
            sources[f"{p}{module}.weight"] = TensorSource(f"{p}{theirs}.weight", shape, shape)
        sources[f"{p}layer_scalar.weight"] = TensorSource(f"{p}layer_scalar", (1,), (1,))
    if config.experts_beside_mlp:
        sources |= qwen_expert_sources(config, "") | moe_sources(config)
    if size:
        (rows, context), gain = table_shapes(config).values(), (size,)
        sources[LAYER_ROWS] = TensorSource("model.embed_tokens_per_layer.weight", rows, rows)
        sources[ROW_CONTEXT] = TensorSource("model.per_layer_model_projection.weight", context, context)
        # What is added to the row of the table is divided by sqrt(2) as that is.
        sources[ROW_CONTEXT_NORM] = TensorSource("model.per_layer_projection_norm.weight", gain, gain, factor=2**-0.5)
    return sources


def moe_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Sources of an MLP and of experts beside it.  What the router reads is divided by sqrt(hidden size)."""
    hidden, inner, sources = config.hidden_size, config.shared_expert_intermediate_size, dict[str, TensorSource]()
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "gate.weight": ("router.proj.weight", (config.num_experts, hidden)),
        "expert_scales.weight": ("router.per_expert_scale", (config.num_experts,)),
        "shared_norm.weight": ("post_feedforward_layernorm_1.weight", (hidden,)),
        "experts_input_norm.weight": ("pre_feedforward_layernorm_2.weight", (hidden,)),
        "experts_norm.weight": ("post_feedforward_layernorm_2.weight", (hidden,)),
        "shared_expert.gate_proj.weight": ("mlp.gate_proj.weight", (inner, hidden)),
        "shared_expert.up_proj.weight": ("mlp.up_proj.weight", (inner, hidden)),
        "shared_expert.down_proj.weight": ("mlp.down_proj.weight", (hidden, inner)),
    }
    for p in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers)):
        for ours, (theirs, shape) in names.items():
            sources[f"{p}mlp.{ours}"] = TensorSource(f"{p}{theirs}", shape, shape)
        sources[f"{p}mlp.router_norm.weight"] = TensorSource(f"{p}router.scale", (hidden,), (hidden,), factor=hidden**-0.5)
    return sources


def gemma4_unused(config: ModelConfig, tensor: str) -> bool:
    """The towers, and keys and values that are not read."""
    return tensor.startswith((*VISION, *AUDIO)) or unread_keys(config, tensor)


def unread_keys(config: ModelConfig, tensor: str) -> bool:
    """Keys and values of layers that read those of others: checkpoints carry what was there before training."""
    of_keys = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    shared = (layer for layer in range(config.num_hidden_layers) if config.shares_cache(layer))
    return any(tensor == f"model.layers.{layer}.self_attn.{name}" for layer in shared for name in of_keys)


def gemma4_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """Without those of attention: what queries, keys and values are multiplied by, their norms take away."""
    if not config.num_experts:
        return MLP_MAPPINGS
    owners = [f"experts.{expert}." for expert in range(config.num_experts)]
    consumers = tuple(f"{owner}{part}" for owner in owners for part in ("gate", "up"))
    return (
        ScaleMapping("mlp_norm", ("shared.gate", "shared.up"), "mlp.shared_expert"),
        ScaleMapping("experts_input_norm", consumers, "mlp"),
        *(ScaleMapping(f"{o}up", (f"{o}down",), linear_module(f"{o}down")) for o in (*owners, "shared.")),
    )


GEMMA_4 = FamilyDescription(
    "Gemma4ForCausalLM",
    DEFAULTS
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "layer_types": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    {key: values for key, values in NEUTRAL.items() if key not in ("final_logit_softcapping", "num_experts")}
    | {
        # Rows of pictures alone see what comes after them.
        "use_bidirectional_attention": (None, "vision"),
    },
    gemma4_settings,
    gemma4_windows,
    keys={"hidden_act": "hidden_activation"},
    sources=gemma4_sources,
    unused=gemma4_unused,
    mappings=gemma4_mappings,
)
