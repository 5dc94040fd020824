"""The gated convolution: the reference against its formula, kernels against the reference, rows in every order."""

from __future__ import annotations

import numpy as np
import pytest
from cases import HERE, Arrays

from edgeq.targets import load
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.graph import CacheSpec, Embed, Graph, Select
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.state_operations import ShortConv
from edgeq.targets.states import LOG, StateSpec
from edgeq.targets.target import Options

LENGTH = 150


def graph(arrays: Arrays, width: int, taps: int) -> tuple[Graph, np.ndarray]:
    """Row r of the result is the convolution at token r; and what it has to be, float64 [LENGTH, width]."""
    rng = np.random.default_rng(width + taps)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((LENGTH, 3 * width), (width, taps)))
    conv = ShortConv(0, "x", width, arrays.add(weight, "f32"), "y", 0)
    operations = Embed(-1, arrays.add(x, "f32"), "x"), conv, Select(-1, ("y",))
    made = Graph({"x": 3 * width, "y": width}, operations, "y", (CacheSpec(1, 2, 2),), (StateSpec("tail", (taps - 1, width)),))
    b, c, u = np.split(x.astype(np.float64), 3, axis=1)
    before = np.concatenate([np.zeros((taps - 1, width)), b * u])
    return made, c * sum(weight[:, j] * before[j : j + LENGTH] for j in range(taps))


def results(target: str, made: Graph, arrays: Arrays, counts: tuple[int, ...], isa: str | None = None) -> np.ndarray:
    """Two sessions that read the same tokens in runs of `counts`, rows shuffled; of each result both are equal."""
    options = Options("a16", threads=2 if target == "cpu" else 0, isa=isa, max_rows=2 * LENGTH, max_logits=2 * LENGTH)
    program = load(target).compile(made, arrays, options)  # type: ignore[arg-type]
    assert isinstance(program, HoldsStates) and program.snapshot_pages
    pages = [program.new_page().with_snapshot(program.new_snapshot()) for _ in range(3)]
    states, found, at, turn = [program.new_state(), program.new_state()], [], 0, 0
    while at < LENGTH:
        count = min(counts[turn % len(counts)], LENGTH - at)
        order = np.random.default_rng(at).permutation(2 * count)
        slots = np.tile(np.arange(at, at + count, dtype=np.int32), 2)[order]
        sessions = np.repeat(np.arange(2, dtype=np.int32), count)[order]
        rows = Rows(slots, slots[None], slots, sessions, [pages, pages], np.argsort(order).astype(np.int32), states=states)
        first, second = np.split(program.run(rows).copy(), 2)
        assert np.array_equal(first, second, equal_nan=True)
        found.append(first)
        at, turn = at + count, turn + 1
        if at // PAGE > (at - count) // PAGE:
            # From here on from the snapshot.
            end = at // PAGE * PAGE
            states = [program.start_from(pages[end // PAGE - 1].snapshot, end) for _ in states]  # type: ignore[arg-type]
            found[-1] = found[-1][: len(found[-1]) - (at - end)]
            at = end
    return np.concatenate(found)


@pytest.mark.parametrize("width", [5, 16, 40])
@pytest.mark.parametrize("taps", [2, 3, 7, 20])
def test_the_reference_computes_its_formula(width: int, taps: int) -> None:
    arrays = Arrays()
    made, expected = graph(arrays, width, taps)
    found = results("reference", made, arrays, (LENGTH,))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.array_equal(found, results("reference", made, arrays, (1,)))


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize(("width", "taps"), [(5, 2), (16, 3), (40, 3), (33, 7), (64, 20)])
def test_the_kernel_computes_what_the_reference_does(isa: str, width: int, taps: int) -> None:
    arrays = Arrays()
    made, expected = graph(arrays, width, taps)
    whole = results("cpu", made, arrays, (LENGTH,), isa)
    assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()
    for counts in ((1,), (7, 1, 20, 2), (LOG, LOG + 1)):
        assert np.array_equal(results("cpu", made, arrays, counts, isa), whole)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_what_is_not_a_number_stays_in_its_session_and_channel(target: str) -> None:
    arrays = Arrays()
    made, _ = graph(arrays, 24, 3)
    table = arrays.array(made.operations[0].table)  # type: ignore[attr-defined]
    clean = results(target, made, arrays, (LENGTH,))
    table[40, 3] = np.nan
    found = results(target, made, arrays, (LENGTH,))
    assert np.isnan(found[40:43, 3]).all() and np.isnan(found).sum() == 3
    found[40:43, 3] = clean[40:43, 3]
    assert np.array_equal(found, clean)
