"""Qwen2-VL (Wang et al. 2024, arXiv 2409.12191): a Qwen2 decoder with M-RoPE, and a vision tower."""

from __future__ import annotations

from typing import Any

from edgeq.config import VisionConfig
from edgeq.converters.checkpoint import TensorSource
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.llama import DEFAULTS, NEUTRAL, QKV, QWEN_WINDOW, head_settings
from edgeq.converters.families.positions import mrope, qwen_windows
from edgeq.errors import FormatError, UnsupportedError
from edgeq.rope import Rope

RENAMED = {"model.language_model.": "model.", "model.visual.": "visual."}
# Module of a layer (torch_decoder.py) -> its module in `visual.blocks`; q, k and v lie one below the other in `attn.qkv`.
BLOCK = {
    "input_layernorm": "norm1",
    "self_attn.o_proj": "attn.proj",
    "post_attention_layernorm": "norm2",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
SMALLEST, LARGEST = 1, 1 << 20


def qwen2_vl_settings(values: Values) -> dict[str, Any]:
    return head_settings(values) | {"rope": mrope(values)}


def qwen2_vl_tower(values: Values) -> dict[str, Any]:
    keys = ("depth", "embed_dim", "num_heads", "mlp_ratio", "patch_size", "temporal_patch_size", "spatial_merge_size")
    for key in (*keys, "hidden_size"):
        if type(values[key]) is not int or not SMALLEST <= values[key] <= LARGEST:
            raise FormatError(f"vision_config: {key} is {values[key]!r}; expected an integer from {SMALLEST} to {LARGEST}")
    hidden, heads, merge = values["embed_dim"], values["num_heads"], values["spatial_merge_size"]
    if hidden % (4 * heads):
        raise FormatError(f"vision_config: embed_dim {hidden} is not a multiple of 4 times num_heads {heads}")
    if values["spatial_patch_size"] not in (None, values["patch_size"]):
        raise UnsupportedError("vision_config: spatial_patch_size differs from patch_size; supported: the same")
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden * values["mlp_ratio"],
        "num_hidden_layers": values["depth"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-6,
        "rope": Rope(_theta(values), "axial", sections=(hidden // heads // 4,) * 2),
        "hidden_act": values["hidden_act"],
        "gated_mlp": False,
        "layer_norm": True,
        "patch_size": values["patch_size"],
        "temporal_patch_size": values["temporal_patch_size"],
        "merge": merge,
        "project_norm": "patch",
        "project_size": hidden * merge**2,
        "project_act": "gelu",
        "out_hidden_size": values["hidden_size"],
    }


def _theta(values: Values) -> Any:
    """The base of the rotation: a constant, which transformers 5 writes down."""
    settings = values["rope_parameters"] or {}
    if not isinstance(settings, dict) or settings.get("rope_type", "axial") != "axial":
        raise UnsupportedError(f"vision_config: rope_parameters is {str(settings)[:80]}; supported: rope_type axial")
    return settings.get("rope_theta", 10000.0)


def qwen2_vl_tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    hidden, inner, joined = config.hidden_size, config.intermediate_size, config.joined_size
    side, frames = config.patch_size, config.temporal_patch_size
    sizes: dict[str, tuple[int, ...]] = {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    pixels = (hidden, config.CHANNELS, frames, side, side)
    sources = {"vision.patch.weight": TensorSource("visual.patch_embed.proj.weight", pixels, (hidden, config.patch_width))}
    ends: dict[str, tuple[str, tuple[int, ...]]] = {
        "norm": ("ln_q", (hidden, hidden)),
        "project.0": ("mlp.0", (config.project_size, joined)),
        "project.1": ("mlp.2", (config.out_hidden_size, config.project_size)),
    }
    for kind in ("weight", "bias"):
        for ours, (theirs, shape) in ends.items():
            shape = shape if kind == "weight" and ours != "norm" else shape[:1]
            sources[f"vision.{ours}.{kind}"] = TensorSource(f"visual.merger.{theirs}.{kind}", shape, shape)
        for layer in range(config.num_hidden_layers):
            block, p = f"visual.blocks.{layer}.", f"vision.layers.{layer}."
            for module, theirs in BLOCK.items():
                shape = sizes.get(module, (hidden, hidden))
                shape = shape[:1] if kind == "bias" or module.endswith("norm") else shape
                sources[f"{p}{module}.{kind}"] = TensorSource(f"{block}{theirs}.{kind}", shape, shape)
            width = () if kind == "bias" else (hidden,)
            for index, part in enumerate(QKV):
                source = TensorSource(f"{block}attn.qkv.{kind}", (3 * hidden, *width), (hidden, *width), index * hidden)
                sources[f"{p}self_attn.{part}_proj.{kind}"] = source
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
    sources=qwen2_vl_tower_sources,
)
QWEN_VL_FAMILIES = (
    FamilyDescription(
        "Qwen2VLForConditionalGeneration",
        DEFAULTS
        | {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "image_token_id": 151655,
        }
        | QWEN_WINDOW
        | {"max_window_layers": 80},
        NEUTRAL,
        qwen2_vl_settings,
        qwen_windows,
        biases=QKV,
        derived=(".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq"),
        tower=QWEN2_VL_TOWER,
        renamed=RENAMED,
    ),
)
