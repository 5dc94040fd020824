"""LFM2-VL (Liquid AI 2025): an LFM2 decoder, SigLIP 2's NaFlex tower (Tschannen et al. 2025, arXiv 2502.14786), whose pictures
keep their proportion, and a projector of two layers over 2 x 2 patches, perhaps after a LayerNorm with an eps of its own.

Pixels of a patch come row by row with their colours side by side: columns of its matrix are put in the order of the others'.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.lfm import LFM2
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.rearranged import flag
from edgeq.converters.families.vision.llava import BIASES, EMBEDDINGS, RENAMED, SIGLIP, siglip_tower, stack_sources
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import MAX_VISION_SIZES, VisionConfig
from edgeq.network.picture_texts import PictureTexts

ARCHITECTURE = "Lfm2VlForConditionalGeneration"
TEXTS = PictureTexts(
    begin="<|image_start|>", tile="<|img_row_{row}_col_{column}|>", whole="<|img_thumbnail|>", end="<|image_end|>"
)
PROJECT_EPS = 1e-5
"""Epsilon of the LayerNorm before the projector: no key says it."""
LAST = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
"""All layers of SigLIP 2, after which its own norm comes."""
OUTSIDE = {"image_token_id": 396, "projector_hidden_act": "gelu", "projector_hidden_size": 2560, "projector_bias": True}
OUTSIDE |= {"projector_use_layernorm": True, "downsample_factor": 2}


def lfm2_vl_tower(values: Values) -> dict[str, Any]:
    patches, merge, inner = values["num_patches"], values["downsample_factor"], values["projector_hidden_size"]
    if type(patches) is not int or not 1 <= patches <= 1 << 20 or math.isqrt(patches) ** 2 != patches:
        raise FormatError(f"vision_config: num_patches is {str(patches)[:80]}; expected a square of at most {1 << 20}")
    for key, value, most in (
        ("downsample_factor", merge, MAX_VISION_SIZES["merge"]),
        ("projector_hidden_size", inner, MAX_VISION_SIZES["project_size"]),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise FormatError(f"{key} is {str(value)[:80]}; expected an integer from 1 to {most}")
    return siglip_tower({**values, **LAST, "image_size": values["patch_size"]}) | {
        "merge": merge,
        "position_rows": patches,
        "interpolated": True,
        "antialiased": True,
        "project_norm": "patch",
        "project_eps": PROJECT_EPS if flag(values, "projector_use_layernorm") else 0.0,
        "project_size": inner,
        "texts": TEXTS,
    }


def tower_sources(config: VisionConfig, biases: tuple[str, ...]) -> dict[str, TensorSource]:
    hidden, joined, inner, side = config.hidden_size, config.joined_size, config.project_size, config.patch_size
    matrix = hidden, config.patch_width
    order = np.arange(config.patch_width).reshape(side, side, config.CHANNELS).transpose(2, 0, 1).reshape(-1).tolist()
    sources = stack_sources(config)
    sources["vision.patch.weight"] = TensorSource(f"{EMBEDDINGS}patch_embedding.weight", matrix, matrix, within=order)
    norms = {"vision.norm": ("vision_tower.post_layernorm", hidden)}
    if config.project_eps:
        norms["vision.joined_norm"] = ("multi_modal_projector.layer_norm", joined)
    for kind in ("weight", "bias"):
        for ours, (theirs, size) in norms.items():
            sources[f"{ours}.{kind}"] = TensorSource(f"{theirs}.{kind}", (size,), (size,))
        for end, shape in (("0", (inner, joined)), ("1", (config.out_hidden_size, inner))):
            if kind == "weight" or f"project.{end}" in biases:
                sizes: tuple[int, ...] = shape if kind == "weight" else shape[:1]
                name = f"multi_modal_projector.linear_{int(end) + 1}.{kind}"
                sources[f"vision.project.{end}.{kind}"] = TensorSource(name, sizes, sizes)
    return sources


def variant(hf: Values) -> FamilyDescription:
    """Whether the projector has biases; another decoder or tower is refused by name."""
    for key, wanted in (("text_config", "lfm2"), ("vision_config", "siglip2_vision_model")):
        found = hf.get(key)
        if not isinstance(found, dict):
            raise FormatError(f"{key} is {str(found)[:80]}; expected an object")
        if (kind := found.get("model_type", wanted)) != wanted:
            raise UnsupportedError(f"{key}: model_type {str(kind)[:80]!r} is not supported; supported: {wanted}")
    return _family(flag({**OUTSIDE, **hf}, "projector_bias"))


def _family(biased: bool) -> FamilyDescription:
    biases = ("patch", *(part for part in BIASES if biased or not part.startswith("project")))
    defaults = {key: value for key, value in SIGLIP.defaults.items() if key != "image_size"}
    tower = replace(
        SIGLIP,
        architecture=f"the vision tower of {ARCHITECTURE}",
        defaults=defaults | {"num_patches": 256},
        settings=lfm2_vl_tower,
        biases=biases,
        sources=lambda config: tower_sources(config, biases),
        outside={"out_hidden_size": "hidden_size"}
        | {key: key for key in OUTSIDE if key not in ("image_token_id", "projector_bias")},
        unused=lambda config, tensor: tensor.startswith("vision_tower.head."),
    )
    return replace(
        LFM2,
        architecture=ARCHITECTURE,
        defaults={**LFM2.defaults, **OUTSIDE, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32},
        neutral={**LFM2.neutral, "vision_feature_layer": (None, -1), "use_image_special_tokens": (None, True)},
        tower=tower,
        renamed=RENAMED,
        variants=variant,
    )


LFM2_VL = _family(biased=True)
