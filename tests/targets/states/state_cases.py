"""Runs of a small graph with states: two sessions, rows shuffled, from snapshots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgeq.targets import load
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.cpu import lowering
from edgeq.targets.graph import Graph
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.states import LOG
from edgeq.targets.target import Options, Program
from tests.targets.cases import Arrays

LENGTH = 150


def results(target: str, made: Graph, arrays: Arrays, counts: tuple[int, ...], isa: str | None = None) -> np.ndarray:
    """What `read` gives of a program of a target."""
    options = Options("a16", threads=2 if target == "cpu" else 0, isa=isa, max_rows=2 * LENGTH, max_logits=2 * LENGTH)
    return read(load(target).compile(made, arrays, options), counts)  # type: ignore[arg-type]


def read(program: Program, counts: tuple[int, ...]) -> np.ndarray:
    """Two sessions that read the same tokens in runs of `counts`, rows shuffled; of each result both are equal."""
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


MEMORIES = np.array([1, 70, 5000])
"""Rows after which heads have kept 1 / e of what they saw."""
CHUNK = 256


def long_text(target: str, made: Graph, arrays: Arrays, rows: int) -> np.ndarray:
    """The results of a text of so many rows, in chunks."""
    options = Options("a16", threads=1 if target == "cpu" else 0, max_rows=CHUNK, max_logits=CHUNK)
    program = load(target).compile(made, arrays, options)  # type: ignore[arg-type]
    assert isinstance(program, HoldsStates)
    pages = [program.new_page().with_snapshot(program.new_snapshot()) for _ in range(-(-rows // PAGE))]
    states, found = [program.new_state()], []
    for slots in np.split(np.arange(rows, dtype=np.int32), range(CHUNK, rows, CHUNK)):
        wanted = np.arange(len(slots), dtype=np.int32)
        run = Rows(slots, slots[None], slots, np.zeros_like(slots), [pages], wanted, states=states)
        found.append(program.run(run).copy())
    return np.concatenate(found)


def check_long(target: str, made: Graph, arrays: Arrays, wanted: np.ndarray, within: float) -> None:
    """Rows of a long text, of each head of MEMORIES, are those of the step form (root mean square), the last as the first."""
    heads = len(wanted), len(MEMORIES), -1
    found, wanted = long_text(target, made, arrays, len(wanted)).reshape(heads), wanted.reshape(heads)
    for rows in (slice(1024), slice(-1024, None)):
        errors = np.square(found[rows] - wanted[rows]).mean(axis=(0, 2)) / np.square(wanted[rows]).mean(axis=(0, 2))
        assert errors.max() < within**2, np.sqrt(errors)


LONG = [
    pytest.param(target, rows, marks=() if (target, rows) == ("cpu", 4096) else pytest.mark.exhaustive)
    for target in ("reference", "cpu")
    for rows in (4096, 30_000)
]
"""Targets and rows of long texts."""

Cuts = tuple[tuple[int, ...], ...]
CUTS: Cuts = ((1,), (7, 1, 20, 2), (LOG, LOG + 1), (3, 5))
"""Lengths of the runs of a text, again and again."""


def check_computed(
    target: str,
    made: Graph,
    arrays: Arrays,
    wanted: np.ndarray,
    isa: str | None = None,
    cuts: Cuts = CUTS,
) -> None:
    """The rows of a graph are those wanted in the digits that float32 has, and the same bits however the text is cut."""
    whole = results(target, made, arrays, (LENGTH,), isa)
    assert np.abs(whole - wanted).max() < 3e-6 * np.abs(wanted).max()
    for counts in cuts:
        assert np.array_equal(results(target, made, arrays, counts, isa), whole)


def check_tiles(monkeypatch: pytest.MonkeyPatch, graph: Callable[[Arrays], Graph], wanted: np.ndarray) -> None:
    """The same for the tiles of processors with wider registers, on this one."""
    found = []
    for wide in (False, True):
        monkeypatch.setattr(lowering.states, "is_wide", lambda isa, wide=wide: wide)
        for counts in ((LENGTH,), (3, 5), (1,)):
            arrays = Arrays()
            found.append(results("cpu", graph(arrays), arrays, counts))
    assert all(np.array_equal(each, found[0]) for each in found)
    assert np.abs(found[0] - wanted).max() < 3e-6 * np.abs(wanted).max()


def plain(target: str, made: Graph, arrays: Arrays) -> np.ndarray:
    """The rows of a graph without states, of all tokens, on the reference or on an instruction set of the cpu target."""
    isa, name = (None, target) if target == "reference" else (target, "cpu")
    options = Options("a16", threads=2 if isa else 0, isa=isa, max_rows=LENGTH, max_logits=LENGTH)
    program = load(name).compile(made, arrays, options)  # type: ignore[arg-type]
    slots, pages = np.arange(LENGTH, dtype=np.int32), [program.new_page() for _ in range(3)]
    return program.run(Rows(slots, slots[None], slots, np.zeros_like(slots), [pages], slots)).copy()
