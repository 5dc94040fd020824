"""Hunyuan, the dense models: norms of queries and keys after their rotation, and a base that grows with a constant `alpha`."""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, head_settings
from edgeq.converters.families.family import FamilyDescription, Values
from edgeq.converters.families.positions import rope
from edgeq.converters.families.rearranged import Sources
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope

HEAD_NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
MAX_ALPHA = 1e6


def alpha_rope(values: Values, head_dim: int) -> Rope:
    """What its files call "dynamic" has the base theta alpha^(d / (d - 2)), whatever the context; others are as they are."""
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where]
    kind = settings.get("rope_type", settings.get("type")) if isinstance(settings, dict) else None
    if kind != "dynamic" or not settings.get("alpha"):
        return rope(values)
    alpha, theta = settings["alpha"], settings.get("rope_theta", values["rope_theta"])
    for key, found in (("alpha", alpha), ("rope_theta", theta)):
        if type(found) not in (int, float) or not 0 < found <= (MAX_ALPHA if key == "alpha" else 1e12):
            raise FormatError(f"{where}: {key} is {found!r:.80}; expected a positive number")
    if type(head_dim) is not int or head_dim < 4:
        raise FormatError(f"head_dim is {head_dim!r:.80}; expected at least 4 with an alpha")
    return Rope(theta=theta * alpha ** (head_dim / (head_dim - 2)))


def hunyuan_settings(values: Values) -> dict[str, Any]:
    found = head_settings(values)
    return found | {"rope": alpha_rope(values, found["head_dim"]), "qk_norm": True, "qk_norm_kind": "rotated"}


def hunyuan_sources(config: ModelConfig) -> Sources:
    size = (config.head_dim,)
    layers = [f"model.layers.{layer}." for layer in range(config.num_hidden_layers)]
    pairs = ((f"{p}{ours}.weight", f"{p}{theirs}.weight") for p in layers for ours, theirs in HEAD_NORMS.items())
    return {ours: TensorSource(theirs, size, size) for ours, theirs in pairs}


HUNYUAN = FamilyDescription(
    "HunYuanDenseV1ForCausalLM",
    DEFAULTS | {"rms_norm_eps": 1e-5},
    NEUTRAL,
    hunyuan_settings,
    sources=hunyuan_sources,
)
