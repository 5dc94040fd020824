"""What network a checkpoint holds, and whether its tensors are those of that network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.source import CheckpointSource
from edgeq.converters.families import HEAD, Family, recognise
from edgeq.converters.families.vision.clips import stored_clips
from edgeq.converters.families.vision.pi0 import STATISTICS, with_statistics
from edgeq.errors import UnsupportedError
from edgeq.format.adapter import Adapter
from edgeq.format.safetensors import read_json
from edgeq.network.config import ModelConfig
from edgeq.network.pooling import Pooling

HEADLESS = ("layers.", "embed_tokens.", "norm.", "decoder.")
"""Beginnings of the names of tensors in checkpoints of a decoder that was saved without its head."""


def described(source: CheckpointSource, pooling: Pooling | None = None) -> tuple[Family, ModelConfig]:
    """From the JSON files, the names of the tensors and the bounds of a tower's layers, where it has some.

    pooling   what takes the place of the head; None: nothing

    UnsupportedError: what this version does not run, by key.  CheckpointError: bounds are missing or no ranges.
    """
    family, config = recognise(source.config, _preprocessor(source.texts), pooling)
    drafts = family.description.drafts
    if drafts is not None and pooling is None and drafts(source.config, source.tensors()):
        config = replace(config, draft_layers=1)
    tower = family.description.tower
    if config.vision is not None and tower is not None and tower.clipped is not None:
        clips = stored_clips(source, tower.clipped(config.vision))
        config = replace(config, vision=replace(config.vision, clips=clips))
    if config.policy is not None and (path := source.texts / STATISTICS).exists():
        config = replace(config, policy=with_statistics(config.policy, read_json(path)))
    return replace(family, config=config), config


def open_tensors(source: CheckpointSource, family: Family, adapter: Path | None = None) -> Checkpoint:
    """The tensors under the names of `family`, with the adapter in a folder merged.

    CheckpointError: one is missing or damaged.  Of the adapter: as Adapter.read and Checkpoint.merge.
    """
    checkpoint = Checkpoint(source)
    if adapter is not None:
        read = Adapter.read(adapter)
        if HEAD.removesuffix(".weight") in read.factors and getattr(family.config, "tie_word_embeddings", False):
            raise UnsupportedError(f"adapter {read.name}: it changes the head, which is the embedding in this checkpoint")
        checkpoint.merge(read)
    pools, renamed = isinstance(family.config, ModelConfig) and family.config.pooling is not None, family.description.renamed
    own = renamed and family.description.headless
    checkpoint.rename(renamed if own or not pools else {each: f"model.{each}" for each in HEADLESS})
    checkpoint.arrange(family.sources())
    _check_tensors(checkpoint, family)
    return checkpoint


def _preprocessor(texts: Path) -> dict[str, Any] | None:
    """How a picture becomes pixels: in a file of its own, or among the settings of the whole processor (transformers 5)."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := texts / name).exists():
            found = read_json(path)
            inner = found.get("image_processor", found)
            return inner if isinstance(inner, dict) else found
    return None


def _check_tensors(checkpoint: Checkpoint, family: Family) -> None:
    """CheckpointError unless the tensors are exactly those of the configuration, in name, shape and type."""
    beside = [each for each in (family.tower, family.draft, family.policy) if each]
    expected = family.tensor_shapes() | {name: shape for each in beside for name, shape in each.tensor_shapes().items()}
    families = [each for each in (family, family.tower) if each]
    for name, shape in expected.items():
        checkpoint.tensor(name, shape)
        checkpoint.dtype(name)
    # A tied model may carry its head a second time.
    unknown = [
        name
        for name in checkpoint.tensors
        if name not in expected and name != HEAD and not name.endswith(family.description.derived)
        if not any(each.description.unused(each.config, name) for each in families)
    ]
    if unknown:
        raise UnsupportedError(
            f"{checkpoint.source.place}: tensor {min(unknown)} has no place in a {family.architecture}; "
            "if it is an adapter, merge it into the model first"
        )
