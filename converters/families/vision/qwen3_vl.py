"""Qwen3-VL (Bai et al. 2025, arXiv 2511.21631): a Qwen3 decoder with M-RoPE whose axes alternate, and a vision tower with
interpolated positions whose layers are tapped for the first layers of the decoder."""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, QKV, head_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import mrope
from edgeq.converters.families.vision.qwen_vl import RENAMED, check_sizes, common_tower
from edgeq.errors import FormatError
from edgeq.format.manifest import projectors
from edgeq.network.config import VisionConfig

# Module of a layer (torch_decoder.py) -> its module in `visual.blocks`; q, k and v lie one below the other in `attn.qkv`,
# in GGUF files also apart.
BLOCK = {
    "input_layernorm": "norm1",
    "self_attn.o_proj": "attn.proj",
    "post_attention_layernorm": "norm2",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}


def qwen3_vl_settings(values: Values) -> dict[str, Any]:
    return head_settings(values) | {"rope": mrope(values, interleaved=True), "qk_norm": True}


def qwen3_vl_tower(values: Values) -> dict[str, Any]:
    keys = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size")
    check_sizes(values, (*keys, "spatial_merge_size", "out_hidden_size", "num_position_embeddings"))
    taps, depth = values["deepstack_visual_indexes"], values["depth"]
    numbers = isinstance(taps, list) and all(type(i) is int and 0 <= i < depth for i in taps)
    if not numbers or taps != sorted(set(taps)):
        raise FormatError(
            f"vision_config: deepstack_visual_indexes is {str(taps)[:80]}; expected ascending numbers from 0 to {depth - 1}"
        )
    return common_tower(values, values["hidden_size"], values["out_hidden_size"]) | {
        "intermediate_size": values["intermediate_size"],
        "gated_mlp": False,
        "layer_norm": True,
        "position_rows": values["num_position_embeddings"],
        "interpolated": True,
        "tap_layers": tuple(taps),
    }


def tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    hidden, inner, joined = config.hidden_size, config.intermediate_size, config.joined_size
    side, frames = config.patch_size, config.temporal_patch_size
    pixels, table = (hidden, config.CHANNELS, frames, side, side), (config.position_rows, hidden)
    sources = {
        "vision.patch.weight": TensorSource("visual.patch_embed.proj.weight", pixels, (hidden, config.patch_width)),
        "vision.patch.bias": TensorSource("visual.patch_embed.proj.bias", (hidden,), (hidden,)),
        "vision.positions.weight": TensorSource("visual.pos_embed.weight", table, table),
    }
    shapes = {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for kind in ("weight", "bias"):
        for index, (p, norm) in enumerate(projectors(config), -1):
            merger = "visual.merger" if index < 0 else f"visual.deepstack_merger_list.{index}"
            width = hidden if norm == "patch" else joined
            ends: dict[str, tuple[str, tuple[int, ...]]] = {
                "norm": ("norm", (width, width)),
                "project.0": ("linear_fc1", (config.project_size, joined)),
                "project.1": ("linear_fc2", (config.out_hidden_size, config.project_size)),
            }
            for ours, (theirs, shape) in ends.items():
                shape = shape if kind == "weight" and ours != "norm" else shape[:1]
                sources[f"{p}{ours}.{kind}"] = TensorSource(f"{merger}.{theirs}.{kind}", shape, shape)
        for layer in range(config.num_hidden_layers):
            block, p = f"visual.blocks.{layer}.", f"vision.layers.{layer}."
            for module, theirs in BLOCK.items():
                shape = shapes.get(module, (hidden, hidden))
                shape = shape[:1] if kind == "bias" or module.endswith("norm") else shape
                sources[f"{p}{module}.{kind}"] = TensorSource(f"{block}{theirs}.{kind}", shape, shape)
            columns = () if kind == "bias" else (hidden,)
            for index, part in enumerate(QKV):
                whole, shape = (3 * hidden, *columns), (hidden, *columns)
                source = TensorSource(f"{block}attn.qkv.{kind}", whole, shape, index * hidden)
                apart = TensorSource(f"{block}attn.{part}.{kind}", shape, shape, otherwise=source)
                sources[f"{p}self_attn.{part}_proj.{kind}"] = apart
    return sources


TOWER = FamilyDescription(
    "the vision tower of Qwen3VLForConditionalGeneration",
    {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_patch_size": None,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "rope_parameters": None,
    },
    {"in_channels": (None, 3)},
    qwen3_vl_tower,
    biases=("patch", "q", "k", "v", "o", "up", "down", "project.0", "project.1"),
    sources=tower_sources,
)
QWEN3_VL = FamilyDescription(
    "Qwen3VLForConditionalGeneration",
    DEFAULTS
    | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 5e5}
    | {"image_token_id": 151655},
    NEUTRAL | {"use_sliding_window": (None, False), "sliding_window": (None,), "layer_types": (None,)},
    qwen3_vl_settings,
    tower=TOWER,
    renamed=RENAMED,
)
