"""The matrix unit of processors that have one: products by bits, attention within what bf16 rounds, runs cut into pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.codec import Codec
from edgeq.records import Activation, LinearSpec
from edgeq.targets import load
from edgeq.targets.cpu import program as cpu_program
from edgeq.targets.cpu.jit.pieces import split
from edgeq.targets.graph import Activate, Attention, CacheWrite, Embed, Graph, Linear, RmsNorm, Select
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import HERE, Arrays, matrix, product, rows_of, run, weight

AMX, VNNI = "avx512-amx", "avx512-vnni"
with_unit = pytest.mark.skipif(AMX not in HERE, reason="this processor has no matrix unit, or its system keeps it")

EXHAUSTIVE = [Codec("int", bits, 128, bits % 2 == 0) for bits in (2, 3, 5, 6, 7)]
CODECS = [
    Codec("int", 8, 128, False),
    Codec("int", 4, 64),
    *(
        pytest.param(codec, marks=pytest.mark.exhaustive)
        for codec in (Codec("int", 8, 0), Codec("int", 4, 0, False), *EXHAUSTIVE)
    ),
]


@with_unit
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_products_are_those_of_the_other_instruction_sets_by_bits(codec: Codec) -> None:
    rng = np.random.default_rng(codec.bits)
    for rows, columns in ((48, 128), (100, 320), (33, 1176)):
        arrays = Arrays()
        graph = product(
            arrays, rng.standard_normal((70, columns)).astype(np.float32), weight(arrays, rng, codec, rows, columns),
            rng.standard_normal(rows).astype(np.float32),
        )  # fmt: skip
        for count in (3, 15, 16, 17, 33, 70):
            found, expected = (run("cpu", graph, arrays, count, Options("a8", 2, isa)) for isa in (AMX, VNNI))
            assert np.array_equal(found, expected), (rows, columns, count)


GATED = [
    (Codec("int", 4, 64), None, 128),
    (Codec("int", 8, 0), (0.03,), 144),
    *(pytest.param(Codec("int", bits, 0), (0.03, 0.5), 352, marks=pytest.mark.exhaustive) for bits in (4, 8)),
]


@with_unit
@pytest.mark.parametrize(("codec", "scales", "columns"), GATED, ids=str)
def test_gate_and_up_are_those_of_the_other_instruction_sets_by_bits(
    codec: Codec, scales: tuple[float, ...] | None, columns: int
) -> None:
    rng, arrays, width = np.random.default_rng(1), Arrays(), 208
    x = rng.standard_normal((70, columns)).astype(np.float32)
    gate, down = (weight(arrays, rng, codec, *shape) for shape in ((2 * width, columns), (24, width)))
    of_layer = {} if scales is None else {"activation": Activation(8, scales=arrays.add(np.array(scales, np.float32), "f32"))}
    operations = (
        Embed(-1, arrays.add(x, "f32"), "x"),
        RmsNorm(0, "x", arrays.add(np.ones(columns, np.float32), "f32"), 1e-5, "n"),
        Linear(0, "n", LinearSpec("gate_up", (gate,), **of_layer), "g"),
        Activate(0, "g", width, "i"),
        Linear(0, "i", LinearSpec("down", (down,), **of_layer), "y"),
        Select(-1, ("y",)),
    )
    graph = Graph({"x": columns, "n": columns, "g": 2 * width, "i": width, "y": 24}, operations, "y", 1, 1, 2)
    for count in (15, 33, 70):
        found, expected = (run("cpu", graph, arrays, count, Options("a8", 2, isa)) for isa in (AMX, VNNI))
        assert np.array_equal(found, expected), count
    program, times = load("cpu").compile(graph, arrays, Options("a8", 2, AMX, max_rows=70, max_logits=70)), []
    program.run(rows_of(program, 70), times=times)
    assert "gated_matrix_matmul" in [step.kernel for step in times[0].steps]


@with_unit
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_rows_with_one_scale_are_those_of_the_other_instruction_sets_by_bits(bits: int) -> None:
    """Odd numbers of chunks, more activation blocks than lanes, and 8960 products of the largest integers."""
    rng = np.random.default_rng(bits)
    for rows, columns, values in ((40, 1176, "random"), (33, 2400, "random"), (16, 8960, "most")):
        arrays = Arrays()
        x = rng.standard_normal((40, columns)).astype(np.float32) if values == "random" else np.ones((40, columns), np.float32)
        w, bias = (
            weight(arrays, rng, Codec("int", bits, 0), rows, columns, values),
            arrays.add(np.ones(rows, np.float32), "f32"),
        )
        layer = LinearSpec("layer", (w,), bias, activation=Activation(8))
        operations = (Embed(-1, arrays.add(x, "f32"), "x"), Select(-1, ("x",)), Linear(-1, "x", layer, "y"))
        graph = Graph({"x": columns, "y": rows}, operations, "y", 1, 1, 2)
        wanted = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64) + 1
        for count in (1, 15, 40):
            found, expected = (run("cpu", graph, arrays, count, Options("a8", 2, isa)) for isa in (AMX, VNNI))
            assert np.array_equal(found, expected), (rows, columns, count)
            assert np.abs(found - wanted[:count]).max() < 0.02 * np.abs(wanted).max()


def attention_case(dim: int, count: int, sessions: int, damaged: dict[tuple[int, int], float] | None = None):
    """Two frames of unequal length, seen whole (kind 0), and windows of 16 slots (kind 1), dealt out to `sessions` sessions."""
    arrays, heads, total = Arrays(), 2, count * sessions
    x = np.random.default_rng(dim).standard_normal((total, 3 * heads * dim)).astype(np.float32)
    for place, value in (damaged or {}).items():
        x[place] = value
    slots = np.arange(total, dtype=np.int32) // sessions
    first = count * 3 // 7
    frames = np.where(slots < first, [[0], [first]], [[first], [count]])
    windows = np.stack([slots // 16 * 16, np.minimum(slots // 16 * 16 + 16, count)])
    spans = np.stack([frames, windows]).astype(np.int32)

    def result(span: int, target: str, isa: str | None, order: np.ndarray | None = None) -> np.ndarray:
        operations = (
            Embed(-1, arrays.add(x, "f32"), "x"),
            CacheWrite(0, "x", heads * dim, 2 * heads * dim, heads, dim, cache=0),
            Attention(0, "x", 0, "a", heads, heads, dim, dim**-0.5, 0, cache=0, span=span),
        )
        graph = Graph({"x": 3 * heads * dim, "a": heads * dim}, operations, "a", 1, heads, dim)
        program = load(target).compile(graph, arrays, Options("a8", 2, isa, max_rows=total, max_logits=total))
        pages = [[program.new_page() for _ in range(count // PAGE + 1)] for _ in range(sessions)]
        order = np.arange(total, dtype=np.int32) if order is None else order
        rows = Rows(
            order, slots[None][:, order], slots[order], order % sessions, pages, np.arange(total, dtype=np.int32),
            spans=spans[:, :, order],
        )  # fmt: skip
        return program.run(rows).copy()

    return result, spans


ATTENTION = [(80, 600, 1), (20, 90, 2)]
MORE_ATTENTION = [(64, 150, 1), (72, 290, 1), (16, 33, 3), (128, 257, 1), (81, 100, 1), (8, 1, 1)]


@with_unit
@pytest.mark.parametrize(
    ("dim", "count", "sessions"),
    [*ATTENTION, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE_ATTENTION)],
)
def test_attention_is_that_of_the_reference_but_for_what_bf16_rounds(dim: int, count: int, sessions: int) -> None:
    """bf16 keeps 8 bits: scores of about 1 are within 2^-7, and weights and values within 2^-8 of themselves."""
    result, _ = attention_case(dim, count, sessions)
    for span in (0, 1):
        expected, found = result(span, "reference", None), result(span, "cpu", AMX)
        assert np.abs(found - expected).max() < 0.02
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.004 * np.sqrt(np.mean(expected**2)) * (1 + dim / 40)
        order = np.random.default_rng(0).permutation(count * sessions).astype(np.int32)
        assert np.array_equal(result(span, "cpu", AMX, order), found[order])


@with_unit
@pytest.mark.parametrize("place", [0, 2 * 80 + 5, 4 * 80 + 79], ids=["query", "key", "value"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_attention_brings_what_is_not_finite_to_the_rows_that_see_it(place: int, value: float) -> None:
    row = 41
    result, spans = attention_case(80, 150, 1, {(row, place): value})
    sees = (spans[1, 0] <= row) & (row < spans[1, 1])
    found = result(1, "cpu", AMX)
    finite = np.isfinite(found).all(axis=1)
    assert np.array_equal(finite, np.arange(150) != row if place < 2 * 80 else ~sees)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_operation_that_is_cut_gives_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, arrays, count = np.random.default_rng(3), Arrays(), 90
    x = rng.standard_normal((count, 128)).astype(np.float32)
    graph = product(arrays, x, weight(arrays, rng, Codec("int", 8, 128, False), 100, 128))
    program = load("cpu").compile(graph, arrays, Options("a8", threads, max_rows=count, max_logits=count))
    slots = np.arange(count, dtype=np.int32)
    pages = [[program.new_page() for _ in range(2)]]
    rows = Rows(slots, slots[None], slots, np.zeros(count, np.int32), pages, slots)
    whole = program.run(rows).copy()
    seen = replace(rows, spans=np.stack([slots * 0, slots * 0 + count])[None])
    monkeypatch.setattr(cpu_program, "MOST_PRODUCTS", 2 * 100 * 128 * count / 7)
    times: list = []
    assert np.array_equal(program.run(seen), whole) and np.array_equal(program.run(seen, times=times), whole)
    assert times[0].seconds.shape == (len(times[0].steps), 2)


def test_pieces_are_all_of_a_table_and_all_parts_of_what_is_cut() -> None:
    table = np.arange(50, dtype=np.int64).reshape(10, 5)
    for pieces in (1, 3, 10, 99):
        assert np.array_equal(np.concatenate([piece.table for piece in split(table, pieces, None)]), table)
        found = split(table, pieces, np.array([1, 1, 3, 0, 1, 2, 1, 1, 1, 1]))
        assert [piece.start for piece in found if piece.last] == [2, 2, 2, 5, 5]
        for start in (2, 5):
            cut = [piece for piece in found if piece.start == start]
            assert cut[0].first == 0 and cut[-1].last == cut[0].table[0, -1] >= table[start, -1]
            assert all(before.last == after.first for before, after in zip(cut, cut[1:], strict=False))
        whole = np.concatenate([piece.table for piece in found if not piece.last])
        assert np.array_equal(whole, np.delete(table, [2, 5], axis=0))
