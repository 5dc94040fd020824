"""What a row can be beside a token: a vector, several positions, a visible range of its own, one of several that become one."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.format.records import KvCodec
from edgeq.targets import load
from edgeq.targets.graph import (
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Graph,
    InjectVectors,
    Operation,
    RopeRotate,
    Scale,
    Select,
)
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import HERE, Arrays, case

VOCABULARY = 7


def graph_of(arrays: Arrays, width: int, operations: list[Operation], result: str, buffers: dict[str, int], dim: int) -> Graph:
    """`operations` after an embedding of `width` channels in buffer "x"."""
    table = arrays.add(np.random.default_rng(width).standard_normal((VOCABULARY, width)).astype(np.float32), "f32")
    return Graph({"x": width, **buffers}, (Embed(-1, table, "x"), *operations), result, (CacheSpec(2, dim, dim),))


def rows_of(program, count: int, sessions: int = 1, **fields: object) -> Rows:
    """Rows dealt out to `sessions` sessions; slots ascend in each."""
    session = np.arange(count, dtype=np.int32) % sessions
    slots = np.arange(count, dtype=np.int32) // sessions
    pages = [[program.new_page() for _ in range(count // PAGE + 1)] for _ in range(sessions)]
    given = {"positions": slots[None], "wanted": np.arange(count, dtype=np.int32)} | fields
    return Rows(np.arange(count, dtype=np.int32) % VOCABULARY, slots=slots, sessions=session, pages=pages, **given)


def both(
    graph: Graph,
    arrays: Arrays,
    count: int,
    isa: str | None = None,
    kv: KvCodec = KvCodec(),  # noqa: B008
    sessions: int = 1,
    **fields: object,
) -> list[np.ndarray]:
    """The result of the reference and of the cpu target."""
    found = []
    for target in ("reference", "cpu"):
        options = Options("a16", max_rows=count, max_logits=count, kv=kv, isa=isa if target == "cpu" else None)
        program = load(target).compile(graph, arrays, options)
        found.append(program.run(rows_of(program, count, sessions, **fields)).copy())
    return found


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("width", "offset"), [(16, 0), (20, 3), (5, 1), (64, 64)])
def test_a_row_takes_the_vector_that_it_brings(width: int, offset: int, add: bool) -> None:
    rng, arrays, count = np.random.default_rng(width), Arrays(), 9
    vectors = rng.standard_normal((4, width + offset + 2)).astype(np.float32)
    vector_of = np.array([-1, 2, 0, -1, 3, 3, -1, 1, -1], np.int32)
    graph = graph_of(arrays, width, [InjectVectors(0, "x", offset, add)], "x", {}, 2)
    expected, found = both(graph, arrays, count, vectors=vectors, vector_of=vector_of)
    assert np.array_equal(found, expected)
    plain, _ = both(graph, arrays, count)
    brought = vectors[vector_of[1], offset : offset + width]
    assert np.array_equal(expected[1], plain[1] + brought if add else brought)
    assert np.array_equal(expected[vector_of < 0], plain[vector_of < 0])


def test_vectors_are_taken_after_a_selection_too() -> None:
    arrays, count = Arrays(), 6
    vectors = np.random.default_rng(1).standard_normal((2, 24)).astype(np.float32)
    graph = graph_of(arrays, 24, [Select(0, ("x",)), InjectVectors(0, "x")], "x", {}, 2)
    vector_of, wanted = np.array([0, -1, -1, 1, -1, -1], np.int32), np.array([3, 5], np.int32)
    expected, found = both(graph, arrays, count, vectors=vectors, vector_of=vector_of, wanted=wanted)
    assert np.array_equal(found, expected) and np.array_equal(expected[0], vectors[1])


@pytest.mark.parametrize(("width", "together"), [(16, 1), (20, 2), (7, 3), (48, 4)])
def test_selected_rows_lie_side_by_side_in_the_order_that_is_wanted(width: int, together: int) -> None:
    arrays, count = Arrays(), 12
    wanted = np.random.default_rng(together).permutation(count).astype(np.int32)[: 12 // together * together]
    select = Select(0, ("x",), ("joined",), together)
    graph = graph_of(arrays, width, [select, Scale(0, "joined", 2.0, "joined")], "joined", {"joined": together * width}, 2)
    expected, found = both(graph, arrays, count, wanted=wanted)
    assert np.array_equal(found, expected) and len(expected) == 12 // together
    plain, _ = both(graph_of(arrays, width, [], "x", {}, 2), arrays, count)
    assert np.array_equal(expected, 2 * plain[wanted].reshape(len(expected), -1))


def test_more_wanted_rows_than_the_program_was_compiled_for_are_refused() -> None:
    arrays = Arrays()
    graph = graph_of(arrays, 8, [Select(0, ("x",), ("joined",), 2)], "joined", {"joined": 16}, 2)
    for target in ("reference", "cpu"):
        program = load(target).compile(graph, arrays, Options("a16", max_rows=8, max_logits=2))
        assert program.run(rows_of(program, 8, wanted=np.arange(4, dtype=np.int32))).shape == (2, 16)
        with pytest.raises(ValueError, match="compiled for 8"):
            program.run(rows_of(program, 8, wanted=np.arange(6, dtype=np.int32)))


def test_each_pair_turns_by_the_position_that_its_axis_names() -> None:
    rng, arrays, count, dim = np.random.default_rng(3), Arrays(), 11, 16
    positions = rng.integers(0, 90, (3, count)).astype(np.int32)
    axes, frequencies = (0, 0, 1, 2, 2, 1, 0, 2), tuple(50.0 ** (-i / 8) for i in range(8))
    operations: list[Operation] = [
        RopeRotate(0, "x", 0, 2, dim, frequencies, 1.0, axes),
        RopeRotate(0, "x", 32, 2, dim, frequencies, 1.0, axes),
        CacheWrite(0, "x", 32, 64, 2, dim, cache=0),
    ]
    graph = graph_of(arrays, 96, operations, "x", {}, dim)
    expected, found = both(graph, arrays, count, positions=positions)
    assert np.abs(found - expected).max() < 1e-5
    plain, _ = both(graph_of(arrays, 96, [], "x", {}, dim), arrays, count)
    head = plain[:, :8] + 1j * plain[:, 8:16]
    turned = head * np.exp(1j * positions[list(axes)].T * np.array(frequencies))
    assert np.abs(expected[:, :8] - turned.real).max() < 1e-5 and np.abs(expected[:, 8:16] - turned.imag).max() < 1e-5
    one, _ = both(graph, arrays, count, positions=np.repeat(positions[:1], 3, 0))
    assert np.abs(one - expected).max() > 0.1


def attending(arrays: Arrays, span: int, dim: int, heads: int = 4) -> Graph:
    operations: list[Operation] = [
        CacheWrite(0, "x", heads * dim, (heads + 2) * dim, 2, dim, cache=0),
        Attention(0, "x", 0, "a", heads, 2, dim, dim**-0.5, 0, cache=0, span=span),
    ]
    return graph_of(arrays, (heads + 4) * dim, operations, "a", {"a": heads * dim}, dim)


@pytest.mark.parametrize(
    ("dim", "sessions", "isa", "kv"),
    [
        case(*run, kv, common=run[2] is None and i == j != 1, id="-".join(map(str, (*run, kv.name))))
        for i, run in enumerate([(16, 1, None), (20, 2, None), (80, 1, None), (16, 3, HERE[-1])])
        for j, kv in enumerate([KvCodec(), KvCodec("int8"), KvCodec("int4", 4)])
    ],
)
def test_a_row_sees_the_slots_of_its_range(dim: int, sessions: int, isa: str | None, kv: KvCodec) -> None:
    """Two frames of unequal length seen whole, and windows of their own: the two kinds of a vision tower's layers."""
    arrays, count = Arrays(), 150 * sessions
    slots = np.arange(count) // sessions
    frames = np.where(slots < 70, [[0], [70]], [[70], [150]])
    windows = np.stack([slots // 16 * 16, np.minimum(slots // 16 * 16 + 16, 150)])
    spans = np.stack([frames, windows]).astype(np.int32)
    for span in (0, 1):
        expected, found = both(attending(arrays, span, dim), arrays, count, isa, kv, spans=spans, sessions=sessions)
        assert np.abs(found - expected).max() < (2e-3 if kv.kind == "f16" else 0.1)
    causal, _ = both(attending(arrays, -1, dim), arrays, count, None, kv, sessions=sessions)
    assert np.abs(causal - expected).max() > 0.1


def test_ranges_that_end_at_each_row_are_causal_attention_by_bits() -> None:
    arrays, count, dim = Arrays(), 140, 32
    ends = np.arange(1, count + 1)
    spans = np.stack([np.zeros(count), ends])[None].astype(np.int32)
    for target in (0, 1):
        given = both(attending(arrays, 0, dim), arrays, count, spans=spans)[target]
        assert np.array_equal(given, both(attending(arrays, -1, dim), arrays, count)[target])


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_the_order_of_rows_in_a_run_changes_no_bit(target: str) -> None:
    arrays, count, dim = Arrays(), 90, 16
    graph = attending(arrays, 0, dim)
    spans = np.stack([np.zeros(count), np.full(count, count)])[None].astype(np.int32)
    program = load(target).compile(graph, arrays, Options("a16", max_rows=count, max_logits=count))
    rows = rows_of(program, count, spans=spans)
    plain = program.run(rows).copy()
    order = np.random.default_rng(2).permutation(count)
    other = rows_of(program, count)
    shuffled = Rows(
        rows.tokens[order], rows.positions[:, order], rows.slots[order], rows.sessions[order], other.pages,
        np.arange(count, dtype=np.int32), spans=spans[:, :, order],
    )  # fmt: skip
    assert np.array_equal(program.run(shuffled), plain[order])
