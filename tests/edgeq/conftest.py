"""A small sound file, and hostile ones made from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import pytest

from edgeq.format.schema import model_generated as fb
from edgeq.format.writer import Writer
from tests.edgeq.format.sample_file import seal, split, write_body


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound file."""
    path = tmp_path_factory.mktemp("sample") / "sample.edgeq"
    writer = Writer(path)
    writer.finish(write_body(writer))
    return path.read_bytes()


@pytest.fixture
def forge(sample: bytes, tmp_path: Path) -> Callable[..., Path]:
    """`forge(change)`: the sample with `change(model)` applied to its metadata, all digests right."""

    def make(change: Callable[[Any], object]) -> Path:
        data, metadata = split(sample)
        model = fb.ModelT.InitFromObj(fb.Model.GetRootAs(metadata, 0))
        change(model)
        builder = flatbuffers.Builder(1 << 16)
        builder.Finish(model.Pack(builder), file_identifier=b"EDGQ")
        path = tmp_path / "forged.edgeq"
        path.write_bytes(seal(data, bytes(builder.Output())))
        return path

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def to_disk(data: bytes) -> Path:
        path = tmp_path / "bad.edgeq"
        path.write_bytes(data)
        return path

    return to_disk
