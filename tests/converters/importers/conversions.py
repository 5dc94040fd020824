"""Folders converted and held against what their weights mean, and changes that make them hostile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import carry_out
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import planned
from edgeq.converters.rounding.linears import LinearItem
from edgeq.converters.running.readback import stored_tensors
from edgeq.format.container import ModelFile
from tests.converters.importers.published import Publication, Tensors


def silent(done: float, total: float, label: str) -> None:
    pass


def plan_of(folder: Path, **options: Any) -> ConversionPlan:
    return planned(open_source(str(folder), HubAccess()), ConvertOptions(**options))


def converted(publication: Publication) -> tuple[ConversionPlan, ModelFile]:
    """The file of a folder, every weight of which means what its record does."""
    plan = plan_of(publication.folder)
    file = carry_out(plan, publication.folder.with_suffix(".edgeq"), silent).file
    tensors = plan.checkpoint.source.tensors()
    for module, expected in publication.records.items():
        values = tensors[f"{module}.weight"].read(0, expected.q.size, module).reshape(expected.q.shape)
        assert np.array_equal(values, expected.values), module
    items = [item for step in plan.steps for item in step.items]
    read = stored_tensors(file.path, file.segments, items)
    for name in [name for item in items if isinstance(item, LinearItem) for name, _ in item.tensors]:
        assert np.array_equal(read(name), plan.checkpoint.whole(name)), name
    return plan, file


def codecs(file: ModelFile) -> dict[str, str]:
    return {name: linear.weights[0].codec.name for name, linear in file.metadata.linears.items() if "layers" in name}


def without(end: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            del tensors[name]

    return change


def tensor(name: str, array: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: tensors.update({name: np.asarray(array)})
