"""Files of a vision-language model with random weights, alike but for one thing each, to be timed beside each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.container import ModelFile
from edgeq.metadata import Metadata
from edgeq.records import Activation, ArrayRef, LinearSpec, SplitRow, Transform
from edgeq.tools.lab.make_checkpoint import SHAPES, make
from edgeq.writer import Writer

SEED = 0
VOCABULARY = 4096
"""Of the files: a head of the published size would be most of a decoder of few layers."""
SCALE = 0.03
"""Every constant scale: which it is does not change the time."""
Change = Callable[[Writer, LinearSpec], LinearSpec]


def source(folder: Path, shape: str, layers: int) -> Path:
    """A file of so many layers of decoder and tower by rounding to nearest: the decoder with a scale for each output channel
    and as many inner channels as mquant would make of them for their transform, the tower as usual.

    UnsupportedError: the shape has no vision tower.
    """
    # It imports torch.
    from edgeq import convert
    from edgeq.converters.rotation.hadamard import best_size

    path, published = folder / "plain.edgeq", SHAPES[shape]
    if not path.exists():
        assert published.tower
        made = replace(
            published, layers=layers, vocab=min(VOCABULARY, published.vocab), tower=replace(published.tower, layers=layers),
            inner=best_size(published.inner, 3 * published.hidden),
        )  # fmt: skip
        make(folder / "checkpoint", made, SEED)
        convert(folder / "checkpoint", path, method="rtn", bits=4, group_size="row", symmetric=True)
    return path


def copies(file: Path) -> dict[str, Path]:
    """The files that are timed: the decoder as mquant stores it with constant scales, with scales of other kinds, without the
    transform of the down projections, and without the tower."""

    def changed(scales: str, transformed: bool) -> Change:
        def change(writer: Writer, layer: LinearSpec) -> LinearSpec:
            if not layer.name.startswith("layers."):
                return layer
            if scales == "static":
                constants = writer.array(np.full(2, SCALE, np.float32), "f32")
                layer = replace(layer, activation=Activation(8, scales=constants))
            elif scales == "token":
                layer = replace(layer, activation=Activation(8))
            return with_transform(writer, layer) if transformed and layer.name.endswith(".down") else layer

        return change

    found = {
        "static": copied(file, "static", changed("static", True)),
        "token": copied(file, "token", changed("token", True)),
        "block": copied(file, "block", changed("block", True)),
        "no transform": copied(file, "static-plain", changed("static", False)),
    }
    return found | {"text": copied(found["static"], "text", lambda _, layer: layer, without_tower)}


def with_transform(writer: Writer, layer: LinearSpec) -> LinearSpec:
    """The layer with an online transform of its input whose first channel is kept apart, as mquant stores it."""
    from edgeq.converters.rotation.hadamard import hadamard

    base = hadamard(layer.columns, constant_row=True).base
    ref = None if base is None else writer.array(base.float().numpy(), "f32")
    split = SplitRow(0, writer.array(np.zeros(layer.rows, np.float16), "f16"))
    return replace(layer, transform=Transform(layer.columns, 1, ref), split_row=split)


def without_tower(metadata: Metadata) -> Metadata:
    """The decoder alone, as a file for text."""

    def kept(each: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in each.items() if not name.startswith("vision.")}

    blobs = {name: index for name, index in metadata.blobs.items() if name != "preprocessor.json"}
    rope = replace(metadata.config.rope, sections=(), interleaved=False)
    config = replace(metadata.config, vision=None, rope=rope)
    return replace(
        metadata, config=config, linears=kept(metadata.linears), arrays=kept(metadata.arrays), blobs=blobs, vision_mode=None
    )


def copied(file: Path, name: str, change: Change, chosen: Callable[[Metadata], Metadata] = lambda metadata: metadata) -> Path:
    """A copy with other linear layers, beside the file.  `chosen` says what of it is copied."""
    path = file.with_name(f"{name}.edgeq")
    if path.exists():
        return path
    opened = ModelFile.open(file)
    metadata, writer = chosen(opened.metadata), Writer(path)
    linears = {key: change(writer, moved(writer, opened, layer)) for key, layer in metadata.linears.items()}
    arrays = {key: moved(writer, opened, ref) for key, ref in metadata.arrays.items()}
    blobs = {key: writer.append([opened.segment(index)]) for key, index in metadata.blobs.items()}
    writer.finish(replace(metadata, linears=linears, arrays=arrays, blobs=blobs, kernels={}))
    return path


def moved(writer: Writer, file: ModelFile, value: Any) -> Any:
    """A record with its arrays written into another file."""
    if isinstance(value, ArrayRef):
        return replace(value, segment=writer.append([file.segment(value.segment)]))
    if isinstance(value, tuple):
        return tuple(moved(writer, file, each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: moved(writer, file, getattr(value, each.name)) for each in fields(value) if each.init}
        )
    return value
