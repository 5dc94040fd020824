"""Packs inside a model file: one for each architecture, as its last segments.

A new file is written and then takes the name: put into the old one, they would leave a hole, or half a file if the power fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer

PIECE = 16 << 20


def embed(file: ModelFile, packs: Mapping[str, bytes], out: Path) -> ModelFile:
    """Write the model with these packs, and with those of other architectures that it has, to `out`, which may be itself.

    UnsupportedError: it has kernels before other data.  InputError, ResourceError: as Writer.
    """
    metadata, count = file.metadata, len(file.segments)
    kept = {arch: file.segment(index).tobytes() for arch, index in metadata.kernels.items() if arch not in packs}
    while count and count - 1 in metadata.kernels.values():
        count -= 1
    if any(index < count for index in metadata.kernels.values()):
        raise UnsupportedError(f"{file.path}: its kernels are not at its end; convert the model again and embed them there")
    writer = Writer(out)
    try:
        for index in range(count):
            data = file.segment(index)
            writer.append(data[at : at + PIECE] for at in range(0, len(data), PIECE))
        kernels = {arch: writer.append([data]) for arch, data in sorted({**kept, **packs}.items())}
        return writer.finish(replace(metadata, kernels=kernels))
    finally:
        writer.close()
