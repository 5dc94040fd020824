"""Attention whose context is taken in parts, side by side and one after the other, on the emulated device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgeq.format.records import KvCodec
from edgeq.targets.cuda.lowering import attention
from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.run.graphs import ROW_CLASSES
from edgeq.targets.graph import Attention, CacheSpec, CacheWrite, Embed, Graph, Linear, Select
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Program
from tests.cuda.comparing import program_of
from tests.cuda.emulated import BACKWARD, FORWARD, SHUFFLED
from tests.targets.cases import Arrays, recording
from tests.targets.test_cache import identity

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

HEADS, KV_HEADS, HEAD = 6, 2, 20
SEEN = (1, 63, 64, 65, 511, 512, 513, 2000)
"""Positions that rows of two sessions in turn see: one part or several, and ends of parts and of pages."""
FILLED = 2000
TOKENS = np.random.default_rng(1).integers(0, 128, (2, FILLED)).astype(np.int32)


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


def filled(program: Program, session: int, length: int) -> list[object]:
    """The pages of a session after `length` of its tokens."""
    pages = [program.new_page() for _ in range(-(-length // PAGE))]
    for first in range(0, length, 256):
        places = np.arange(first, min(length, first + 256), dtype=np.int32)
        program.run(Rows(TOKENS[session, places], places[None], places, places * 0, [pages], places[:0]))
    return pages  # type: ignore[return-value]


def run(program: Program, pages: Sequence[list[object]], which: Sequence[int]) -> np.ndarray:
    """Rows that see so many positions of their session, each as the next token of it: what it writes is there already."""
    slots = np.array([SEEN[i] - 1 for i in which], np.int32)
    every, sessions = np.arange(len(which), dtype=np.int32), np.array(which) % 2
    held = [pages[of][: slot // PAGE + 1] for of, slot in zip(sessions, slots, strict=True)]
    rows = Rows(TOKENS[sessions, slots], slots[None], slots, every, held, every)  # type: ignore[arg-type]
    with recording(program):
        return program.run(rows).copy()


@pytest.mark.parametrize(
    ("kv", "window", "order"),
    [
        (KvCodec(), 0, FORWARD),
        (KvCodec(), 1100, BACKWARD),
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
    pages, theirs = (
        [filled(each, session, length) for session, length in enumerate((SEEN[-2], FILLED))] for each in (program, reference)
    )
    every = range(len(SEEN))
    together = run(program, pages, every)
    for i in every:
        assert np.array_equal(run(program, pages, [i])[0], together[i]), SEEN[i]
    level = attention.level_of(window)
    for taken in (1, 3, 0):
        parts = attention.part_of(FILLED // PAGE, level) + 1 if taken else 0
        with monkeypatch.context() as patched:
            patched.setattr("edgeq.targets.cuda.run.kernels.side_by_side", lambda *_, of=(parts, taken or 1): of)
            assert np.array_equal(run(program, pages, every), together), taken
    # What has arrived is counted from zero again.
    assert np.array_equal(run(program, pages, [4, 3, 0]), together[[4, 3, 0]])
    wanted = run(reference, theirs, every)
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


def test_parts_are_as_many_as_the_gpu_has_places_for_and_a_row_sees_no_more_of_them() -> None:
    few, many = 8, 500
    assert attention.side_by_side(1, 1, few, 32) == (8, 1), "a page for each block of threads"
    assert attention.side_by_side(16, 1, few, 64) == (8, 4), "four blocks for each place"
    assert attention.side_by_side(64, 1, few, 64) == (0, 1), "each row has a place"
    assert attention.side_by_side(1, 0, few, 64) == attention.side_by_side(65, 1, few, many) == (0, 1)
    assert attention.side_by_side(4, 16, few, 64) == (28, 1), "large parts are not taken together"
    assert attention.side_by_side(64, 16, few, many) == (0, 1), "no room for their sums"
    for window in (1, 65, 512, 1100, 5000):
        level = attention.level_of(window)
        for reach in (1, 2, 8, 16):
            parts, _ = attention.side_by_side(1, reach, few, many, window)
            for last in range(1, reach * PART + 1, 61):
                first, end = (attention.part_of(slot // PAGE, level) for slot in (max(0, last - window), last - 1))
                assert end - first < parts, (window, last)
