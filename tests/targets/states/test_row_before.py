"""The row before: what was kept at the slot before, on the reference and on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.targets.family_operations import RowBefore
from edgeq.targets.graph import CacheSpec, Embed, Graph, Scale, Select
from edgeq.targets.states import LOG, StateSpec
from tests.targets.cases import ISAS, Arrays
from tests.targets.states.state_cases import LENGTH, results

TARGETS = ["reference", *ISAS]


def graph(arrays: Arrays, width: int, drafts: bool) -> tuple[Graph, np.ndarray]:
    """Row r of the result is the embedding of token r - 1; and what it has to be.  `drafts`: read first, then kept doubled."""
    x = np.random.default_rng(width).standard_normal((LENGTH, width)).astype(np.float32)
    table = Embed(-1, arrays.add(x, "f32"), "x")
    before = np.concatenate([np.zeros((1, width), np.float32), x[:-1]])
    if drafts:
        keep = Scale(-1, "x", 2.0, "x"), RowBefore(-1, "x", width, "dropped", 0)
        operations = table, RowBefore(-1, "y", width, "y", 0, keeps=False), *keep, Select(-1, ("y",))
    else:
        operations = table, RowBefore(-1, "x", width, "y", 0), Select(-1, ("y",))
    buffers = {"x": width, "y": width, "dropped": width}
    state = StateSpec("tail", (1, width))
    return Graph(buffers, operations, "y", (CacheSpec(1, 2, 2),), (state,)), before * (2 if drafts else 1)


def rows(target: str, made: Graph, arrays: Arrays, counts: tuple[int, ...]) -> np.ndarray:
    """Results on the reference or on an instruction set of the cpu target."""
    return results(target, made, arrays, counts) if target == "reference" else results("cpu", made, arrays, counts, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [5, 16, 40])
def test_a_row_gets_the_one_before_in_any_runs(target: str, width: int) -> None:
    arrays = Arrays()
    made, expected = graph(arrays, width, drafts=False)
    for counts in ((LENGTH,), (1,), (7, 1, 20, 2), (LOG, LOG + 1)):
        assert np.array_equal(rows(target, made, arrays, counts), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_that_drafts_reads_first_and_keeps_its_own_result(target: str) -> None:
    arrays = Arrays()
    made, expected = graph(arrays, 20, drafts=True)
    assert np.array_equal(rows(target, made, arrays, (1,)), expected)
