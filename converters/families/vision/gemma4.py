"""Gemma 4 with pictures (Gemma Team 2026): its text model, and a tower of its own whose layers are like those of the decoder.

Pictures keep their proportion.  A patch knows its column and its row by a table of each, which are added to it, and by a
rotation of halves of every head.  A token is the mean of neighbouring patches, scaled and shifted where the tower was trained
so ("standardize"), and normed before the one layer of the projector.  Linear layers of the tower may limit what they read and
what they give, each to bounds of its own ("use_clipped_linears").  Audio and videos are left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.gemma import GAINS
from edgeq.converters.families.decoders.gemma4 import AUDIO, GEMMA_4, gemma4_settings, gemma4_sources, unread_keys
from edgeq.converters.families.family import LAYER_ROWS, LINEARS, FamilyDescription, Values, nothing_unused
from edgeq.converters.families.rearranged import flag
from edgeq.converters.families.vision.clips import is_bound
from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.manifest import table_shapes
from edgeq.network.config import MAX_VISION_SIZES, ModelConfig, VisionConfig
from edgeq.network.picture_texts import PictureTexts
from edgeq.network.rope import Rope
from edgeq.network.stack import MAX_SIZES
from edgeq.pictures.tower_clips import BOUNDED
from edgeq.pictures.tower_positions import MAX_POSITIONS
from edgeq.pictures.tower_projector import NO_ACTIVATION

ARCHITECTURE = "Gemma4ForConditionalGeneration"
TEXTS = PictureTexts(begin="<|image>", end="<image|>")
RENAMED = {"model.language_model.": "model."}
TENSORS = "model.vision_tower."
ROPES = ("axial", "default")
"""Types under which transformers rotates halves of heads by columns and rows."""
MODULES = tuple(LINEARS[part] for part in BOUNDED)
MAX_SETTINGS = {
    **{key: MAX_SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{key: MAX_SIZES[key] for key in ("num_key_value_heads", "head_dim")},
    "patch_size": MAX_VISION_SIZES["patch_size"],
    "pooling_kernel_size": MAX_VISION_SIZES["merge"],
    "position_embedding_size": MAX_POSITIONS // 2,
}
"""Sizes of a vision_config, and the most of each."""


def gemma4_tower(values: Values) -> dict[str, Any]:
    for key, most in MAX_SETTINGS.items():
        if type(values[key]) is not int or not 1 <= values[key] <= most:
            raise FormatError(f"vision_config: {key} is {str(values[key])[:80]}; expected an integer from 1 to {most}")
    head_dim = values["head_dim"]
    if head_dim % 4:
        raise FormatError(f"vision_config: head_dim is {head_dim}; expected a multiple of 4: halves of it are rotated")
    return {
        **{key: values[key] for key in MAX_SETTINGS if key not in ("pooling_kernel_size", "position_embedding_size")},
        "rms_norm_eps": values["rms_norm_eps"],
        "rope": Rope(_theta(values), "axial", sections=(head_dim // 4,) * 2),
        "hidden_act": values["hidden_activation"],
        "gated_mlp": True,
        "qk_norm": True,
        "value_norm": True,
        "post_norms": True,
        # Scores are not divided: queries and keys are normed.
        "query_pre_attn_scalar": 1,
        "temporal_patch_size": 1,
        "merge": values["pooling_kernel_size"],
        "position_rows": 2 * values["position_embedding_size"],
        "positions_by_axis": True,
        "averaged": True,
        "mean_scaled": True,
        "project_norm": "none",
        "project_size": 0,
        "project_act": NO_ACTIVATION,
        "out_hidden_size": values["out_hidden_size"],
        "texts": TEXTS,
    }


def _theta(values: Values) -> Any:
    settings = values["rope_parameters"] or {}
    if not isinstance(settings, dict) or settings.get("rope_type", "axial") not in ROPES:
        raise UnsupportedError(f"vision_config: rope_parameters is {str(settings)[:80]}; supported: rope_type axial")
    return settings.get("rope_theta", 100.0)


def halves_apart(heads: int, head_dim: int) -> tuple[int, ...]:
    """The order of the rows of heads in which channels i and head_dim / 2 + i are turned against each other, the first pairs by
    rows of patches, of those whose first half is turned by columns, i against head_dim / 4 + i, and whose second half by rows.
    """
    quarter = head_dim // 4
    of_head = [part * quarter + i for part in (2, 0, 3, 1) for i in range(quarter)]
    return tuple(head * head_dim + i for head in range(heads) for i in of_head)


def tower_sources(config: VisionConfig, standardized: bool) -> dict[str, TensorSource]:
    hidden, inner, side, size = config.hidden_size, config.intermediate_size, config.patch_size, config.head_dim
    table, width = (config.position_rows, hidden), config.patch_width
    # Pixels of a patch come row by row, with their colours side by side.
    order = tuple(
        (y * side + x) * config.CHANNELS + c for c in range(config.CHANNELS) for y in range(side) for x in range(side)
    )
    features, root = (config.out_hidden_size, hidden), hidden**0.5
    embedder = f"{TENSORS}patch_embedder."
    sources = {
        "vision.patch.weight": TensorSource(f"{embedder}input_proj.weight", (hidden, width), (hidden, width), within=order),
        "vision.positions.weight": TensorSource(
            f"{embedder}position_embedding_table", (2, config.position_rows // 2, hidden), table
        ),
        "vision.mean_norm.weight": TensorSource("", (), (hidden,), added=1.0),
        "vision.project.1.weight": TensorSource("model.embed_vision.embedding_projection.weight", features, features),
    }
    # Means times the root of the channels, then less a bias, times a scale, where the tower has these.
    scale, bias = f"{TENSORS}std_scale", f"{TENSORS}std_bias"
    if standardized:
        sources["vision.mean_scale.weight"] = TensorSource(scale, (hidden,), (hidden,), factor=root)
        sources["vision.mean_shift.weight"] = TensorSource(bias, (hidden,), (hidden,), factor=-1.0, rows=scale)
    else:
        sources["vision.mean_scale.weight"] = TensorSource("", (), (hidden,), added=root)
        sources["vision.mean_shift.weight"] = TensorSource("", (), (hidden,))
    queries, keys = (heads * size for heads in (config.num_attention_heads, config.num_key_value_heads))
    read = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    shapes = dict(zip(MODULES, (*read, (inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    turned = {"q": halves_apart(config.num_attention_heads, size), "k": halves_apart(config.num_key_value_heads, size)}
    for layer in range(config.num_hidden_layers):
        p, theirs = f"vision.layers.{layer}.", f"{TENSORS}encoder.layers.{layer}."
        for module, shape in shapes.items():
            part = module.removeprefix("self_attn.").removesuffix("_proj")
            name = f"{theirs}{module}.linear.weight"
            sources[f"{p}{module}.weight"] = TensorSource(name, shape, shape, order=turned.get(part, ()))
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            sources[f"{p}{name}"] = TensorSource(f"{theirs}{name}", (size,), (size,), order=halves_apart(1, size))
        for module, norm in GAINS.items():
            sources[f"{p}{module}.weight"] = TensorSource(f"{theirs}{norm}.weight", (hidden,), (hidden,))
    return sources


def bounded_modules(config: VisionConfig) -> tuple[tuple[str, ...], ...]:
    """The modules of linear layers, layer by layer."""
    layers = range(config.num_hidden_layers)
    return tuple(tuple(f"{TENSORS}encoder.layers.{layer}.{module}" for module in MODULES) for layer in layers)


def _tower(standardized: bool, clipped: bool) -> FamilyDescription:
    return FamilyDescription(
        f"the vision tower of {ARCHITECTURE}",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": None,
            "pooling_kernel_size": 3,
            "patch_size": 16,
            "position_embedding_size": 10240,
            "standardize": False,
        },
        {"attention_bias": (None, False)},
        gemma4_tower,
        sources=partial(tower_sources, standardized=standardized),
        outside={"out_hidden_size": "hidden_size"},
        clipped=bounded_modules if clipped else None,
        unused=is_bound if clipped else nothing_unused,
    )


def seeing_settings(values: Values) -> dict[str, Any]:
    if values["use_bidirectional_attention"] != "vision":
        return gemma4_settings(values)
    return gemma4_settings(values) | {"whole_pictures": True, "pictures_in_windows": True}


def seeing_sources(config: ModelConfig, pad: int) -> dict[str, TensorSource]:
    """Layers have for tokens of pictures the rows that they have for the token of pads."""
    sources = gemma4_sources(config)
    if LAYER_ROWS in sources and config.vision is not None:
        rows, width = table_shapes(config)["layer_rows"]
        name, image = sources[LAYER_ROWS].name, config.vision.image_token_id
        runs = ((0, image), (pad, 1), (image + 1, rows - image - 1))
        parts = tuple(TensorSource(name, (rows, width), (count, width), start) for start, count in runs if count)
        sources[LAYER_ROWS] = replace(sources[LAYER_ROWS], parts=parts)
    return sources


def variant(hf: Values) -> FamilyDescription:
    """With its tower, or the text model alone, as its configuration says, and with what is left out."""
    left_out = ["its audio tower"] if hf.get("audio_config") is not None else []
    found = hf.get("vision_config")
    tower = {"standardize": False, "use_clipped_linears": False} | (found if isinstance(found, dict) else {})
    if found is None:
        return replace(TEXT_ALONE, left_out=tuple(left_out))
    text = hf.get("text_config")
    sizes = {"pad_token_id": 0, **TEXT_SIZES} | (text if isinstance(text, dict) else {})
    pad, tokens = sizes["pad_token_id"], sizes["vocab_size"]
    if type(tokens) is int and (type(pad) is not int or not 0 <= pad < tokens):
        raise FormatError(f"text_config: pad_token_id is {str(pad)[:80]}; expected a token: pictures have its rows in layers")
    sources = partial(seeing_sources, pad=pad)
    seeing = _tower(flag(tower, "standardize"), flag(tower, "use_clipped_linears"))
    return replace(SEEING, tower=seeing, sources=sources, left_out=tuple(left_out))


def seeing_unused(config: ModelConfig, tensor: str) -> bool:
    return tensor.startswith(AUDIO) or unread_keys(config, tensor)


# What a text_config leaves out is as in the decoder's configuration class.
TEXT_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
TEXT_ALONE = replace(
    GEMMA_4,
    architecture=ARCHITECTURE,
    defaults={**GEMMA_4.defaults, **TEXT_SIZES},
    renamed=RENAMED,
    nested=True,
)
SEEING = replace(
    TEXT_ALONE,
    defaults={**TEXT_ALONE.defaults, "image_token_id": 258880, "use_bidirectional_attention": None},
    settings=seeing_settings,
    unused=seeing_unused,
    tower=_tower(standardized=False, clipped=False),
)
GEMMA_4_VL = replace(SEEING, variants=variant)
