"""The scan of a state space: the reference against the step form, the kernel against the reference, in every order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.targets.family_operations import SsdScan, ssd_state
from edgeq.targets.graph import CacheSpec, Embed, Graph, Select
from tests.targets.cases import ISAS, Arrays
from tests.targets.states.state_cases import LENGTH, LONG, MEMORIES, check_computed, check_long, check_tiles, results

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    limits: tuple[float, float] = (0.0, math.inf)


SIZES = [
    Sizes(1, 1, 1, 1),
    Sizes(6, 20, 2, 24),
    Sizes(8, 48, 1, 16, (0.02, 0.6)),
    Sizes(5, 64, 1, 128),
    Sizes(4, 33, 4, 65, (0.1, 1e9)),
]


def step_form(numbers: dict[str, NDArray[np.float32]], s: Sizes) -> Array:
    """The textbook's recurrence: S is read and written for every row.  -> [rows, heads * head_dim]"""
    x, dt, decay_log, dt_bias, skip = (numbers[name].astype(np.float64) for name in NAMES)
    inner, width = s.heads * s.head_dim, s.groups * s.state_dim
    u = x[:, :inner].reshape(-1, s.heads, s.head_dim)
    b, c = (x[:, at : at + width].reshape(-1, s.groups, s.state_dim) for at in (inner, inner + width))
    b, c = (np.repeat(each, s.heads // s.groups, axis=1) for each in (b, c))
    step = np.clip(np.logaddexp(0, dt + dt_bias), *s.limits)
    state, out = np.zeros((s.heads, s.state_dim, s.head_dim)), []
    for t in range(len(x)):
        state = state * np.exp(-np.exp(decay_log) * step[t])[:, None, None]
        state = state + b[t][:, :, None] * (step[t][:, None] * u[t])[:, None]
        out.append((np.einsum("hnp,hn->hp", state, c[t]) + skip[:, None] * u[t]).ravel())
    return np.stack(out)


NAMES = ("x", "dt", "decay_log", "dt_bias", "skip")


def inputs(s: Sizes, length: int = LENGTH) -> dict[str, NDArray[np.float32]]:
    """Memories reach from one row to thousands, and now and then a head forgets everything."""
    rng = np.random.default_rng(s.state_dim)
    x = rng.standard_normal((length, s.heads * s.head_dim + 2 * s.groups * s.state_dim))
    dt = 2 * rng.standard_normal((length, s.heads))
    forgets = rng.random(dt.shape) < 0.03
    dt[forgets] = rng.choice([50.0, 900.0], forgets.sum())
    arrays = {
        "x": x,
        "dt": dt,
        "decay_log": np.linspace(-8, 1, s.heads),
        "dt_bias": rng.standard_normal(s.heads) - 2,
        "skip": rng.standard_normal(s.heads),
    }
    return {name: each.astype(np.float32) for name, each in arrays.items()}


def graph(arrays: Arrays, s: Sizes, numbers: dict[str, NDArray[np.float32]]) -> Graph:
    """Row r of the result is the scan's at token r."""
    refs = {name: arrays.add(each, "f32") for name, each in numbers.items()}
    scan = SsdScan(
        0, "x", "dt", s.heads, s.head_dim, s.groups, s.state_dim,
        refs["decay_log"], refs["dt_bias"], refs["skip"], s.limits, "y", 0,
    )  # fmt: skip
    operations = Embed(-1, refs["x"], "x"), Embed(-1, refs["dt"], "dt"), scan, Select(-1, ("y",))
    widths = {"x": numbers["x"].shape[1], "dt": s.heads, "y": s.heads * s.head_dim}
    return Graph(widths, operations, "y", (CacheSpec(1, 2, 2),), (ssd_state(s.heads, s.head_dim, s.groups, s.state_dim),))


@pytest.mark.parametrize("sizes", SIZES[1:4], ids=str)
def test_the_reference_computes_the_step_form(sizes: Sizes) -> None:
    arrays, numbers = Arrays(), inputs(sizes)
    check_computed("reference", graph(arrays, sizes, numbers), arrays, step_form(numbers, sizes), cuts=((7, 1, 20, 2),))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_computes_the_step_form(isa: str, sizes: Sizes) -> None:
    arrays, numbers = Arrays(), inputs(sizes)
    check_computed("cpu", graph(arrays, sizes, numbers), arrays, step_form(numbers, sizes), isa)


def test_rows_and_columns_of_the_kernels_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(8, 100, 2, 40)
    numbers = inputs(sizes)
    check_tiles(monkeypatch, lambda arrays: graph(arrays, sizes, numbers), step_form(numbers, sizes))


@pytest.mark.parametrize(("target", "rows"), LONG)
def test_long_memories_keep_their_digits(target: str, rows: int) -> None:
    sizes = Sizes(3, 16, 1, 16)
    arrays, numbers = Arrays(), inputs(sizes, rows)
    numbers["dt"] = np.clip(numbers["dt"], -1, 1)
    numbers |= {"decay_log": -np.log(np.log(2) * MEMORIES).astype(np.float32), "dt_bias": np.zeros(3, np.float32)}
    # Thousands of products that are alike by chance alone add up to a state; a delta rule corrects what it has.
    check_long(target, graph(arrays, sizes, numbers), arrays, step_form(numbers, sizes), within=2e-6)


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.01, 0.5)])
def test_what_is_not_a_number_stays_in_its_heads(target: str, limits: tuple[float, float]) -> None:
    """An input and a step in their head from their row on; B in the heads of its group, C in them and in its row alone."""
    sizes = Sizes(4, 16, 2, 8, limits)
    for name, place, heads in (("x", 17, [1]), ("x", 64 + 9, [2, 3]), ("x", 80 + 1, [0, 1]), ("dt", 3, [3])):
        arrays, numbers = Arrays(), inputs(sizes)
        made = graph(arrays, sizes, numbers)
        clean = results(target, made, arrays, (LENGTH,)).reshape(LENGTH, 4, 16)
        ref = made.operations[0 if name == "x" else 1].table  # type: ignore[attr-defined]
        arrays.array(ref)[40, place] = np.nan
        found = results(target, made, arrays, (LENGTH,)).reshape(LENGTH, 4, 16)
        others = [head for head in range(4) if head not in heads]
        assert np.array_equal(found[:, others], clean[:, others]) and np.array_equal(found[:40], clean[:40])
        last = 41 if place >= 80 else LENGTH
        assert np.isnan(found[40:last, heads]).any(axis=2).all() and np.array_equal(found[last:], clean[last:])


def test_a_state_of_zeros_leaves_what_is_skipped() -> None:
    """Steps of which the upper limit leaves nothing to the states."""
    sizes = Sizes(2, 16, 1, 16, (0.0, 1e-30))
    numbers = inputs(sizes)
    wanted = numbers["x"][:, :32].reshape(LENGTH, 2, 16) * numbers["skip"][:, None]
    for target in ("reference", "cpu"):
        arrays = Arrays()
        assert np.array_equal(results(target, graph(arrays, sizes, numbers), arrays, (LENGTH,)), wanted.reshape(LENGTH, -1))
