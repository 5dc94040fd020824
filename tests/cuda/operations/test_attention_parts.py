"""Attention whose context is taken in parts, side by side and one after the other, on the emulated device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgeq.format.records import KvCodec
from edgeq.targets.cuda.lowering import attention
from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.run.graphs import ROW_CLASSES
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.graph import Attention, CacheSpec, CacheWrite, Embed, Graph, Linear, Select
from edgeq.targets.rows import PAGE, Rows
from tests.cuda.comparing import program_of
from tests.cuda.emulated import BACKWARD, FORWARD, SHUFFLED
from tests.targets.cases import Arrays, recording
from tests.targets.test_cache import identity

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

HEADS, KV_HEADS, HEAD = 6, 2, 20
LENGTHS = (3, PART, PART + 1, 2 * PART + 70, 3 * PART - 1)
"""Contexts of five sessions: one part or several, and ends of them."""


def graph_of(arrays: Arrays, window: int) -> Graph:
    """Six query heads, three for each of two key/value heads, of 128 random tokens; with sinks where there is a window."""
    q, k = HEADS * HEAD, KV_HEADS * HEAD
    table = np.random.default_rng(0).standard_normal((128, q + 2 * k)).astype(np.float32)
    sinks = arrays.add(np.array([-np.inf, 9, 4, 5, 6, 7], np.float32), "f32") if window else None
    operations = (
        Embed(-1, arrays.add(table, "f32"), "x"),
        CacheWrite(0, "x", q, q + k, KV_HEADS, HEAD, 0),
        Attention(0, "x", 0, "a", HEADS, KV_HEADS, HEAD, 0.7, window, 0, sinks=sinks),
        Select(-1, ("a",)),
        Linear(-1, "a", identity(arrays, q), "y"),
    )
    return Graph({"x": q + 2 * k, "a": q, "y": q}, operations, "y", (CacheSpec(KV_HEADS, HEAD, HEAD),))


def filled(program: CudaProgram, length: int) -> list[object]:
    """The pages of a session after `length` random tokens."""
    pages = [program.new_page() for _ in range(-(-length // PAGE) + 1)]
    tokens = np.random.default_rng(length).integers(0, 128, length).astype(np.int32)
    for first in range(0, length, 256):
        places = np.arange(first, min(length, first + 256), dtype=np.int32)
        program.run(Rows(tokens[places], places[None], places, places * 0, [pages], places[:0]))
    return pages  # type: ignore[return-value]


def run(program: CudaProgram, pages: Sequence[list[object]], which: Sequence[int]) -> np.ndarray:
    """The next token of these sessions."""
    slots = np.array([LENGTHS[i] for i in which], np.int32)
    every = np.arange(len(which), dtype=np.int32)
    rows = Rows(slots % 128, slots[None], slots, every, [pages[i] for i in which], every)  # type: ignore[misc]
    with recording(program):
        return program.run(rows).copy()


@pytest.mark.parametrize(
    ("kv", "window", "order"),
    [
        (KvCodec(), 0, FORWARD),
        (KvCodec(), PART + 40, BACKWARD),
        (KvCodec("int8"), 0, SHUFFLED),
        (KvCodec("int4"), 100, FORWARD),
    ],
)
def test_parts_side_by_side_give_the_bits_of_parts_in_turn_alone_and_together(
    kv: KvCodec, window: int, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = Arrays()
    graph = graph_of(arrays, window)
    program, reference = (program_of(graph, arrays, 256, kv=kv, order=each) for each in (order, None))
    assert isinstance(program, CudaProgram)
    pages, theirs = ([filled(each, length) for length in LENGTHS] for each in (program, reference))  # type: ignore[arg-type]
    together = run(program, pages, range(5))
    for i in range(5):
        assert np.array_equal(run(program, pages, [i])[0], together[i]), LENGTHS[i]
    monkeypatch.setattr("edgeq.targets.cuda.run.kernels.SIDE_BY_SIDE", 0)
    assert np.array_equal(run(program, pages, range(5)), together)
    monkeypatch.undo()
    # What has arrived is counted from zero again.
    assert np.array_equal(run(program, pages, [4, 3, 0]), together[[4, 3, 0]])
    wanted = run(reference, theirs, range(5))  # type: ignore[arg-type]
    assert np.abs(together - wanted).max() < 3e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("kv", [KvCodec(), KvCodec("int8")], ids=lambda kv: kv.name)
def test_sessions_in_a_block_of_threads_do_not_touch_each_other(kv: KvCodec) -> None:
    """Rows of three prompts, more than have a block each; in one a value is infinite, which rows before it do not see."""
    arrays, counts, bad = Arrays(), (35, 33, 13), 20
    graph = graph_of(arrays, 0)
    arrays.array(graph.operations[0].table)[127, -1] = np.inf  # type: ignore[union-attr]
    program = program_of(graph, arrays, 128, kv=kv)
    tokens = [np.arange(count, dtype=np.int32) + 40 * i for i, count in enumerate(counts)]
    tokens[1][bad] = 127

    def read(which: Sequence[int]) -> np.ndarray:
        places = np.concatenate([np.arange(counts[i], dtype=np.int32) for i in which])
        sessions = np.repeat(np.arange(len(which), dtype=np.int32), [counts[i] for i in which])
        every = np.arange(len(places), dtype=np.int32)
        pages = [[program.new_page()] for _ in which]
        return program.run(
            Rows(np.concatenate([tokens[i] for i in which]), places[None], places, sessions, pages, every)
        ).copy()

    together, alone = read(range(3)), np.concatenate([read([i]) for i in range(3)])
    assert np.array_equal(together, alone, equal_nan=True)
    unseen = np.delete(np.arange(sum(counts)), np.arange(counts[0] + bad, counts[0] + counts[1]))
    assert np.isfinite(together[unseen]).all() and np.isnan(np.delete(together, unseen, 0)).any(axis=1).all()


def test_a_part_is_whole_pages_and_a_recording_takes_the_kernel_for_few_rows() -> None:
    assert PART % PAGE == 0 and attention.SIDE_BY_SIDE >= attention.FEW_TOKENS >= ROW_CLASSES[-1]
