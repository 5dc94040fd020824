"""PaliGemma (Beyer et al. 2024, arXiv 2407.07726) and PaliGemma 2 (Steiner et al. 2024, arXiv 2412.03555): a decoder of Gemma,
SigLIP's tower with the norm after its layers, and a projector of one layer.  A prompt, pictures first, sees itself both ways.

transformers counts positions from 1.  Rotary positions count by their differences alone, so they are counted from 0 here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.gemma import GEMMA, GEMMA_2
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.vision.llava import BIASES, RENAMED, SIGLIP, VISION_SIZES, siglip_tower, stack_sources
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.pictures.tower_projector import NO_ACTIVATION

ARCHITECTURE = "PaliGemmaForConditionalGeneration"
GIVEN = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": NO_ACTIVATION}
"""What LLaVA's configurations say of a tower, and these do not."""
# What a text_config leaves out is as in transformers' configurations of the whole model, which holds Gemma's 2B.
TEXT: dict[str, tuple[FamilyDescription, dict[str, Any]]] = {
    "gemma": (
        GEMMA,
        {"hidden_size": 2048, "num_hidden_layers": 18, "intermediate_size": 16384, "num_attention_heads": 8}
        | {"num_key_value_heads": 1, "vocab_size": 257152},
    ),
    "gemma2": (
        GEMMA_2,
        {"hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216, "num_attention_heads": 8},
    ),
}
TEMPLATE = """\
{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}
{{ raise_exception('this model answers one question; begin with it alone, without a system prompt') }}
{%- endif -%}
{%- set content = messages[0]['content'] -%}
{%- if content is string -%}
{{ bos_token + content + '\\n' }}
{%- else -%}
{%- for part in content if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}
{{ bos_token }}
{%- for part in content if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{{ '\\n' }}
{%- endif -%}
"""
"""What transformers' processor makes of pictures and a text."""


def paligemma_tower(values: Values) -> dict[str, Any]:
    """UnsupportedError: features of another width than the decoder's."""
    wide, hidden = values["projection_dim"], values["out_hidden_size"]
    if wide != hidden:
        raise UnsupportedError(f"projection_dim is {wide!r:.80}; supported: that of the decoder's hidden_size, {hidden!r:.80}")
    return siglip_tower({**values, **GIVEN}) | {"project_norm": "patch", "project_size": 0}


def tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    hidden, features, sources = config.hidden_size, config.out_hidden_size, stack_sources(config)
    for kind, shape in (("weight", (features, hidden)), ("bias", (features,))):
        sources[f"vision.norm.{kind}"] = TensorSource(f"vision_tower.post_layernorm.{kind}", (hidden,), (hidden,))
        sources[f"vision.project.1.{kind}"] = TensorSource(f"multi_modal_projector.linear.{kind}", shape, shape)
    return sources


TOWER = replace(
    SIGLIP,
    architecture=f"the vision tower of {ARCHITECTURE}",
    defaults={**SIGLIP.defaults, **VISION_SIZES, "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27}
    | {"num_attention_heads": 16, "patch_size": 14},
    neutral={**SIGLIP.neutral, "vision_use_head": (None, False)},
    settings=paligemma_tower,
    biases=tuple(part for part in ("patch", *BIASES) if part != "project.0"),
    sources=tower_sources,
    outside={"out_hidden_size": "hidden_size", "projection_dim": "projection_dim"},
    unused=lambda config, tensor: False,
)


def variant(hf: Values) -> FamilyDescription:
    """Around which decoder."""
    found = hf.get("text_config")
    if not isinstance(found, dict):
        raise FormatError(f"text_config is {str(found)[:80]}; expected an object")
    kind = found.get("model_type", "gemma")
    if not isinstance(kind, str) or kind not in TEXT:
        raise UnsupportedError(f"text_config: model_type {str(kind)[:80]!r} is not supported; supported: {', '.join(TEXT)}")
    return _family(kind)


def _family(text: str) -> FamilyDescription:
    decoder, sizes = TEXT[text]
    defaults = {**decoder.defaults, **sizes, "image_token_index": 256000, "projection_dim": 2048}

    def settings(values: Values) -> dict[str, Any]:
        return decoder.settings(values) | {"bidirectional_prompt": True}

    return replace(
        decoder,
        architecture=ARCHITECTURE,
        defaults=defaults,
        neutral={**decoder.neutral, "use_bidirectional_attention": (None, True)},
        settings=settings,
        derived=(*decoder.derived, ".position_ids"),
        tower=TOWER,
        renamed=RENAMED,
        template=TEMPLATE,
    )


PALIGEMMA = replace(_family("gemma"), variants=variant)
