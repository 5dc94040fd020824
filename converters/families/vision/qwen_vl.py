"""Qwen2-VL (Wang et al. 2024, arXiv 2409.12191) and Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923): a Qwen2 decoder with
M-RoPE, and a vision tower."""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, QKV, QWEN_WINDOW, head_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import mrope, qwen_windows
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.network.rope import Rope
from edgeq.network.stack import MAX_SIZES

RENAMED = {"model.language_model.": "model.", "model.visual.": "visual."}
# Module of a layer (torch_decoder.py) -> its module in `visual.blocks`; q, k and v lie one below the other in `attn.qkv`,
# in GGUF files also apart.
BLOCK = {
    "input_layernorm": "norm1",
    "self_attn.o_proj": "attn.proj",
    "post_attention_layernorm": "norm2",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
GATED_BLOCK = {
    "input_layernorm": "norm1",
    "self_attn.o_proj": "attn.proj",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
MIN_SIZE, MAX_SIZE = 1, 1 << 20


def qwen2_vl_settings(values: Values) -> dict[str, Any]:
    return head_settings(values) | {"rope": mrope(values)}


def qwen2_vl_tower(values: Values) -> dict[str, Any]:
    keys = ("depth", "embed_dim", "num_heads", "mlp_ratio", "patch_size", "temporal_patch_size", "spatial_merge_size")
    check_sizes(values, (*keys, "hidden_size"))
    return common_tower(values, values["embed_dim"], values["hidden_size"]) | {
        "intermediate_size": values["embed_dim"] * values["mlp_ratio"],
        "gated_mlp": False,
        "layer_norm": True,
    }


def qwen2_5_vl_tower(values: Values) -> dict[str, Any]:
    keys = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size", "spatial_merge_size")
    check_sizes(values, (*keys, "out_hidden_size", "window_size"))
    full, depth = values["fullatt_block_indexes"], values["depth"]
    if not isinstance(full, list) or any(type(i) is not int or not 0 <= i < depth for i in full):
        raise FormatError(f"vision_config: fullatt_block_indexes is {str(full)[:80]}; expected numbers from 0 to {depth - 1}")
    whole = frozenset(full)
    window = values["window_size"] // values["spatial_merge_size"] // values["patch_size"]
    if not window:
        raise FormatError(f"vision_config: window_size is {values['window_size']}; expected that of a merged patch at least")
    return common_tower(values, values["hidden_size"], values["out_hidden_size"]) | {
        "intermediate_size": values["intermediate_size"],
        "gated_mlp": True,
        "window_size": window,
        "window_layers": tuple(i for i in range(min(depth, MAX_SIZES["num_hidden_layers"])) if i not in whole),
    }


def check_sizes(values: Values, keys: tuple[str, ...]) -> None:
    for key in keys:
        if type(values[key]) is not int or not MIN_SIZE <= values[key] <= MAX_SIZE:
            raise FormatError(f"vision_config: {key} is {values[key]!r}; expected an integer from {MIN_SIZE} to {MAX_SIZE}")


def common_tower(values: Values, hidden: int, features: int) -> dict[str, Any]:
    """What all towers of the line have."""
    heads, merge = values["num_heads"], values["spatial_merge_size"]
    if hidden % (4 * heads):
        raise FormatError(f"vision_config: {hidden} channels are not a multiple of 4 times num_heads {heads}")
    if values["spatial_patch_size"] not in (None, values["patch_size"]):
        raise UnsupportedError("vision_config: spatial_patch_size differs from patch_size; supported: the same")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": values["depth"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-6,
        "rope": Rope(_theta(values), "axial", sections=(hidden // heads // 4,) * 2),
        "hidden_act": values["hidden_act"],
        "patch_size": values["patch_size"],
        "temporal_patch_size": values["temporal_patch_size"],
        "merge": merge,
        "project_norm": "patch",
        "project_size": hidden * merge**2,
        "project_act": "gelu",
        "out_hidden_size": features,
    }


def _theta(values: Values) -> Any:
    """The base of the rotation: a constant, which transformers 5 writes down."""
    settings = values["rope_parameters"] or {}
    if not isinstance(settings, dict) or settings.get("rope_type", "axial") != "axial":
        raise UnsupportedError(f"vision_config: rope_parameters is {str(settings)[:80]}; supported: rope_type axial")
    return settings.get("rope_theta", 10000.0)


def tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    hidden, inner, joined = config.hidden_size, config.intermediate_size, config.joined_size
    side, frames = config.patch_size, config.temporal_patch_size
    sizes: dict[str, tuple[int, ...]] = {"mlp.down_proj": (hidden, inner)}
    sizes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
    pixels = (hidden, config.CHANNELS, frames, side, side)
    sources = {"vision.patch.weight": TensorSource("visual.patch_embed.proj.weight", pixels, (hidden, config.patch_width))}
    ends: dict[str, tuple[str, tuple[int, ...]]] = {
        "norm": ("ln_q", (hidden, hidden)),
        "project.0": ("mlp.0", (config.project_size, joined)),
        "project.1": ("mlp.2", (config.out_hidden_size, config.project_size)),
    }
    for kind in ("weight", "bias"):
        for ours, (theirs, shape) in ends.items():
            if kind == "bias" and ours == "norm" and not config.layer_norm:
                continue
            shape = shape if kind == "weight" and ours != "norm" else shape[:1]
            sources[f"vision.{ours}.{kind}"] = TensorSource(f"visual.merger.{theirs}.{kind}", shape, shape)
        for layer in range(config.num_hidden_layers):
            block, p = f"visual.blocks.{layer}.", f"vision.layers.{layer}."
            for module, theirs in (GATED_BLOCK if config.gated else BLOCK).items():
                if kind == "bias" and module.endswith("norm") and not config.layer_norm:
                    continue
                shape = sizes.get(module, (hidden, hidden))
                shape = shape[:1] if kind == "bias" or module.endswith("norm") else shape
                sources[f"{p}{module}.{kind}"] = TensorSource(f"{block}{theirs}.{kind}", shape, shape)
            width = () if kind == "bias" else (hidden,)
            for index, part in enumerate(QKV):
                whole, shape = (3 * hidden, *width), (hidden, *width)
                source = TensorSource(f"{block}attn.qkv.{kind}", whole, shape, index * hidden)
                apart = TensorSource(f"{block}attn.{part}.{kind}", shape, shape, otherwise=source)
                sources[f"{p}self_attn.{part}_proj.{kind}"] = apart
    return sources


QWEN2_VL_TOWER = FamilyDescription(
    "the vision tower of Qwen2VLForConditionalGeneration",
    {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_patch_size": None,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "rope_parameters": None,
    },
    {"in_channels": (None, 3), "in_chans": (None, 3)},
    qwen2_vl_tower,
    biases=("q", "k", "v", "o", "up", "down", "project.0", "project.1"),
    sources=tower_sources,
)
QWEN2_5_VL_TOWER = FamilyDescription(
    "the vision tower of Qwen2_5_VLForConditionalGeneration",
    {
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_patch_size": None,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "rope_parameters": None,
    },
    {"in_channels": (None, 3), "in_chans": (None, 3)},
    qwen2_5_vl_tower,
    biases=("q", "k", "v", "o", "gate", "up", "down", "project.0", "project.1"),
    sources=tower_sources,
)


def _family(architecture: str, tower: FamilyDescription) -> FamilyDescription:
    return FamilyDescription(
        architecture,
        DEFAULTS
        | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"image_token_id": 151655, **QWEN_WINDOW, "max_window_layers": 80},
        NEUTRAL,
        qwen2_vl_settings,
        qwen_windows,
        biases=QKV,
        derived=(".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq"),
        tower=tower,
        renamed=RENAMED,
    )


QWEN_VL_FAMILIES = (
    _family("Qwen2VLForConditionalGeneration", QWEN2_VL_TOWER),
    _family("Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL_TOWER),
)
