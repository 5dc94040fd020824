"""LLaVA-1.5 (Liu et al. 2024, arXiv 2310.03744): a Llama, Mistral or Qwen2 decoder, a vision tower that is left after one of
its layers, and a projector of two layers.  The tower is CLIP's (Radford et al. 2021, arXiv 2103.00020) or SigLIP's (Zhai et al.
2023, arXiv 2303.15343).

The tower's stream goes into the projector as it is after that layer, without a norm, as the models were trained.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import LLAMA_FAMILIES, QKV
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.network.rope import Rope

ARCHITECTURE = "LlavaForConditionalGeneration"
RENAMED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
# What a text_config leaves out is as in the decoder's configuration class.
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"vocab_size": 32000, "intermediate_size": 11008}),
    "mistral": ("MistralForCausalLM", {"vocab_size": 32000, "intermediate_size": 14336}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 151936, "intermediate_size": 22016}),
}
SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
OUTSIDE = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
}
# Module of a layer (torch_decoder.py) -> its module in the tower.
BLOCK = {
    "input_layernorm": "layer_norm1",
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in QKV},
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "layer_norm2",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
BIASES = ("q", "k", "v", "o", "up", "down", "project.0", "project.1")
LAYER = re.compile(r"vision_tower\.encoder\.layers\.(\d{1,6})\.")
EMBEDDINGS = "vision_tower.embeddings."
ENDS = ("vision_tower.post_layernorm.", "vision_tower.head.")


def clip_tower(values: Values) -> dict[str, Any]:
    return _tower(values, class_row=True) | {"class_row": True, "pre_norm": True}


def siglip_tower(values: Values) -> dict[str, Any]:
    found = _tower(values, class_row=False)
    if found.pop("class_feature") is False:
        raise UnsupportedError(
            "vision_feature_select_strategy 'default' leaves out the first patch of a SigLIP tower; supported: 'full'"
        )
    return found


def _tower(values: Values, class_row: bool) -> dict[str, Any]:
    """What both towers have; class_feature also where there is no class row."""
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "patch_size", "image_size")
    for key in keys:
        if type(values[key]) is not int or not 1 <= values[key] <= 1 << 20:
            raise FormatError(f"vision_config: {key} is {str(values[key])[:80]}; expected an integer from 1 to {1 << 20}")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % (2 * heads):
        raise FormatError(f"vision_config: {hidden} channels are not a multiple of twice num_attention_heads {heads}")
    strategy = values["vision_feature_select_strategy"]
    if strategy not in ("default", "full"):
        raise UnsupportedError(f"vision_feature_select_strategy is {strategy!r:.80}; supported: default, full")
    return {
        "hidden_size": hidden,
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": _layers(values),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": values["layer_norm_eps"],
        "layer_norm": True,
        "rope": Rope(1.0, "learned"),
        "hidden_act": values["hidden_act"],
        "gated_mlp": False,
        "patch_size": values["patch_size"],
        "temporal_patch_size": 1,
        "merge": 1,
        "position_rows": (values["image_size"] // values["patch_size"]) ** 2 + class_row,
        "class_feature": strategy == "full",
        "project_norm": "none",
        "project_size": values["out_hidden_size"],
        "project_act": values["projector_hidden_act"],
        "out_hidden_size": values["out_hidden_size"],
    }


def _layers(values: Values) -> int:
    """Layers up to the one whose stream is taken; from the end, -1 is the stream after the last layer."""
    tapped, layers = values["vision_feature_layer"], values["num_hidden_layers"]
    if isinstance(tapped, list) and len(tapped) == 1:
        tapped = tapped[0]
    if isinstance(tapped, list):
        raise UnsupportedError(f"vision_feature_layer is {str(tapped)[:80]}: several layers; supported: one")
    if type(tapped) is not int or not -layers <= tapped <= layers or tapped == 0:
        raise FormatError(f"vision_feature_layer is {str(tapped)[:80]}; expected a layer of {layers}, as -2")
    return tapped if tapped > 0 else layers + 1 + tapped


def tower_sources(config: VisionConfig) -> dict[str, TensorSource]:
    hidden, sources = config.hidden_size, stack_sources(config)
    features, width = config.out_hidden_size, config.project_size
    for kind in ("weight", "bias"):
        for ours, theirs, sizes in (("0", "1", (width, hidden)), ("1", "2", (features, width))):
            shape: tuple[int, ...] = sizes if kind == "weight" else sizes[:1]
            name = f"multi_modal_projector.linear_{theirs}.{kind}"
            sources[f"vision.project.{ours}.{kind}"] = TensorSource(name, shape, shape)
        if config.pre_norm:
            # The name is spelled so in every checkpoint.
            sources[f"vision.pre_norm.{kind}"] = TensorSource(f"vision_tower.pre_layrnorm.{kind}", (hidden,), (hidden,))
    return sources


def stack_sources(config: VisionConfig) -> dict[str, TensorSource]:
    """What comes before the projector: CLIP's and SigLIP's names."""
    hidden, inner, side = config.hidden_size, config.intermediate_size, config.patch_size
    pixels, table = (hidden, config.CHANNELS, side, side), (config.position_rows, hidden)
    first = f"{EMBEDDINGS}class_embedding" if config.class_row else ""
    sources = {
        "vision.patch.weight": TensorSource(f"{EMBEDDINGS}patch_embedding.weight", pixels, (hidden, config.patch_width)),
        "vision.positions.weight": TensorSource(f"{EMBEDDINGS}position_embedding.weight", table, table, first=first),
    }
    if not config.class_row:
        sources["vision.patch.bias"] = TensorSource(f"{EMBEDDINGS}patch_embedding.bias", (hidden,), (hidden,))
    shapes: dict[str, tuple[int, ...]] = {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for kind in ("weight", "bias"):
        for layer in range(config.num_hidden_layers):
            for module, theirs in BLOCK.items():
                shape = shapes.get(module, (hidden, hidden))
                shape = shape[:1] if kind == "bias" or module.endswith("norm") else shape
                name = f"vision_tower.encoder.layers.{layer}.{theirs}.{kind}"
                sources[f"vision.layers.{layer}.{module}.{kind}"] = TensorSource(name, shape, shape)
    return sources


def after_the_tap(config: VisionConfig, tensor: str) -> bool:
    """Layers after the one whose stream is taken, and what CLIP and SigLIP do with the last."""
    layer = LAYER.match(tensor)
    return int(layer[1]) >= config.num_hidden_layers if layer else tensor.startswith(ENDS)


NEUTRAL = {"num_channels": (None, 3), "attention_dropout": (None, 0), "tie_last_hidden_states": (None, False)}
VISION_SIZES = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
TAKEN = {key: key for key in ("projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy")}
TAKEN |= {"out_hidden_size": "hidden_size"}
CLIP = FamilyDescription(
    f"the CLIP tower of {ARCHITECTURE}",
    VISION_SIZES | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    NEUTRAL,
    clip_tower,
    biases=BIASES,
    sources=tower_sources,
    outside=TAKEN,
    unused=after_the_tap,
)
SIGLIP = FamilyDescription(
    f"the SigLIP tower of {ARCHITECTURE}",
    VISION_SIZES | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    NEUTRAL,
    siglip_tower,
    biases=("patch", *BIASES),
    sources=tower_sources,
    outside=TAKEN,
    unused=after_the_tap,
)
TOWERS = {"clip_vision_model": CLIP, "siglip_vision_model": SIGLIP}


def variant(hf: Values) -> FamilyDescription:
    """Around which decoder, and with which tower."""
    kinds = []
    for key, default, known in (("text_config", "llama", TEXT), ("vision_config", "clip_vision_model", TOWERS)):
        found = hf.get(key)
        if not isinstance(found, dict):
            raise FormatError(f"{key} is {str(found)[:80]}; expected an object")
        kind = found.get("model_type", default)
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedError(f"{key}: model_type {str(kind)[:80]!r} is not supported; supported: {', '.join(known)}")
        kinds.append(kind)
    return _family(*kinds)


def _family(text: str, tower: str) -> FamilyDescription:
    architecture, sizes = TEXT[text]
    decoder = next(each for each in LLAMA_FAMILIES if each.architecture == architecture)
    return replace(
        decoder,
        architecture=ARCHITECTURE,
        defaults={**decoder.defaults, **SIZES, **sizes, **OUTSIDE},
        neutral={**decoder.neutral, "multimodal_projector_bias": (True,)},
        derived=(*decoder.derived, ".position_ids"),
        tower=TOWERS[tower],
        renamed=RENAMED,
    )


LLAVA_FAMILIES = (replace(_family("llama", "clip_vision_model"), variants=variant),)
