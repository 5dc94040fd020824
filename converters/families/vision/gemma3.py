"""Gemma 3 with pictures (Gemma Team 2025, arXiv 2503.19786): its text model, SigLIP's tower with the norm after its layers, and
a projector that takes the mean of neighbouring patches, norms it and has one layer.

Tokens of a picture see all of it.  Pictures are not cut ("pan and scan"), as the processor does by default.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.gemma import GEMMA_3, gemma_settings
from edgeq.converters.families.family import Values
from edgeq.converters.families.vision.idefics3 import LAST, joined_sources
from edgeq.converters.families.vision.llava import BIASES, RENAMED, SIGLIP, siglip_tower
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.network.picture_texts import PictureTexts

ARCHITECTURE = "Gemma3ForConditionalGeneration"
BEGIN = "<start_of_image>"
TEXTS = PictureTexts(place=BEGIN, shown=f"\n\n{BEGIN}<image_soft_token><end_of_image>\n\n")


def gemma3_tower(values: Values) -> dict[str, Any]:
    found, tokens = siglip_tower({**values, **LAST}), values["mm_tokens_per_image"]
    side = values["image_size"] // values["patch_size"]
    if type(tokens) is not int or not 1 <= tokens <= side**2:
        raise FormatError(f"mm_tokens_per_image is {str(tokens)[:80]}; expected an integer from 1 to {side**2}")
    tokens_a_side = math.isqrt(tokens)
    if tokens_a_side**2 != tokens or side % tokens_a_side:
        raise UnsupportedError(
            f"mm_tokens_per_image {tokens} is not supported with {side} x {side} patches; expected the square of a number that "
            f"divides {side}"
        )
    averaged = {"merge": side // tokens_a_side, "averaged": True, "project_norm": "patch", "project_size": 0, "texts": TEXTS}
    return found | averaged


def tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    hidden, features = config.hidden_size, config.out_hidden_size
    gain, matrix = "multi_modal_projector.mm_soft_emb_norm.weight", "multi_modal_projector.mm_input_projection_weight"
    return joined_sources(config) | {
        "vision.mean_norm.weight": TensorSource(gain, (hidden,), (hidden,), added=1.0),
        "vision.project.1.weight": TensorSource(matrix, (hidden, features), (features, hidden), transposed=True),
    }


TOWER = replace(
    SIGLIP,
    architecture=f"the vision tower of {ARCHITECTURE}",
    settings=gemma3_tower,
    biases=tuple(part for part in ("patch", *BIASES) if not part.startswith("project")),
    sources=tower_sources,
    outside={"out_hidden_size": "hidden_size", "mm_tokens_per_image": "mm_tokens_per_image"},
    unused=lambda config, tensor: tensor.startswith("vision_tower.head."),
)
# What a text_config leaves out is as in the decoder's configuration class.
SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
GEMMA_3_VL = replace(
    GEMMA_3,
    architecture=ARCHITECTURE,
    defaults={**GEMMA_3.defaults, **SIZES, "image_token_index": 262144, "mm_tokens_per_image": 256},
    settings=lambda values: gemma_settings(values) | {"whole_pictures": True},
    derived=(*GEMMA_3.derived, ".position_ids"),
    tower=TOWER,
    renamed=RENAMED,
)
