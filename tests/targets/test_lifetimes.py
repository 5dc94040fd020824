"""Buffers share memory: when each is needed, where it then lies, and that no result depends on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import Activation, LinearSpec, SplitRow, Transform
from edgeq.targets import load
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.lowering import context as lowering
from edgeq.targets.cpu.lowering.lifetimes import Buffer, Places, lives, places
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Graph,
    HeadNorm,
    LayerNorm,
    Linear,
    Operation,
    RmsNorm,
    RopeRotate,
    Scale,
    Select,
)
from edgeq.targets.target import Options
from tests.targets.cases import Arrays, rows_of, weight

HEADS, DIM, LAYERS, ROWS = 3, 16, 3, 21
FREQUENCIES = tuple(0.1**i for i in range(DIM // 2))
X, A, B = Buffer("x"), Buffer("a"), Buffer("b")


def spec(rows: int) -> LinearSpec:
    arrays = Arrays()
    return LinearSpec("layer", (weight(arrays, np.random.default_rng(0), Codec("f32"), rows, 16),))


def graph_of(*operations: Operation, result: str = "y") -> Graph:
    return Graph({name: 16 for name in ("x", "a", "b", "y")}, operations, result, (CacheSpec(1, 2, 2),))


def test_a_buffer_is_needed_from_its_write_to_the_last_read_of_it_and_again_in_every_layer() -> None:
    one, two = Scale(0, "x", 1.0, "a"), Scale(0, "a", 1.0, "y")
    nothing = Scale(0, "y", 1.0, "y")
    found = lives(graph_of(one, two, *[nothing] * 4, one, two))
    assert found[A] == {-1, 0, 1, 2} | {5, 6, 7, 8}
    assert found[X] >= set(range(-1, 8))


def test_columns_that_are_written_in_turn_are_needed_from_the_first_on() -> None:
    halves = [Linear(0, "x", spec(8), "a", offset) for offset in (0, 8)]
    nothing = Scale(0, "y", 1.0, "y")
    read = Scale(0, "a", 1.0, "y")
    found = lives(graph_of(*[nothing] * 3, halves[0], *[nothing] * 3, halves[1], *[nothing] * 3, read, *[nothing] * 3))
    assert found[A] == set(range(2, 13))
    # Half of it is as it was before: that must last.
    assert lives(graph_of(*[nothing] * 3, halves[1], read))[A] == set(range(-1, 6))
    added = Linear(0, "x", spec(16), "a", add=True)
    assert lives(graph_of(*[nothing] * 3, added, read))[A] == set(range(-1, 6))


def test_rows_of_the_result_are_buffers_of_their_own() -> None:
    nothing = Scale(0, "y", 1.0, "y")
    found = lives(graph_of(Scale(0, "x", 1.0, "a"), *[nothing] * 3, Select(0, ("a",)), *[nothing] * 3, Scale(0, "a", 1.0, "y")))
    assert found[A] == set(range(-1, 6)) and found[Buffer("a", True)] == set(range(3, 10))


def test_what_is_needed_at_the_same_time_lies_apart() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        buffers = [Buffer(str(i)) for i in range(8)]
        sizes = {buffer: int(rng.integers(1, 5000)) for buffer in buffers}
        needed = {buffer: set(range(start, start + 4)) for buffer, start in zip(buffers, rng.integers(0, 12, 8), strict=True)}
        found = places(sizes, needed)
        assert all(offset % 64 == 0 and offset + sizes[b] <= found.nbytes for b, offset in found.offsets.items())
        for one in buffers:
            for other in buffers:
                if one < other and needed[one] & needed[other]:
                    first, second = sorted((found.offsets[each], each) for each in (one, other))
                    assert first[0] + sizes[first[1]] <= second[0]
    apart = places({A: 100, B: 100}, {A: {1}, B: {2}})
    assert apart.offsets[A] == apart.offsets[B] == 0 and apart.nbytes == 100


KINDS = {
    "blocks": (Codec("int", 4, 64), None, "silu", True, 96),
    "floats": (Codec("f16"), None, "silu", True, 88),
    "rows": (Codec("int", 8, 0), Activation(8), "quick_gelu", False, 96),
    "constant": (Codec("int", 8, 0), (0.03,), "silu", True, 96),
    "transformed": (Codec("int", 8, 0), (0.03,), "gelu", True, 96),
}
"""Weights, activations, function, gate, and inner channels, which may be no whole vectors."""


def model(kind: str) -> tuple[Graph, Arrays]:
    """A few layers: queries, keys and values from layers of their own, heads normed and rotated."""
    codec, activation, function, gated, inner = KINDS[kind]
    rng, arrays, width = np.random.default_rng(5), Arrays(), 80
    heads = HEADS * DIM
    if isinstance(activation, tuple):
        activation = Activation(8, scales=arrays.add(np.array(activation, np.float32), "f32"))

    def ones(count: int):
        return arrays.add(np.ones(count, np.float32), "f32")

    def layer(rows: int, columns: int) -> LinearSpec:
        return LinearSpec(f"{rows}", (weight(arrays, rng, codec, rows, columns),), ones(rows), activation=activation)

    apart = {"transform": Transform(32), "split_row": SplitRow(0, ones(width))} if kind == "transformed" else {}
    operations: list[Operation] = [Embed(-1, arrays.add(rng.standard_normal((ROWS, width)).astype(np.float32), "f32"), "x")]
    for i in range(LAYERS):
        operations += [RmsNorm(i, "x", ones(width), 1e-5, "normed")]
        operations += [Linear(i, "normed", layer(heads, width), "qkv", heads * part) for part in range(3)]
        operations += [HeadNorm(i, "qkv", heads * part, HEADS, DIM, ones(DIM), 1e-5) for part in range(2)]
        operations += [
            RopeRotate(i, "qkv", heads * part, HEADS, DIM, tuple(0.1**j for j in range(DIM // 2))) for part in range(2)
        ]
        operations += [CacheWrite(i, "qkv", heads, 2 * heads, HEADS, DIM, i)]
        if i == LAYERS - 1:
            operations += [Select(i, ("x", "qkv"))]
        operations += [
            Attention(i, "qkv", 0, "attended", HEADS, HEADS, DIM, DIM**-0.5, 0, i),
            Linear(i, "attended", layer(width, heads), "x", add=True),
            LayerNorm(i, "x", ones(width), ones(width), 1e-5, "normed"),
            Linear(i, "normed", layer(inner * (1 + gated), width), "gate_up"),
            Activate(i, "gate_up", inner, "inner", function, gated),
            Linear(i, "inner", replace(layer(width, inner), **apart), "x", add=True),
        ]
    operations += [RmsNorm(-1, "x", ones(width), 1e-5, "normed"), Linear(-1, "normed", layer(40, width), "y")]
    widths = {"x": width, "normed": width, "qkv": 3 * heads, "attended": heads, "gate_up": inner * (1 + gated), "inner": inner}
    return Graph(widths | {"y": 40}, tuple(operations), "y", (CacheSpec(HEADS, DIM, DIM),) * LAYERS), arrays


def results(program) -> list[np.ndarray]:
    """Results of a prompt in two chunks, then of one row."""
    pages = [program.new_page()]
    return [program.run(rows_of(program, count, first, pages)).copy() for count, first in ((13, 0), (7, 13), (1, 20))]


def compiled(graph: Graph, arrays: Arrays, mode: str):
    return load("cpu").compile(graph, arrays, Options(mode, 1, max_rows=13, max_logits=13))


CASES = [("blocks", "a8"), ("floats", "a16"), ("rows", "a8"), ("constant", "a8"), ("transformed", "a8"), ("blocks", "a16")]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_shared_memory_changes_no_bit(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, arrays = model(kind)
    shared = compiled(graph, arrays, mode)
    found = results(shared)

    def apart(sizes, needed) -> Places:
        ends = np.cumsum([padded(size, 64) for size in sizes.values()])
        return Places({each: int(end) - padded(sizes[each], 64) for each, end in zip(sizes, ends, strict=True)}, int(ends[-1]))

    monkeypatch.setattr(lowering, "places", apart)
    alone = compiled(graph, arrays, mode)
    assert all(np.array_equal(one, other) for one, other in zip(results(alone), found, strict=True))
    assert all(np.isfinite(each).all() for each in found)
    assert shared._memory.allocated < alone._memory.allocated


@pytest.mark.parametrize("value", [np.nan, 1e30])
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_what_lies_in_a_place_between_two_lives_changes_no_bit(
    kind: str, mode: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record by record, everything that no buffer needs then is overwritten first."""
    graph, arrays = model(kind)
    program = compiled(graph, arrays, mode)
    expected = results(program)
    context, needed = program._lowered(mode, "file"), lives(graph)
    stride, index = context._strides, {id(o): i for i, o in enumerate(graph.operations)}
    start = next(address for (name, _), address in program._memory._shared.items() if name == "buffers")
    memory = program._memory.view(start).view(np.float32)
    shared = {each: place for each, place in context._places.items() if 0 <= place - start < memory.nbytes}
    assert len(shared) >= 5
    poisoned = 0

    run = program._pool.run

    def record_by_record(table, threads, pieces, cuts, what, kept) -> None:
        nonlocal poisoned
        assert len(table) == len(context.records)
        for i, record in enumerate(context.records):
            free = np.ones(len(memory), bool)
            for each, place in shared.items():
                if index[id(record.origin)] in needed[each]:
                    begin = (place - start) // 4
                    free[begin : begin + 13 * stride[each.name] // 4] = False
            memory[free] = value
            poisoned += int(free.sum())
            run(table[i : i + 1], threads, 1, None)

    monkeypatch.setattr(program._pool, "run", record_by_record)
    assert all(np.array_equal(one, other) for one, other in zip(results(program), expected, strict=True))
    assert poisoned > len(memory)
