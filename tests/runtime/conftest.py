"""Converted files of the tiny checkpoints, and models loaded from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Once

TINY_LLAMA = Path(__file__).parent.parent.parent / "models" / "tiny-llama"

ModelPath = Callable[..., Path]


@pytest.fixture(scope="session")
def model_path(checkpoint: Callable[..., Path], once: Once) -> ModelPath:
    """`model_path(family, overrides={}, **ConvertOptions)` -> .edgeq file, made once per run.

    "tiny-llama" is the trained model; overrides are of the configuration of the others.
    """
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    def get(family: str, overrides: dict[str, Any] | None = None, **options: Any) -> Path:
        def make(path: Path) -> None:
            source = TINY_LLAMA if family == "tiny-llama" else checkpoint(family, dtype="float32", **(overrides or {}))
            convert(str(source), path, ConvertOptions(**options), lambda *_: None)

        return once(f"{family}.edgeq", repr((family, overrides or {}, sorted(options.items()))), make)

    return get


def rounded_cache(config: Any) -> Any:
    """transformers' cache, of numbers that f16 has."""
    from transformers import DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **settings: Any) -> Any:
            return super().update(key_states.half().float(), value_states.half().float(), *args, **settings)

    return RoundedCache(config=config)


@pytest.fixture(scope="session")
def tiny_path(model_path: ModelPath) -> Path:
    """The trained tiny Llama in float32."""
    return model_path("tiny-llama", method="none", dtype="f32")


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
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    made: dict[str, Path] = {}

    def get(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("files") / "texts.edgeq"
            convert(str(source(family)), made[key], ConvertOptions(**options), lambda *_: None)
        return made[key]

    return get
