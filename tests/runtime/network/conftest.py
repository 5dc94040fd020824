"""Checkpoints of texts' models, made once a test module, and files of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family of the module's MAKERS."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = request.module.MAKERS[family](tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def path(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file of what `source` gives, converted by these options."""
    made: dict[str, Path] = {}

    def get(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("files") / "texts.edgeq"
            convert(str(source(family)), made[key], ConvertOptions(**options), lambda *_: None)
        return made[key]

    return get
