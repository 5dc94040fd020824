"""Qwen3-Next, and the decoders of Qwen3.5: gated delta nets, and among them attention with a gate on what it gives."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.experts import expert_mappings, qwen_expert_sources, qwen_experts
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, NO_EXPERTS, head_settings
from edgeq.converters.families.family import NORM, FamilyDescription, Values
from edgeq.converters.families.positions import partial_rope
from edgeq.converters.families.rearranged import convolution
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.draft_stack import DraftStack
from edgeq.network.stack import Stack

DELTA, ATTENTION = "linear_attention", "full_attention"
SECTIONS = ("mrope_section", "mrope_interleaved")
"""Keys of a rope of several axes.  All positions of a token of a text are the same, so all its pairs turn as by one axis."""
GAINS = ("input_layernorm", "post_attention_layernorm")
FC = "mtp.fc.weight"


def delta_layers(values: Values) -> tuple[int, ...]:
    """Layers of a delta net, as `layer_types` says; without it, all but every `full_attention_interval`-th."""
    layers, types, interval = values["num_hidden_layers"], values["layer_types"], values["full_attention_interval"]
    if types is None:
        if type(interval) is not int or interval < 1:
            raise FormatError(f"full_attention_interval is {interval!r:.80}; expected a positive integer")
        return tuple(i for i in range(layers) if (i + 1) % interval)
    return typed_delta_layers(types, layers)


def typed_delta_layers(types: Any, layers: int) -> tuple[int, ...]:
    """Indices of the layers of a delta net in a list of types."""
    if not isinstance(types, list) or len(types) != layers:
        raise FormatError(f"layer_types is not a list of {layers} entries, one per layer")
    unknown = sorted({str(each) for each in types} - {DELTA, ATTENTION})
    if unknown:
        raise UnsupportedError(f"layer_types {unknown[0]!r:.80} is not supported; supported: {DELTA}, {ATTENTION}")
    return tuple(i for i, each in enumerate(types) if each == DELTA)


def qwen_next_settings(values: Values) -> dict[str, Any]:
    where, layers = "rope_scaling" if values["rope_scaling"] else "rope_parameters", delta_layers(values)
    settings = values[where] or {}
    if not isinstance(settings, dict):
        raise FormatError(f"{where} is {settings!r:.80}; expected an object")
    one_axis = {key: value for key, value in settings.items() if key not in SECTIONS}
    net = DeltaNet(
        layers=layers,
        key_heads=values["linear_num_key_heads"],
        value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        taps=values["linear_conv_kernel_dim"],
    )  # fmt: skip
    return head_settings(values) | {
        "rope": partial_rope({**values, where: one_axis}),
        "qk_norm": True,
        "attention_gate": True,
        "delta_net": net,
    }


def qwen_next_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Norms hold w of a gain 1 + w, but for that of a delta net; rows of q_proj are, head by head, queries and their gate.

    Of the layer that drafts all tensors have names of their own.
    """
    hidden = config.hidden_size
    sources = {NORM: TensorSource(NORM, (hidden,), (hidden,), added=1.0)}
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        for module in GAINS:
            sources[f"{p}{module}.weight"] = TensorSource(f"{p}{module}.weight", (hidden,), (hidden,), added=1.0)
        sources |= delta_sources(config, p) if layer in config.delta_layers else attention_sources(config, p, p)
    return sources | qwen_expert_sources(config) | (draft_sources(config.draft) if config.draft else {})


def attention_sources(config: Stack, ours: str, theirs: str) -> dict[str, TensorSource]:
    """The tensors of a layer of attention that are not as they are called, or have other values."""
    hidden, head, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    sources = {}
    for module in ("self_attn.q_norm", "self_attn.k_norm"):
        sources[f"{ours}{module}.weight"] = TensorSource(f"{theirs}{module}.weight", (head,), (head,), added=1.0)
    stored, shape = (2 * config.query_size, hidden), (config.query_size, hidden)
    for module, begin in (("q_proj", 0), ("gate_proj", head)):
        rows = tuple(2 * head * i + begin + c for i in range(heads) for c in range(head))
        sources[f"{ours}self_attn.{module}.weight"] = TensorSource(
            f"{theirs}self_attn.q_proj.weight", stored, shape, order=rows
        )
    return sources


def draft_sources(draft: DraftStack) -> dict[str, TensorSource]:
    """The tensors of the layer that drafts; the first half of the columns of `mtp.fc` reads the token, the second the state."""
    hidden, kv, inner = draft.hidden_size, draft.kv_size, draft.intermediate_size
    ours, theirs = f"{draft.prefix}layers.0.", "mtp.layers.0."
    gains = {
        f"{draft.prefix}embedding_norm": "mtp.pre_fc_norm_embedding",
        f"{draft.prefix}hidden_norm": "mtp.pre_fc_norm_hidden",
        f"{draft.prefix}norm": "mtp.norm",
        **{f"{ours}{module}": f"{theirs}{module}" for module in GAINS},
    }
    shapes = {
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, draft.query_size),
    }
    owner = "mlp."
    if draft.num_experts:
        owner, inner = "mlp.shared_expert.", draft.shared_expert_intermediate_size
        shapes |= {"mlp.gate": (draft.num_experts, hidden), "mlp.shared_expert_gate": (1, hidden)}
    shapes |= {f"{owner}gate_proj": (inner, hidden), f"{owner}up_proj": (inner, hidden), f"{owner}down_proj": (hidden, inner)}
    joined, shape = (hidden, 2 * hidden), (hidden, hidden)
    return {
        **{f"{name}.weight": TensorSource(f"{its}.weight", (hidden,), (hidden,), added=1.0) for name, its in gains.items()},
        f"{draft.prefix}embedding.weight": TensorSource(FC, joined, shape, column=0),
        f"{draft.prefix}hidden.weight": TensorSource(FC, joined, shape, column=hidden),
        **attention_sources(draft, ours, theirs),
        **{f"{ours}{name}.weight": TensorSource(f"{theirs}{name}.weight", its, its) for name, its in shapes.items()},
        **qwen_expert_sources(draft, ours=draft.prefix, layers="mtp."),
    }


def has_draft_layer(values: Values, tensors: Container[str]) -> bool:
    """Whether a checkpoint has the layer in the one form that is known: one layer, without a table of its own, which joins the
    token and the state in this order.  Checkpoints that transformers saved have its keys and not its tensors."""
    nested = values.get("text_config")
    keys = nested if isinstance(nested, dict) else values
    other = keys.get("mtp_use_dedicated_embeddings") or keys.get("mtp_hidden_states_first")
    return FC in tensors and keys.get("mtp_num_hidden_layers", 1) == 1 and not other


def delta_sources(config: ModelConfig, p: str) -> dict[str, TensorSource]:
    """The tensors of a layer of a delta net."""
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    heads, values = (net.value_heads, hidden), (net.value_size, hidden)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "qkv_proj.weight": ("in_proj_qkv.weight", (net.channels, hidden)),
        "gate_proj.weight": ("in_proj_z.weight", values),
        "b.weight": ("in_proj_b.weight", heads),
        "a.weight": ("in_proj_a.weight", heads),
        "decay.weight": ("A_log", heads[:1]),
        "dt.bias": ("dt_bias", heads[:1]),
        "norm.weight": ("norm.weight", (net.value_dim,)),
        "o_proj.weight": ("out_proj.weight", (hidden, net.value_size)),
    }
    ours, theirs, convolved = f"{p}self_attn.", f"{p}linear_attn.", (net.channels, net.taps)
    found = {f"{ours}{mine}": TensorSource(f"{theirs}{name}", shape, shape) for mine, (name, shape) in tensors.items()}
    return found | {f"{ours}conv.weight": convolution(f"{theirs}conv1d.weight", convolved)}


def fused_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Qwen3-Next: rows of one matrix are, key head by key head, q, k, v and z; those of another b and a.

    In GGUF files z is apart, and q, k and v are in order.
    """
    net, hidden, sources = config.delta_net, config.hidden_size, qwen_next_sources(config)
    assert net is not None
    shared = net.value_heads // net.key_heads
    widths = (net.key_dim, net.key_dim, shared * net.value_dim, shared * net.value_dim)
    q, k, v, z = _by_parts(net.key_heads, widths)
    b, a = _by_parts(net.key_heads, (shared, shared))
    fused = {"in_proj_qkvz": {"qkv_proj": q + k + v, "gate_proj": z}, "in_proj_ba": {"b": b, "a": a}}
    apart = {"qkv_proj": "in_proj_qkv", "gate_proj": "in_proj_z"}
    for layer in net.layers:
        p = f"model.layers.{layer}."
        for theirs, parts in fused.items():
            stored = sum(map(len, parts.values())), hidden
            for ours, rows in parts.items():
                shape = len(rows), hidden
                source = TensorSource(f"{p}linear_attn.{theirs}.weight", stored, shape, order=rows)
                if ours in apart:
                    source = TensorSource(f"{p}linear_attn.{apart[ours]}.weight", shape, shape, otherwise=source)
                sources[f"{p}self_attn.{ours}.weight"] = source
    return sources


def _by_parts(heads: int, widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rows of each part of all heads, of a matrix whose heads have parts of `widths` one after another."""
    begins = [sum(widths[:part]) for part in range(len(widths))]
    return [
        tuple(head * sum(widths) + begin + i for head in range(heads) for i in range(width))
        for begin, width in zip(begins, widths, strict=True)
    ]


def unread(config: object, tensor: str) -> bool:
    """Tensors of drafts, where their layer is not converted."""
    return tensor.startswith("mtp.")


def qwen_next_moe_settings(values: Values) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": values["shared_expert_intermediate_size"]}
    return qwen_next_settings(values) | qwen_experts(values) | shared


def qwen3_5_moe_settings(values: Values) -> dict[str, Any]:
    """The shares of the chosen experts are always divided by their sum; no key says so."""
    return qwen_next_moe_settings({**values, "norm_topk_prob": True})


KEYS = DEFAULTS | {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
ALIKE: dict[str, tuple[Any, ...]] = {"attn_output_gate": (None, True)} | {
    key: values for key, values in NEUTRAL.items() if key != "partial_rotary_factor"
}
QWEN_3_5 = FamilyDescription(
    "Qwen3_5ForCausalLM",
    KEYS | {"num_key_value_heads": 4},
    ALIKE,
    qwen_next_settings,
    sources=qwen_next_sources,
    unused=unread,
    drafts=has_draft_layer,
)
EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
ALIKE_BUT_EXPERTS = {key: values for key, values in ALIKE.items() if key not in NO_EXPERTS}
QWEN_3_5_MOE = replace(
    QWEN_3_5,
    architecture="Qwen3_5MoeForCausalLM",
    defaults=KEYS | EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
    neutral=ALIKE_BUT_EXPERTS,
    settings=qwen3_5_moe_settings,
    keys={"intermediate_size": "moe_intermediate_size"},
    mappings=expert_mappings,
)


QWEN_NEXT_FAMILIES = (
    QWEN_3_5,
    QWEN_3_5_MOE,
    replace(
        QWEN_3_5_MOE,
        architecture="Qwen3NextForCausalLM",
        defaults=KEYS | EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        neutral=ALIKE_BUT_EXPERTS | {"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])},
        settings=qwen_next_moe_settings,
        sources=fused_sources,
    ),
)
