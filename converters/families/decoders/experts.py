"""Mixtral (Jiang et al. 2024, arXiv 2401.04088), Qwen2-MoE, Qwen3-MoE and gpt-oss: experts in every layer."""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, QKV, head_settings, llama_settings, qwen3_settings
from edgeq.converters.families.family import FamilyDescription, ScaleMapping, Values, linear_module, mixer_mappings
from edgeq.converters.families.positions import one_window, rope_of, typed_windows, window
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.stack import Stack

# Module of torch_decoder.py -> Mixtral's own.
EXPERT_MODULES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
NEUTRAL_MIXTRAL = {key: values for key, values in NEUTRAL.items() if key not in ("num_experts", "num_local_experts")}
NEUTRAL_QWEN: dict[str, tuple[Any, ...]] = NEUTRAL_MIXTRAL | {
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "use_sliding_window": (None, False),
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' own where a gpt-oss has none."""


def no_local_layers(values: Values, layers: int) -> tuple[int, ...]:
    """Windows come only with `use_sliding_window`, which no published model of these families sets."""
    types = values.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise UnsupportedError(f"layer_types is {str(types)[:80]}; supported: full_attention in every layer")
    return ()


def mixtral_settings(values: Values) -> dict[str, Any]:
    return llama_settings(values) | local_experts(values)


def local_experts(values: Values) -> dict[str, Any]:
    """Experts whose shares are a softmax of the chosen logits alone: that of all, divided by the sum of the chosen shares."""
    return {
        "num_experts": values["num_local_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "norm_topk_prob": True,
    }


def qwen_experts(values: Values) -> dict[str, Any]:
    # transformers 5 writes the number of Qwen3-MoE's experts under Mixtral's name.
    experts = values.get("num_local_experts")
    return {
        "num_experts": values["num_experts"] if experts is None else experts,
        "num_experts_per_tok": values["num_experts_per_tok"],
        "norm_topk_prob": values["norm_topk_prob"],
    }


def qwen2_moe_settings(values: Values) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": values["shared_expert_intermediate_size"]}
    return llama_settings(values) | qwen_experts(values) | shared


def qwen3_moe_settings(values: Values) -> dict[str, Any]:
    return qwen3_settings(values) | qwen_experts(values)


def mixtral_sources(config: ModelConfig) -> dict[str, TensorSource]:
    hidden, inner, router = config.hidden_size, config.intermediate_size, (config.num_experts, config.hidden_size)
    sources = {}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.block_sparse_moe."
        sources[f"{ours}gate.weight"] = TensorSource(f"{theirs}gate.weight", router, router)
        for expert in range(config.num_experts):
            for module, name in EXPERT_MODULES.items():
                shape = (hidden, inner) if module == "down_proj" else (inner, hidden)
                source = TensorSource(f"{theirs}experts.{expert}.{name}.weight", shape, shape)
                sources[f"{ours}experts.{expert}.{module}.weight"] = source
    return sources


def expert_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """The router reads the same channels as they do, so it follows their scale."""
    owners = [f"experts.{expert}." for expert in range(config.num_experts)]
    followers = ["router"]
    if config.shared_expert_intermediate_size:
        owners = [*owners, "shared."]
        followers += ["shared_gate"] if config.shared_expert_gate else []
    consumers = tuple(f"{owner}{part}" for owner in owners for part in ("gate", "up"))
    downs = [f"{owner}down" for owner in owners]
    return (
        *mixer_mappings(config),
        ScaleMapping("mlp_norm", consumers, "mlp", followers=tuple(followers)),
        *(ScaleMapping(f"{o}up", (d,), linear_module(d)) for o, d in zip(owners, downs, strict=True)),
    )


def qwen_expert_sources(
    config: Stack, owner: str = "mlp.", ours: str = "model.", layers: str = "model."
) -> dict[str, TensorSource]:
    """Experts that lie in two tensors of a layer, one after another, of each gate above up; in other checkpoints apart.

    owner   what stands before their name in a layer
    ours, layers   with what names of layers begin here, and in the checkpoint
    """
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    sources = {}
    for layer in range(config.num_hidden_layers):
        p, theirs = f"{ours}layers.{layer}.mlp.experts.", f"{layers}layers.{layer}.{owner}experts."
        gate_up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
        for expert in range(experts):
            for module, name, stored, shape, row in (
                ("gate_proj", "gate_up_proj", gate_up, (inner, hidden), 2 * inner * expert),
                ("up_proj", "gate_up_proj", gate_up, (inner, hidden), 2 * inner * expert + inner),
                ("down_proj", "down_proj", down, (hidden, inner), hidden * expert),
            ):
                part = f"{expert}.{module}.weight"
                otherwise = TensorSource(f"{theirs}{part}", shape, shape)
                sources[f"{p}{part}"] = TensorSource(f"{theirs}{name}", stored, shape, row, otherwise=otherwise)
    return sources


def gpt_oss_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, every other one from the first on."""
    types, found = values["layer_types"], window(values)
    if types is None:
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not found and isinstance(types, list) and "sliding_attention" in types:
        raise FormatError("sliding_window is null; layer_types has sliding_attention, which needs a positive integer")
    return typed_windows(found, types, layers)


def gpt_oss_settings(values: Values) -> dict[str, Any]:
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where] or GPT_OSS_ROPE
    return head_settings(values) | {
        "rope": rope_of(values, where, settings, values["rope_theta"]),
        **local_experts(values),
        "attention_sinks": True,
        "swiglu_limit": values["swiglu_limit"],
        "swiglu_alpha": values["swiglu_alpha"],
    }


def gpt_oss_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Experts of a layer in one tensor of each kind.  Of gate and up every even output channel is a gate.

    Floats have a column for every output channel, integers, which the source calls weights, a row.  In GGUF files experts are
    apart.
    """
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    sources, router, heads = dict[str, TensorSource](), (experts, hidden), (config.num_attention_heads,)
    for p in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers)):
        sources[f"{p}self_attn.sinks.weight"] = TensorSource(f"{p}self_attn.sinks", heads, heads)
        for kind, shape in (("weight", router), ("bias", router[:1])):
            sources[f"{p}mlp.gate.{kind}"] = TensorSource(f"{p}mlp.router.{kind}", shape, shape)
        gates, ups = (range(first, 2 * inner, 2) for first in (0, 1))
        for expert in range(experts):
            for module, name, (rows, columns), picked, stored in (
                ("gate_proj", "gate_up_proj", (inner, hidden), gates, 2 * inner),
                ("up_proj", "gate_up_proj", (inner, hidden), ups, 2 * inner),
                ("down_proj", "down_proj", (hidden, inner), range(hidden), hidden),
            ):
                ours, theirs = f"{p}mlp.experts.{expert}.{module}.", f"{p}mlp.experts.{name}"
                before, shape = stored * expert, (rows, columns)
                order = range(before + picked.start, before + picked.stop, picked.step)
                floats = TensorSource(theirs, (experts, columns, stored), shape, order=picked, transposed=True, matrix=expert)
                apart = TensorSource(f"{ours}weight", shape, shape, otherwise=floats)
                sources[f"{ours}weight"] = TensorSource(
                    f"{theirs}.weight", (experts, stored, columns), shape, order=order, otherwise=apart
                )
                biases = TensorSource(f"{theirs}_bias", (experts, stored), (rows,), order=order)
                sources[f"{ours}bias"] = TensorSource(f"{ours}bias", (rows,), (rows,), otherwise=biases)
    return sources


def gpt_oss_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """Nothing passes a limit and a sum with 1, so none between up and down."""
    return tuple(mapping for mapping in expert_mappings(config) if not mapping.absorber.endswith("up"))


EXPERT_FAMILIES = (
    FamilyDescription(
        "MixtralForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        NEUTRAL_MIXTRAL | {"layer_types": (None,)},
        mixtral_settings,
        one_window,
        sources=mixtral_sources,
        mappings=expert_mappings,
    ),
    FamilyDescription(
        "Qwen2MoeForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
        NEUTRAL_QWEN | {"qkv_bias": (None, True)},
        qwen2_moe_settings,
        no_local_layers,
        keys={"intermediate_size": "moe_intermediate_size"},
        biases=QKV,
        sources=qwen_expert_sources,
        mappings=expert_mappings,
    ),
    FamilyDescription(
        "Qwen3MoeForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        NEUTRAL_QWEN,
        qwen3_moe_settings,
        no_local_layers,
        keys={"intermediate_size": "moe_intermediate_size"},
        sources=qwen_expert_sources,
        mappings=expert_mappings,
    ),
    FamilyDescription(
        "GptOssForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        NEUTRAL_MIXTRAL | {"attention_bias": (None, True), "hidden_act": ("silu",)},
        gpt_oss_settings,
        gpt_oss_windows,
        biases=(*QKV, "o", "router", "experts.gate", "experts.up", "experts.down"),
        sources=gpt_oss_sources,
        mappings=gpt_oss_mappings,
    ),
)
