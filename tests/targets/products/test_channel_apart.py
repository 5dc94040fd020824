"""A split row: an input channel whose weights are kept apart, unrounded."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import LinearSpec, SplitRow, Transform
from edgeq.targets.graph import Activate, CacheSpec, Embed, Graph, Linear, Select
from edgeq.targets.target import Options
from tests.targets.cases import ISAS, Arrays, matrix, run, weight

ROWS, COLUMNS, COUNT = 37, 64, 19


def network(arrays: Arrays, codec: Codec, dtype: str, index: int, parts: dict[str, object]) -> tuple[Graph, np.ndarray]:
    """silu of a table, and a product with a split row; its result beside other channels of a buffer, added to what is there."""
    rng = np.random.default_rng(index)
    x = rng.standard_normal((COUNT, COLUMNS)).astype(np.float32)
    row = rng.standard_normal(ROWS).astype(np.float16 if dtype == "f16" else np.float32)
    layer = LinearSpec(
        "l", (weight(arrays, rng, codec, ROWS, COLUMNS),), split_row=SplitRow(index, arrays.add(row, dtype)), **parts
    )  # type: ignore[arg-type]
    operations = (
        Embed(-1, arrays.add(x, "f32"), "x"),
        Activate(0, "x", COLUMNS, "active", "silu", False),
        Linear(0, "active", layer, "y", 3),
        Linear(0, "active", layer, "y", 3, add=True),
        Select(0, ("y",)),
    )
    return Graph({"x": COLUMNS, "active": COLUMNS, "y": ROWS + 5}, operations, "y", (CacheSpec(1, 2, 2),)), row


def expected(arrays: Arrays, graph: Graph, row: np.ndarray) -> np.ndarray:
    table, linear = graph.operations[0].table, graph.operations[2].linear  # type: ignore[attr-defined]
    x = arrays.array(table).astype(np.float64)
    x = x / (1 + np.exp(-x))
    if linear.transform:
        h = np.array([[1.0]])
        while len(h) < linear.transform.size:
            h = np.block([[h, h], [h, -h]])
        x = (x.reshape(COUNT, -1, len(h)) @ h).reshape(COUNT, -1) / len(h) ** 0.5
    once = x @ matrix(arrays, linear.weights[0]).T.astype(np.float64) + x[:, linear.split_row.index, None] * row
    return np.pad(2 * once, ((0, 0), (3, 2)))


@pytest.mark.parametrize("isa", [None, *ISAS])
@pytest.mark.parametrize(("codec", "dtype", "index", "parts"), [
    (Codec("f32"), "f32", 5, {}),
    (Codec("int", 4, 32, False), "f16", 0, {"transform": Transform(32)}),
    (Codec("int", 8, 0, True), "f32", COLUMNS - 1, {}),
])  # fmt: skip
def test_it_adds_one_channel_times_its_row(
    codec: Codec, dtype: str, index: int, parts: dict[str, object], isa: str | None
) -> None:
    arrays = Arrays()
    graph, row = network(arrays, codec, dtype, index, parts)
    wanted = expected(arrays, graph, row)
    for count in (COUNT, 1):
        found = run("cpu" if isa else "reference", graph, arrays, count, Options("a16", 2 if isa else 0, isa))
        assert np.abs(found - wanted[:count]).max() < 2e-4 * np.abs(wanted).max()
        assert not found[:, :3].any() and not found[:, ROWS + 3 :].any()
