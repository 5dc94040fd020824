"""Idefics3 (Laurençon et al. 2024, arXiv 2408.12637) and SmolVLM (Marafioti et al. 2025, arXiv 2504.05299): a decoder of the
Llama line, SigLIP's tower with the norm after its layers, and a projector of one layer.  Pictures are cut into tiles.

A tile is as large as the table of positions, so that a patch has that of its row and column.  transformers finds them by shares
of the side in float32, which comes to the same for the sides that models have (of 14 to 32 patches not for 19, 25, 29 and 31,
where it depends on the processor).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import LLAMA_FAMILIES
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.vision.llava import BIASES, SIGLIP, TEXT, siglip_tower, stack_sources
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.network.picture_texts import PictureTexts
from edgeq.pictures.frames import patch_places
from edgeq.pictures.tower_projector import NO_ACTIVATION

RENAMED = {
    "model.text_model.": "model.",
    "model.vision_model.": "vision_tower.",
    "model.connector.": "connector.",
}
AROUND = "<fake_token_around_image>"
TEXTS = PictureTexts(
    tile=f"{AROUND}<row_{{row}}_col_{{column}}>",
    row="\n",
    whole=f"\n{AROUND}<global-img>",
    alone=f"{AROUND}<global-img>",
    end=AROUND,
)


LAST = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": NO_ACTIVATION}
"""All layers of SigLIP, after which a projector of one layer comes."""


def idefics3_tower(values: Values) -> dict[str, Any]:
    found = siglip_tower({**values, **LAST})
    merge, side = values["scale_factor"], values["image_size"] // values["patch_size"]
    if type(merge) is not int or not 1 <= merge <= side:
        raise FormatError(f"scale_factor is {str(merge)[:80]}; expected an integer from 1 to {side}")
    if side % merge:
        raise UnsupportedError(f"scale_factor {merge} does not divide a side of {side} patches")
    return found | {"merge": merge, "project_norm": "patch", "project_size": 0, "texts": TEXTS}


def joined_sources(config: VisionConfig) -> dict[str, TensorSource]:
    """What comes before the projector, of SigLIP with the norm after its layers: patches that are joined follow one another."""
    hidden, sources = config.hidden_size, stack_sources(config)
    side = math.isqrt(config.position_rows)
    row, column = patch_places((1, side, side), config.merge)
    order = (row * side + column).tolist()
    sources["vision.positions.weight"] = replace(sources["vision.positions.weight"], order=order)
    for kind in ("weight", "bias"):
        sources[f"vision.norm.{kind}"] = TensorSource(f"vision_tower.post_layernorm.{kind}", (hidden,), (hidden,))
    return sources


def tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    matrix = config.out_hidden_size, config.joined_size
    source = TensorSource("connector.modality_projection.proj.weight", matrix, matrix)
    return joined_sources(config) | {"vision.project.1.weight": source}


TOWER = replace(
    SIGLIP,
    architecture="the vision tower of Idefics3ForConditionalGeneration and SmolVLMForConditionalGeneration",
    defaults={**SIGLIP.defaults, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32, "intermediate_size": 3072},
    settings=idefics3_tower,
    biases=tuple(part for part in ("patch", *BIASES) if not part.startswith("project")),
    sources=tower_sources,
    outside={"out_hidden_size": "hidden_size", "scale_factor": "scale_factor"},
    unused=lambda config, tensor: False,
)


def variant(hf: Values, architecture: str) -> FamilyDescription:
    """Around which decoder."""
    found = hf.get("text_config")
    if not isinstance(found, dict):
        raise FormatError(f"text_config is {str(found)[:80]}; expected an object")
    kind = found.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in TEXT:
        raise UnsupportedError(f"text_config: model_type {str(kind)[:80]!r} is not supported; supported: {', '.join(TEXT)}")
    return _family(architecture, kind)


def _family(architecture: str, text: str) -> FamilyDescription:
    decoder_architecture, sizes = TEXT[text]
    decoder = next(each for each in LLAMA_FAMILIES if each.architecture == decoder_architecture)
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, **sizes}
    return replace(
        decoder,
        architecture=architecture,
        defaults={**decoder.defaults, **sizes, "image_token_id": 128257, "scale_factor": 2},
        derived=(*decoder.derived, ".position_ids"),
        tower=TOWER,
        renamed=RENAMED,
        variants=lambda hf: variant(hf, architecture),
    )


IDEFICS_FAMILIES = tuple(_family(f"{name}ForConditionalGeneration", "llama") for name in ("Idefics3", "SmolVLM"))
