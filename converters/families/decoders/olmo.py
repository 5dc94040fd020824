"""OLMo 2 and 3, EXAONE 4 and OLMo-Hybrid: norms after attention and MLP instead of before them.

OLMo-Hybrid has them before and not after where a layer is a gated delta net.
"""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, head_settings, llama_settings
from edgeq.converters.families.decoders.qwen_next import ATTENTION, DELTA, typed_delta_layers
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import rope_of, typed_windows, window
from edgeq.converters.families.rearranged import Sources, layer_norms
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.json_records import check_integer
from edgeq.network.rope import Rope

NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
AFTER_BLOCKS = {"pre_norms": False, "post_norms": True, "qk_norm": True}
HEAD_NORM_EPS = 1e-5
"""Epsilon of the norm over a head of a delta net, whatever `rms_norm_eps` is."""


def olmo_settings(values: Values) -> dict[str, Any]:
    return llama_settings(values) | AFTER_BLOCKS | {"qk_norm_kind": "whole"}


def olmo3_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, all but every fourth."""
    types = values["layer_types"]
    if types is None:
        types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    if not (found := window(values)):
        raise FormatError("sliding_window is null; local layers need a positive integer")
    return typed_windows(found, types, layers)


def olmo3_settings(values: Values) -> dict[str, Any]:
    """One rope for layers without a window, which `rope_scaling` stretches, and a plain one for the others."""
    by_type = values["rope_parameters"] or {}
    if not isinstance(by_type, dict) or not set(by_type) <= {"full_attention", "sliding_attention"}:
        raise FormatError(f"rope_parameters is {str(by_type)[:80]}; expected one object for each of the layer_types")
    full = values["rope_scaling"] or by_type.get("full_attention") or {}
    local = by_type.get("sliding_attention") or {}
    return head_settings(values) | {
        **AFTER_BLOCKS,
        "qk_norm_kind": "whole",
        "rope": rope_of(values, "rope_parameters of full_attention", full, values["rope_theta"]),
        "local_rope": rope_of(values, "rope_parameters of sliding_attention", local, values["rope_theta"]),
    }


def exaone_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Local layers as `layer_types` says; without it, all but every `sliding_window_pattern`-th."""
    found, types, pattern = window(values), values["layer_types"], values["sliding_window_pattern"]
    if types is None and not found:
        return ()
    if types is None:
        if type(pattern) is not int or pattern < 1:
            raise FormatError(f"sliding_window_pattern is {pattern!r:.80}; expected a positive integer, or layer_types")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if not found and isinstance(types, list) and "sliding_attention" in types:
        raise FormatError("sliding_window is null; layer_types has sliding_attention, which needs a positive integer")
    return typed_windows(found, types, layers)


def exaone_settings(values: Values) -> dict[str, Any]:
    """Where layers have windows, the others do not rotate their queries and keys."""
    windows = exaone_windows(values, values["num_hidden_layers"])
    still = tuple(layer for layer, size in enumerate(windows) if not size)
    if window(values) and not windows:
        still = tuple(range(values["num_hidden_layers"]))
    return llama_settings(values) | AFTER_BLOCKS | {"layers_without_rope": still}


def post_norm_sources(config: ModelConfig) -> Sources:
    return layer_norms(config, NORMS)


def hybrid_settings(values: Values) -> dict[str, Any]:
    heads, hidden, layers = values["num_attention_heads"], values["hidden_size"], values["num_hidden_layers"]
    types = values["layer_types"]
    if types is None:
        types = [DELTA if (i + 1) % 4 else ATTENTION for i in range(layers)]
        types = types if ATTENTION in types else [*types[:-1], ATTENTION]
    key_heads, value_heads = (values[f"linear_num_{kind}_heads"] or heads for kind in ("key", "value"))
    check_integer("linear_num_key_heads", key_heads, 1, hidden)
    key_dim = values["linear_key_head_dim"] or int(0.75 * hidden / key_heads)
    net = DeltaNet(
        layers=typed_delta_layers(types, layers),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=values["linear_value_head_dim"] or 2 * key_dim,
        taps=values["linear_conv_kernel_dim"],
        allow_neg_eigval=values["linear_allow_neg_eigval"],
        norm_eps=HEAD_NORM_EPS,
    )
    return head_settings(values) | AFTER_BLOCKS | {"qk_norm_kind": "whole", "delta_net": net} | hybrid_rope(values)


def hybrid_rope(values: Values) -> dict[str, Any]:
    """A `rope_theta` of null: queries and keys are not rotated."""
    settings = values["rope_parameters"]
    if not isinstance(settings, dict) or "rope_theta" not in settings:
        raise FormatError(
            f"rope_parameters is {str(settings)[:80]}; expected an object with rope_theta: a number, or null where queries and "
            "keys are not rotated.  Without it they are to transformers, and are not to the authors' own converter"
        )
    if settings["rope_theta"] is None:
        return {"rope": Rope(10000.0), "layers_without_rope": tuple(range(values["num_hidden_layers"]))}
    return {"rope": rope_of(values, "rope_parameters", settings, None)}


def hybrid_sources(config: ModelConfig) -> Sources:
    """Names of published checkpoints, and of those that transformers has saved again."""
    sources, size = Sources(), (config.hidden_size,)
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        if layer in config.delta_layers:
            sources |= hybrid_delta_sources(config, p)
            names = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
            again = {ours: ours for ours in names}
        else:
            names, again = NORMS, {"attention_output_norm": "feedforward_layer_norm"}
        for ours, theirs in names.items():
            other = TensorSource(f"{p}{again[ours]}.weight", size, size) if ours in again else None
            sources[f"{p}{ours}.weight"] = TensorSource(f"{p}{theirs}.weight", size, size, otherwise=other)
    return sources


def hybrid_delta_sources(config: ModelConfig, p: str) -> Sources:
    """The tensors of a layer of a delta net: queries, keys, values and their convolutions lie apart."""
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    ours, theirs, heads = f"{p}self_attn.", f"{p}linear_attn.", (net.value_heads, hidden)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "gate_proj.weight": ("g_proj.weight", (net.value_size, hidden)),
        "b.weight": ("b_proj.weight", heads),
        "a.weight": ("a_proj.weight", heads),
        "decay.weight": ("A_log", heads[:1]),
        "dt.bias": ("dt_bias", heads[:1]),
        "norm.weight": ("o_norm.weight", (net.value_dim,)),
        "o_proj.weight": ("o_proj.weight", (hidden, net.value_size)),
    }
    sources = {f"{ours}{mine}": TensorSource(f"{theirs}{name}", shape, shape) for mine, (name, shape) in shapes.items()}
    sizes = {"q": net.key_size, "k": net.key_size, "v": net.value_size}
    matrices = [TensorSource(f"{theirs}{part}_proj.weight", (rows, hidden), (rows, hidden)) for part, rows in sizes.items()]
    sources[f"{ours}qkv_proj.weight"] = TensorSource("", (), (net.channels, hidden), parts=tuple(matrices))
    # What transformers saves again it cuts into thirds, whatever the parts are.
    third = -(-net.channels // 3)
    thirds = dict(zip(sizes, (third, third, net.channels - 2 * third), strict=True))
    again, published = (
        tuple(TensorSource(f"{theirs}{part}_conv1d.weight", (n, 1, net.taps), (n, net.taps)) for part, n in cut.items())
        for cut in (thirds, sizes)
    )
    taps = (net.channels, net.taps)
    otherwise = TensorSource("", (), taps, parts=published)
    sources[f"{ours}conv.weight"] = TensorSource("", (), taps, parts=again, otherwise=otherwise)
    return sources


OLMO_FAMILIES = (
    FamilyDescription(
        "Olmo2ForCausalLM",
        DEFAULTS | {"rms_norm_eps": 1e-5},
        NEUTRAL,
        olmo_settings,
        sources=post_norm_sources,
    ),
    FamilyDescription(
        "Olmo3ForCausalLM",
        DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
        NEUTRAL,
        olmo3_settings,
        olmo3_windows,
        sources=post_norm_sources,
    ),
    FamilyDescription(
        "Exaone4ForCausalLM",
        DEFAULTS
        | {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        NEUTRAL,
        exaone_settings,
        exaone_windows,
        sources=post_norm_sources,
    ),
    FamilyDescription(
        "OlmoHybridForCausalLM",
        DEFAULTS
        | {
            "max_position_embeddings": 65536,
            "layer_types": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        NEUTRAL,
        hybrid_settings,
        sources=hybrid_sources,
    ),
)
