"""The matrix unit of processors that have one: products by bits; runs cut into pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import Activation, LinearSpec, Mode
from edgeq.targets import load
from edgeq.targets.cpu import program as cpu_program
from edgeq.targets.cpu.threads.pieces import split
from edgeq.targets.graph import Activate, CacheSpec, Embed, Graph, Linear, RmsNorm, Select
from edgeq.targets.rows import Rows
from edgeq.targets.target import Options
from tests.targets.cases import HERE, Arrays, matrix, product, recording, rows_of, run, weight

AMX, VNNI = "avx512-amx", "avx512-vnni"
with_unit = pytest.mark.skipif(AMX not in HERE, reason="this processor has no matrix unit, or its system keeps it")

CODECS = [
    (Codec("int", 8, 128, False), "a8"),
    (Codec("int", 4, 64), "a8"),
    (Codec("int", 4, 64), "a16"),
    (Codec("offset", 4, 32), "a16"),
    (Codec("two-level", 4, 32, False), "a8"),
    (Codec("table", 4, 64), "a8"),
    (Codec("trellis", 3, 64), "a8"),
    (Codec("trellis", 3, 64), "a16"),
]
EXHAUSTIVE = [
    *((Codec("int", bits, 128, bits % 2 == 0), mode) for bits in (2, 3, 5, 6, 7) for mode in ("a8", "a16")),
    *((Codec(kind, bits, 32), mode) for kind, bits in (("int", 8), ("half", 3), ("s4", 2)) for mode in ("a8", "a16")),
    (Codec("int", 8, 0), "a8"),
    (Codec("int", 8, 0, False), "a16"),
    (Codec("int", 4, 0, False), "a8"),
]


@with_unit
@pytest.mark.parametrize(
    ("codec", "mode"), [*CODECS, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE)], ids=str
)
def test_products_are_those_of_the_other_instruction_sets_by_bits(codec: Codec, mode: Mode) -> None:
    rng = np.random.default_rng(codec.bits)
    for rows, columns in ((48, 128), (100, 320), (33, 1176)):
        arrays = Arrays()
        graph = product(
            arrays, rng.standard_normal((70, columns)).astype(np.float32), weight(arrays, rng, codec, rows, columns),
            rng.standard_normal(rows).astype(np.float32),
        )  # fmt: skip
        for count in (3, 15, 16, 17, 24, 33, 70):
            found, expected = (run("cpu", graph, arrays, count, Options(mode, 2, isa)) for isa in (AMX, VNNI))
            assert np.array_equal(found, expected), (rows, columns, count)


GATED = [
    (Codec("int", 4, 64), "a8", None, 128),
    (Codec("int", 4, 64), "a16", None, 128),
    (Codec("int", 8, 0), "a8", (0.03,), 144),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            (Codec("int", 4, 0), "a8", (0.03, 0.5), 352),
            (Codec("int", 8, 0), "a8", (0.03, 0.5), 352),
            (Codec("int", 4, 32), "a8", None, 160),
        )
    ),
]


@with_unit
@pytest.mark.parametrize(("codec", "mode", "scales", "columns"), GATED, ids=str)
def test_gate_and_up_are_those_of_the_other_instruction_sets_by_bits(
    codec: Codec, mode: Mode, scales: tuple[float, ...] | None, columns: int
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
    graph = Graph({"x": columns, "n": columns, "g": 2 * width, "i": width, "y": 24}, operations, "y", (CacheSpec(1, 2, 2),))
    for count in (15, 33, 70):
        found, expected = (run("cpu", graph, arrays, count, Options(mode, 2, isa)) for isa in (AMX, VNNI))
        assert np.array_equal(found, expected), count
    program = load("cpu").compile(graph, arrays, Options(mode, 2, AMX, max_rows=70, max_logits=70))
    with recording(program) as times:
        program.run(rows_of(program, 70))
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
        graph = Graph({"x": columns, "y": rows}, operations, "y", (CacheSpec(1, 2, 2),))
        wanted = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64) + 1
        for count in (1, 15, 40):
            found, expected = (run("cpu", graph, arrays, count, Options("a8", 2, isa)) for isa in (AMX, VNNI))
            assert np.array_equal(found, expected), (rows, columns, count)
            assert np.abs(found - wanted[:count]).max() < 0.02 * np.abs(wanted).max()


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
    monkeypatch.setattr(cpu_program, "MAX_PRODUCTS", 2 * 100 * 128 * count / 7)
    assert np.array_equal(program.run(seen), whole)
    with recording(program) as times:
        assert np.array_equal(program.run(seen), whole)
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
