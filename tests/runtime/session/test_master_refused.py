"""A master beside a part that changes its layer's input is refused when the file is loaded, by every target alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer
from edgeq.runtime import Model
from edgeq.runtime.session.requantize import Requantization
from tests.runtime.session.with_masters import with_masters


@pytest.fixture(scope="module")
def path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with masters, one of whose layers has an input scale too."""
    folder = tmp_path_factory.mktemp("masters")
    file = ModelFile.open(with_masters(tiny_path, folder / "sound.edgeq", Codec("int", 3, 32, False), Codec("int", 8, 128)))
    writer, linears = Writer(folder / "scaled.edgeq"), dict(file.metadata.linears)
    for index in range(len(file.segments)):
        writer.append([file.segment(index).tobytes()])
    layer = linears["layers.0.o"]
    linears["layers.0.o"] = replace(layer, input_scale=writer.array(np.ones(layer.columns, np.float32), "f32"))
    writer.finish(replace(file.metadata, linears=linears))
    return folder / "scaled.edgeq"


@pytest.mark.parametrize("target", ("cpu", "reference"))
def test_it_is_refused_at_load(path: Path, target: str) -> None:
    with pytest.raises(UnsupportedError, match="layers.0.o: a master beside .*input_scale.* run with `requantization=never`"):
        Model.load(path, target=target, context=64)


def test_it_runs_without_its_masters(path: Path) -> None:
    model = Model.load(path, target="reference", context=64, requantization=Requantization(when="never"))
    assert model.generate("def f(", max_tokens=2).tokens is not None
