"""Bounds of what the linear layers of a vision tower read and give, as checkpoints store them: tensors of one number each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edgeq.converters.checkpoint.source import CheckpointSource, StoredTensor
from edgeq.errors import CheckpointError, FormatError
from edgeq.format.safetensors import FLOATS
from edgeq.network.config import VisionConfig
from edgeq.pictures.tower_clips import Clip, LayerClips, check_clip

BOUNDS = tuple(f".{field}" for field in Clip._fields)
"""Ends of the names of the tensors of a layer."""
SCALARS: tuple[tuple[int, ...], ...] = ((), (1,))
"""Shapes of one number."""


def stored_clips(source: CheckpointSource, modules: Sequence[Sequence[str]]) -> tuple[LayerClips, ...]:
    """The bounds of the linear parts of each layer, which are in `modules`; empty: all are infinite.

    CheckpointError: one is missing, is no number, or is above the other.
    """
    tensors = source.tensors()
    clips = tuple(tuple(_clip(source, tensors, module) for module in layer) for layer in modules)
    return clips if any(clip != Clip() for layer in clips for clip in layer) else ()


def is_bound(config: VisionConfig, tensor: str) -> bool:
    """Whether a tensor is a bound, which the configuration has."""
    return tensor.endswith(BOUNDS)


def _clip(source: CheckpointSource, tensors: Mapping[str, StoredTensor], module: str) -> Clip:
    clip = Clip(*(_bound(source, tensors, f"{module}{end}") for end in BOUNDS))
    try:
        check_clip(module, clip)
    except FormatError as error:
        raise CheckpointError(f"{source.place}: {error}") from None
    return clip


def _bound(source: CheckpointSource, tensors: Mapping[str, StoredTensor], name: str) -> float | None:
    """A bound; None: infinite, so that nothing is bounded."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{source.place}: tensor {name} is missing, and use_clipped_linears is true; the checkpoint is incomplete"
        )
    if tensor.shape not in SCALARS or tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{source.place}: {name} is {tensor.dtype} {tensor.shape}; expected one number in {', '.join(FLOATS)}"
        )
    (value,) = tensor.read(0, 1, name).tolist()
    return None if value == (-math.inf if name.endswith("_min") else math.inf) else value
