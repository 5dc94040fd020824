"""InternVL3 (Zhu et al. 2025, arXiv 2504.10479) and InternVL3.5 (Wang et al. 2025, arXiv 2508.18265) as transformers has
them: a decoder of the Qwen line, the tower InternViT, and a projector of two layers over 2 x 2 patches, after a LayerNorm with
an eps of its own.  Pictures are cut into tiles by the proportion of their edges.

What a layer of the tower adds to its stream it multiplies by a vector (lambda_1, lambda_2): here the rows of the linear layer
before that have it.  The bias of the patches is in the positions: the class row brings no pixels, and has none.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import LLAMA_FAMILIES
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.rearranged import flag
from edgeq.converters.families.vision.llava import BIASES, CLIP, RENAMED, SIZES, TEXT, clip_tower
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.network.picture_texts import PictureTexts
from edgeq.pictures.frames import patch_places

ARCHITECTURE = "InternVLForConditionalGeneration"
TEXTS = PictureTexts(begin="<img>", end="</img>")
DECODERS = {**TEXT, "qwen3": ("Qwen3ForCausalLM", {**TEXT["qwen2"][1], "head_dim": 128})}
HEAD_EPS, PROJECT_EPS = 1e-6, 1e-5
"""Epsilon of the norms of queries and keys, and of the LayerNorm before the projector: no key says it."""
NORMS = {"layer_norm": True, "rms_norm": False}
# Module of a layer (torch_decoder.py) -> its module in the tower, and the vector that its rows are multiplied by.
BLOCK = {
    "input_layernorm": ("layernorm_before", ""),
    **{f"self_attn.{part}_proj": (f"attention.{part}_proj", "") for part in ("q", "k", "v")},
    "self_attn.o_proj": ("attention.projection_layer", "lambda_1"),
    "post_attention_layernorm": ("layernorm_after", ""),
    "mlp.up_proj": ("mlp.fc1", ""),
    "mlp.down_proj": ("mlp.fc2", "lambda_2"),
}
EMBEDDINGS = "vision_tower.embeddings."
LAYER = re.compile(r"vision_tower\.encoder\.layer\.(\d{1,6})\.")


def internvl_tower(values: Values) -> dict[str, Any]:
    values = {**values, **{key: _edge(values, key) for key in ("image_size", "patch_size")}}
    norm = values["norm_type"]
    if not isinstance(norm, str) or norm not in NORMS:
        raise UnsupportedError(f"vision_config: norm_type is {norm!r:.80}; supported: {', '.join(NORMS)}")
    found, merge = clip_tower(values), _merge(values["downsample_ratio"])
    if found["class_feature"]:
        raise UnsupportedError("vision_feature_select_strategy 'full' joins the class row with patches; supported: 'default'")
    if flag(values, "use_qk_norm"):
        if values["layer_norm_eps"] != HEAD_EPS:
            raise UnsupportedError(
                f"vision_config: layer_norm_eps {values['layer_norm_eps']!r:.80} with use_qk_norm, whose norms have {HEAD_EPS},"
                " is not supported"
            )
        found |= {"qk_norm": True, "qk_norm_kind": "whole"}
    side = values["image_size"] // values["patch_size"]
    if side % merge:
        raise UnsupportedError(f"downsample_ratio 1 / {merge} does not divide a side of {side} patches")
    return found | {
        "layer_norm": NORMS[norm],
        "pre_norm": False,
        "merge": merge,
        "project_norm": "joined",
        "project_eps": PROJECT_EPS,
        "texts": TEXTS,
    }


def _edge(values: Values, key: str) -> Any:
    """An edge of a square, or both of them."""
    found = values[key]
    if isinstance(found, list) and len(found) == 2 and found[0] == found[1]:
        return found[0]
    if isinstance(found, list):
        raise UnsupportedError(f"vision_config: {key} is {str(found)[:80]}; supported: two equal numbers")
    return found


def _merge(ratio: object) -> int:
    """Patches of a side of a token."""
    for merge in (1, 2, 4):
        if type(ratio) in (int, float) and ratio == 1 / merge:
            return merge
    raise UnsupportedError(f"downsample_ratio is {str(ratio)[:80]}; supported: 1, 1 / 2 and 1 / 4")


def tower_sources(config: VisionConfig, biases: tuple[str, ...]) -> dict[str, TensorSource]:
    hidden, inner, side = config.hidden_size, config.intermediate_size, config.patch_size
    pixels, row = (hidden, config.CHANNELS, side, side), (1, hidden)
    patch = f"{EMBEDDINGS}patch_embeddings.projection."
    sources = {
        "vision.patch.weight": TensorSource(f"{patch}weight", pixels, (hidden, config.patch_width)),
        "vision.positions.weight": _positions(config, f"{patch}bias"),
    }
    shapes = {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"vision_tower.encoder.layer.{layer}.", f"vision.layers.{layer}."
        for module, (name, scale) in BLOCK.items():
            whole, rows = shapes.get(module, (hidden, hidden)), f"{theirs}{scale}" if scale else ""
            is_norm, part = module.endswith("norm"), module.rsplit(".")[-1].removesuffix("_proj")
            biased = config.layer_norm if is_norm else part in biases
            for kind in ("weight", "bias") if biased else ("weight",):
                shape = whole[:1] if is_norm or kind == "bias" else whole
                sources[f"{ours}{module}.{kind}"] = TensorSource(f"{theirs}{name}.{kind}", shape, shape, rows=rows)
        for part in ("q", "k") if config.qk_norm else ():
            name = f"{theirs}attention.{part}_norm.weight"
            sources[f"{ours}self_attn.{part}_norm.weight"] = TensorSource(name, row[1:], row[1:])
    joined, features = config.joined_size, config.out_hidden_size
    for kind in ("weight", "bias"):
        sources[f"vision.norm.{kind}"] = TensorSource(f"multi_modal_projector.layer_norm.{kind}", (joined,), (joined,))
        for end, columns in (("0", joined), ("1", features)):
            sizes = (features, columns) if kind == "weight" else (features,)
            name = f"multi_modal_projector.linear_{int(end) + 1}.{kind}"
            sources[f"vision.project.{end}.{kind}"] = TensorSource(name, sizes, sizes)
    return sources


def _positions(config: VisionConfig, bias: str) -> TensorSource:
    """The class row and its position, then those of patches, joined ones after one another, with the bias of the patches."""
    hidden, count = config.hidden_size, config.position_rows - 1
    name, stored = f"{EMBEDDINGS}position_embeddings", (1, count + 1, hidden)
    side = math.isqrt(count)
    row, column = patch_places((1, side, side), config.merge)
    first = TensorSource(f"{EMBEDDINGS}cls_token", (1, 1, hidden), (1, hidden))
    parts = (
        TensorSource(name, stored, (1, hidden), every=first),
        TensorSource(
            name, stored, (count, hidden), 1, order=(row * side + column).tolist(),
            every=TensorSource(bias, (hidden,), (1, hidden)),
        ),
    )  # fmt: skip
    return TensorSource("", (), (count + 1, hidden), parts=parts)


def unused(config: VisionConfig, tensor: str) -> bool:
    """Layers after the one whose stream is taken, and what stands for patches that are left out in training."""
    layer = LAYER.match(tensor)
    return int(layer[1]) >= config.num_hidden_layers if layer else tensor == f"{EMBEDDINGS}mask_token"


TOWER = replace(
    CLIP,
    architecture=f"the vision tower of {ARCHITECTURE}",
    defaults={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "norm_type": "layer_norm"}
    | {"use_qk_norm": False, "attention_bias": False},
    neutral={
        "num_channels": (None, 3),
        "use_absolute_position_embeddings": (None, True),
        "use_mean_pooling": (None, True),
    },
    settings=internvl_tower,
    outside={**CLIP.outside, "downsample_ratio": "downsample_ratio"},
    unused=unused,
)


def variant(hf: Values) -> FamilyDescription:
    """Around which decoder, and whether the tower has biases of queries, keys and values."""
    text, vision = _object(hf, "text_config"), _object(hf, "vision_config")
    kind = text.get("model_type", "qwen2")
    if not isinstance(kind, str) or kind not in DECODERS:
        raise UnsupportedError(f"text_config: model_type {str(kind)[:80]!r} is not supported; supported: {', '.join(DECODERS)}")
    return _family(kind, flag({**TOWER.defaults, **vision}, "attention_bias"))


def _object(values: Values, key: str) -> dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict):
        raise FormatError(f"{key} is {str(found)[:80]}; expected an object")
    return found


def _family(text: str, attention_bias: bool) -> FamilyDescription:
    architecture, sizes = DECODERS[text]
    decoder = next(each for each in LLAMA_FAMILIES if each.architecture == architecture)
    biases = BIASES if attention_bias else tuple(part for part in BIASES if part not in ("q", "k", "v"))
    outside = {"image_token_id": 151667, "downsample_ratio": 0.5, "projector_hidden_act": "gelu"}
    outside |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    return replace(
        decoder,
        architecture=ARCHITECTURE,
        defaults={**decoder.defaults, **SIZES, **sizes, **outside},
        tower=replace(TOWER, biases=biases, sources=lambda config: tower_sources(config, biases)),
        renamed=RENAMED,
        variants=variant,
    )


INTERNVL = _family("qwen2", False)
