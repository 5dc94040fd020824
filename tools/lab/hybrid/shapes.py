"""Files in the shapes of Qwen3.5 with random weights: as fast and as large as converted ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq.converters.families.table import recognise
from edgeq.format.codec import Codec
from edgeq.network.config import ModelConfig
from edgeq.tools.measure.random_file import with_layers, write_random

CODEC = Codec("int", 4, 128)
ALL = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": ALL | {"hidden_size": 1024, "intermediate_size": 3584},
    "qwen3.5-2b": ALL | {"hidden_size": 2048, "intermediate_size": 6144},
}


def shape(name: str, layers: int, draft_tokens: tuple[int, ...] = ()) -> ModelConfig:
    """With the first `layers` layers, and the one that drafts `draft_tokens`; none: all of the vocabulary."""
    config = with_layers(recognise(SHAPES[name])[1], layers)
    return replace(config, draft_layers=1, draft_tokens=draft_tokens)


@contextmanager
def random_file(config: ModelConfig) -> Iterator[Path]:
    """A file of that network, deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        path = Path(folder) / "random.edgeq"
        write_random(path, config, CODEC)
        yield path
