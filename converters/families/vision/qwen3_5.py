"""Qwen3.5 and its model with experts: decoders of gated delta nets with M-RoPE over a part of each head, and Qwen3-VL's vision
tower without taps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.families.decoders.qwen_next import QWEN_3_5, QWEN_3_5_MOE
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import mrope
from edgeq.converters.families.vision.qwen3_vl import TOWER, qwen3_vl_tower
from edgeq.converters.families.vision.qwen_vl import RENAMED
from edgeq.errors import FormatError
from edgeq.network.rope import Rope

SECTIONS = [11, 11, 10]
"""Pairs of time, height and width where a configuration does not say."""


def seeing_rope(values: Values) -> Rope:
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where] or {}
    if not isinstance(settings, dict):
        raise FormatError(f"{where} is {settings!r:.80}; expected an object")
    return mrope({**values, where: {"mrope_section": SECTIONS, **settings}}, interleaved=True, partial=True)


def tower_settings(values: Values) -> dict[str, Any]:
    return qwen3_vl_tower({**values, "deepstack_visual_indexes": []})


def seeing(text: FamilyDescription, architecture: str) -> FamilyDescription:
    """The same decoder beside a tower."""
    tower = replace(
        TOWER,
        architecture=f"the vision tower of {architecture}",
        neutral={**TOWER.neutral, "deepstack_visual_indexes": (None, [])},
        settings=tower_settings,
    )
    return replace(
        text,
        architecture=architecture,
        defaults={**text.defaults, "image_token_id": 248056},
        settings=lambda values: text.settings(values) | {"rope": seeing_rope(values)},
        tower=tower,
        renamed=RENAMED,
    )


QWEN_3_5_VL_FAMILIES = (
    seeing(QWEN_3_5, "Qwen3_5ForConditionalGeneration"),
    seeing(QWEN_3_5_MOE, "Qwen3_5MoeForConditionalGeneration"),
)
