"""The network of a model file as llama.cpp names it: metadata, names of tensors, factors of the rotary embedding.

What is written is read again by the importer of GGUF files: it must give the same network, so what llama.cpp's keys cannot say
is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.families import recognise
from edgeq.converters.importers.gguf_architectures import ARCHITECTURES, architecture
from edgeq.converters.importers.gguf_config import config_of
from edgeq.converters.importers.gguf_keys import EMBEDDING, FREQUENCIES, HEAD, NORM
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import frequencies

Keys = dict[str, Any]
Factors = dict[str, NDArray[np.float32]]
NAMES = {
    **{"llama": "llama", "mistral": "llama", "smollm3": "smollm3", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"},
    "gemma3_text": "gemma3",
}
"""Kind of model in a file -> llama.cpp's architecture."""
PARTS = {
    **{"attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"},
    **{"q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "post_attention_norm": "post_attention_norm"},
    **{"mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "post_mlp_norm": "post_ffw_norm"},
}
"""Part of a decoder layer -> llama.cpp's name."""
JOINED = {"phi3": {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv", "ffn_gate": "ffn_up", "ffn_up": "ffn_up"}}
"""Architectures whose matrices lie one below the other in one tensor."""
UNSAID = ("model_type",)
"""Fields of a configuration in which a Mistral that comes back as a Llama differs."""


@dataclass(frozen=True)
class GgufNetwork:
    """architecture  llama.cpp's name
    keys          metadata that begin with it
    factors       tensors of the rotary embedding
    """

    architecture: str
    keys: Keys
    factors: Factors

    @property
    def interleaved(self) -> bool:
        """Whether rows of q and k lie in pairs of one rotation."""
        return ARCHITECTURES[self.architecture].interleaved

    def tensor(self, name: str) -> str:
        """The tensor that the matrix blk.N.PART is in, itself or with others."""
        before, _, part = name.rpartition(".")
        return f"{before}.{JOINED.get(self.architecture, {}).get(part, part)}" if before else name


def layer_names(layer: int) -> Mapping[str, str]:
    """Part of a layer -> the name of its weight."""
    return {part: f"blk.{layer}.{name}.weight" for part, name in PARTS.items()}


def network_of(config: ModelConfig) -> GgufNetwork:
    """UnsupportedError: an architecture, or a setting of the network, that no GGUF file says; by name."""
    name = NAMES.get(config.model_type)
    if name is None:
        raise UnsupportedError(f"models of the kind {config.model_type} are not exported; supported: {', '.join(NAMES)}")
    for part in ("vision", "pooling"):
        if getattr(config, part) is not None:
            raise UnsupportedError(f"models with {part} are not exported; supported: models that continue texts")
    factors = _factors(config)
    keys = {f"{name}.{key}": value for key, value in (_keys(config, name) | _rope_keys(config)).items()}
    _check_comes_back(config, name, keys, factors)
    return GgufNetwork(name, keys, factors)


def _keys(config: ModelConfig, name: str) -> Keys:
    keys: Keys = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.rope.rotary_size(config.head_dim),
        "rope.freq_base": float(config.rope.theta),
    }
    windows = set(config.sliding_windows) - {0}
    if name in ("gemma3", "phi3"):
        keys["attention.sliding_window"] = max(windows, default=0)
    if config.local_rope is not None and config.local_rope.theta != 10000.0:
        keys["rope.freq_base_swa"] = float(config.local_rope.theta)
    return keys


def _rope_keys(config: ModelConfig) -> Keys:
    rope = config.rope
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "longrope":
        original = {"rope.scaling.original_context_length": rope.original_max_position_embeddings}
        return original | {"rope.scaling.attn_factor": float(rope.attention_factor)}
    return {}


def _factors(config: ModelConfig) -> Factors:
    rope = config.rope
    if rope.kind == "llama3":
        pairs = rope.rotary_size(config.head_dim) // 2
        plain = rope.theta ** (-np.arange(pairs) / pairs)
        return {FREQUENCIES: (plain / np.array(frequencies(rope, config.head_dim))).astype(np.float32)}
    if rope.kind == "longrope":
        lists = {"rope_factors_long.weight": rope.long_factor, "rope_factors_short.weight": rope.short_factor}
        return {name: np.array(values, np.float32) for name, values in lists.items()}
    return {}


def _check_comes_back(config: ModelConfig, name: str, keys: Keys, factors: Factors) -> None:
    """UnsupportedError: a reader of these keys would run another network."""
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    try:
        kind, read = architecture({"general.architecture": name, **keys}, "the file", shapes)
        read.factors = dict(factors)
        found = recognise(config_of(kind, read))[1]
    except (CheckpointError, UnsupportedError) as error:
        raise UnsupportedError(f"GGUF cannot say what this network has: {error}") from None
    ours, theirs = asdict(config), asdict(found)
    for key, value in ours.items():
        if key not in UNSAID and not _same(value, theirs[key]):
            raise UnsupportedError(
                f"{key} of this network is {value!r:.80}, and llama.cpp's {name} has {theirs[key]!r:.80}: GGUF cannot say it"
            )


def _same(ours: Any, theirs: Any) -> bool:
    """Equal, numbers as f32 has them."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(_same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)
