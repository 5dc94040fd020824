"""Models of published shapes with random weights: as fast as converted ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeq.converters.families.table import recognise
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.tools.lab.make_checkpoint import SHAPES, llama_config
from edgeq.tools.measure.random_file import with_layers, write_random

CODEC = Codec("int", 4, 128)


@contextmanager
def random_model(name: str, layers: int | None = None) -> Iterator[ModelFile]:
    """A file of that shape, which is deleted afterwards; `layers`: of fewer than it has."""
    config = recognise(llama_config(SHAPES[name]))[1]
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        path = Path(folder) / f"{name}.edgeq"
        write_random(path, config if layers is None else with_layers(config, layers), CODEC)
        yield ModelFile.open(path)
