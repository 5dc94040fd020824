"""config.json of the network in a model file, as transformers has it: a file keeps the network, not that JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgeq.converters.families import Family, recognise
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Kinds of models that can be exported -> their architecture."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
OTHERS = ("head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings", "tie_word_embeddings", "model_type")
SCALED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of ropes that can be written -> their fields."""


def hf_config(config: ModelConfig, generation: dict[str, Any]) -> tuple[dict[str, Any], Family]:
    """The keys of config.json without how weights are quantized, and the family that they are of.

    UnsupportedError: a network that config.json would not describe, by what it has.
    """
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"models of the kind {config.model_type} are not exported; supported: {', '.join(ARCHITECTURES)}"
        )
    for name in ("vision", "pooling"):
        if getattr(config, name) is not None:
            raise UnsupportedError(f"models with {name} are not exported; supported: models that continue texts")
    windows = sorted(set(config.sliding_windows))
    types = ["sliding_attention" if size else "full_attention" for size in config.sliding_windows]
    keys: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.model_type]],
        **{key: getattr(config, key) for key in (*SIZES, *OTHERS)},
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling(config.rope),
        "sliding_window": windows[-1] if windows else None,
        "bos_token_id": generation.get("bos_token_id"),
        "eos_token_id": _one_or_all(generation.get("eos_token_ids")),
    }
    if config.model_type in ("qwen2", "qwen3", "smollm3"):
        full = ["full_attention"] * config.num_hidden_layers
        keys |= {"use_sliding_window": bool(windows), "layer_types": types or full}
        keys["sliding_window"] = windows[-1] if windows else 4096
    if config.model_type == "smollm3":
        layers = range(config.num_hidden_layers)
        keys["no_rope_layers"] = [int(layer not in config.layers_without_rope) for layer in layers]
    # What comes back through the reader of checkpoints must be this network.
    try:
        family, found = recognise(keys)
    except (CheckpointError, UnsupportedError) as error:
        raise UnsupportedError(f"config.json cannot say what this network has: {error}") from None
    differing = [key for key, value in asdict(config).items() if asdict(found)[key] != value]
    if differing:
        key, ours, theirs = differing[0], asdict(config)[differing[0]], asdict(found)[differing[0]]
        raise UnsupportedError(
            f"{key} of this network is {ours!r:.80}, and a {ARCHITECTURES[config.model_type]} has {theirs!r:.80}; what a "
            "method changes in the network cannot be exported"
        )
    return keys, family


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind not in SCALED:
        raise UnsupportedError(f"positions of the kind {rope.kind} are not exported; supported: {', '.join(SCALED)}")
    fields = {name: getattr(rope, name) for name in SCALED[rope.kind]}
    return {"rope_type": rope.kind, **fields} if fields else None


def _one_or_all(ids: Any) -> Any:
    return ids[0] if isinstance(ids, list) and len(ids) == 1 else ids or None
