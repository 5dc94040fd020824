"""Runs of a small graph with states: two sessions, rows shuffled, from snapshots."""

from __future__ import annotations

import numpy as np

from edgeq.targets import load
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.graph import Graph
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import Arrays

LENGTH = 150


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


def plain(target: str, made: Graph, arrays: Arrays) -> np.ndarray:
    """The rows of a graph without states, of all tokens, on the reference or on an instruction set of the cpu target."""
    isa, name = (None, target) if target == "reference" else (target, "cpu")
    options = Options("a16", threads=2 if isa else 0, isa=isa, max_rows=LENGTH, max_logits=LENGTH)
    program = load(name).compile(made, arrays, options)  # type: ignore[arg-type]
    slots, pages = np.arange(LENGTH, dtype=np.int32), [program.new_page() for _ in range(3)]
    return program.run(Rows(slots, slots[None], slots, np.zeros_like(slots), [pages], slots)).copy()
