"""Bounds of what the linear layers of a vision tower read and give (Gemma 4), as its configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgeq.errors import FormatError, UnsupportedError

BOUNDED = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear parts of a layer of a tower, in the order of their bounds; without a gated MLP there is no gate."""
MAX_BOUND = 3.4028234663852886e38
"""The largest float32."""


class Clip(NamedTuple):
    """Bounds of a linear layer: the least and the most that is read of its input, and that its output has; None: no bound."""

    input_min: float | None = None
    input_max: float | None = None
    output_min: float | None = None
    output_max: float | None = None

    @property
    def inputs(self) -> tuple[float, float] | None:
        """The bounds as numbers, perhaps infinite; None: there are none."""
        return _interval(self.input_min, self.input_max)

    @property
    def outputs(self) -> tuple[float, float] | None:
        return _interval(self.output_min, self.output_max)


LayerClips = tuple[Clip, ...]


def _interval(least: float | None, most: float | None) -> tuple[float, float] | None:
    if least is None and most is None:
        return None
    return float("-inf") if least is None else least, float("inf") if most is None else most


def bounded_parts(gated: bool) -> tuple[str, ...]:
    return tuple(part for part in BOUNDED if gated or part != "gate")


def by_part(clips: tuple[LayerClips, ...], layer: int, gated: bool) -> Mapping[str, Clip]:
    """The bounds of each linear part of a layer; empty: the tower has none."""
    return dict(zip(bounded_parts(gated), clips[layer], strict=True)) if clips else {}


def read_clips(data: Any, most: int, where: str) -> tuple[LayerClips, ...]:
    """Those that JSON has: of at most so many layers, of each part four numbers or null.  FormatError: another form."""
    if not isinstance(data, list) or len(data) > most:
        raise FormatError(f"{where} is not a list of at most {most} layers")
    for layer in data:
        if not isinstance(layer, list) or len(layer) > len(BOUNDED):
            raise FormatError(f"{where}: a layer is not a list of at most {len(BOUNDED)} parts")
        if not all(isinstance(clip, list) and len(clip) == len(Clip._fields) for clip in layer):
            raise FormatError(f"{where}: a part has not {len(Clip._fields)} bounds: {', '.join(Clip._fields)}")
    return tuple(tuple(Clip(*clip) for clip in layer) for layer in data)


def check_clips(clips: tuple[LayerClips, ...], layers: int, gated: bool, post_norms: bool) -> None:
    """FormatError unless there are none, or those of all linear parts of all layers, each a range of numbers of float32.

    UnsupportedError: outputs would be added to the stream right after they are bounded.
    """
    if not clips:
        return
    if not post_norms:
        raise UnsupportedError("clips are supported with post_norms, which come between a layer's output and the stream")
    parts = bounded_parts(gated)
    if len(clips) != layers or any(len(layer) != len(parts) for layer in clips):
        raise FormatError(f"config clips must be of {layers} layers and the parts {', '.join(parts)} of each")
    for index, layer in enumerate(clips):
        for part, clip in zip(parts, layer, strict=True):
            check_clip(f"config clips of {part} in layer {index}", clip)


def check_clip(what: str, clip: Clip) -> None:
    """FormatError: a bound is no number of float32, or the least is above the most."""
    for name, bound in clip._asdict().items():
        if bound is not None and (type(bound) not in (int, float) or not -MAX_BOUND <= bound <= MAX_BOUND):
            raise FormatError(f"{what}: {name} is {str(bound)[:40]}; expected a number of float32, or none")
    for side, bounds in (("input", clip.inputs), ("output", clip.outputs)):
        if bounds is not None and bounds[0] > bounds[1]:
            raise FormatError(f"{what}: {side}_min is {bounds[0]:g}, above {side}_max, {bounds[1]:g}")
