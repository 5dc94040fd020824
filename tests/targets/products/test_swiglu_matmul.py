"""Gate, up, SwiGLU and quantization in one pass: bit by bit what the operations give one after the other."""

from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import LinearSpec
from edgeq.targets import load
from edgeq.targets.cpu import program as cpu_program
from edgeq.targets.graph import Activate, CacheSpec, Embed, Graph, Linear, Operation, RmsNorm, Select
from edgeq.targets.target import Options
from tests.targets.cases import HERE, MODES, Arrays, case, in_turn, recording, rows_of, run, weight

I4, I4_ZERO, I3, I8 = Codec("int", 4, 128), Codec("int", 4, 32, False), Codec("int", 3, 64), Codec("int", 8, 16)
I4_OFFSET, I5_OFFSET = Codec("offset", 4, 32), Codec("offset", 5, 16)


def mlp(
    arrays: Arrays, rng: np.random.Generator, up: Codec, down: Codec, width: int, count: int, more: tuple[Operation, ...] = ()
) -> list[Graph]:
    """Twice the same: as models have it, and with a bias of zeros, which keeps the operations apart."""
    columns = 256
    table = arrays.add(rng.standard_normal((count, columns)).astype(np.float32), "f32")
    gain = arrays.add(rng.uniform(0.5, 2, columns).astype(np.float32), "f32")
    w, v = weight(arrays, rng, up, 2 * width, columns), weight(arrays, rng, down, 40, width)
    zeros = arrays.add(np.zeros(2 * width, np.float32), "f32")
    graphs = []
    for bias in (None, zeros):
        operations: tuple[Operation, ...] = (
            Embed(-1, table, "x"),
            Select(-1, ("x",)),
            RmsNorm(0, "x", gain, 1e-5, "normed"),
            Linear(0, "normed", LinearSpec("gate_up", (w,), bias), "gate_up"),
            Activate(0, "gate_up", width, "inner"),
            Linear(0, "inner", LinearSpec("down", (v,)), "y"),
            *more,
        )
        buffers = {"x": columns, "normed": columns, "gate_up": 2 * width, "inner": width, "y": 40}
        graphs.append(Graph(buffers, operations, "y", cache=(CacheSpec(1, 2, 2),)))
    return graphs


def kernels(graph: Graph, arrays: Arrays, count: int, options: Options) -> list[str]:
    program = load("cpu").compile(graph, arrays, options)
    with recording(program) as times:
        program.run(rows_of(program, count))
    return [step.kernel for step in times[0].steps]


I4_LEVELS, I6_LEVELS = Codec("two-level", 4, 32, False), Codec("two-level", 6, 16)

CODECS = {
    "g128": (I4, I4),
    "g32-zero": (I4_ZERO, I8),
    "3-bit": (I3, I4_ZERO),
    "half": (Codec("half", 2, 32), Codec("half", 4, 64)),
    "s4": (Codec("s4", 2, 32), Codec("s4", 4, 16)),
    "table": (Codec("table", 4, 32), Codec("table", 2, 16, wide=True)),
    "trellis": (Codec("trellis", 2, 32), Codec("trellis", 3, 16)),
    "offset": (I4_OFFSET, I5_OFFSET),
    "two-level": (I4_LEVELS, I6_LEVELS),
}
MODE_OF = {"g32-zero": "a8"}
"""In which one they are tried without the exhaustive tests."""


@pytest.mark.parametrize(
    ("up", "down", "mode", "isa"),
    [
        case(
            *codecs,
            mode,
            isa,
            common=isa == HERE[0] and (name == "g128" or mode == MODE_OF.get(name)),
            id=f"{name}-{mode}-{isa}",
        )
        for i, (name, codecs) in enumerate(CODECS.items())
        for mode in MODES
        for below, isa in enumerate(HERE)
        # Every set has every kind of groups in one mode, the next set in the other.
        if name == "g128" or in_turn(i + below + 1, mode)
    ],
)
def test_one_pass_gives_the_bits_of_many(up: Codec, down: Codec, mode: str, isa: str) -> None:
    rng = np.random.default_rng(1)
    # A unit and a part of one, several; tiles of every size, and one row.
    for units, count in ((1, 31), (8, 12), (1, 1), (3, 27)):
        arrays, width = Arrays(), 128 * units + down.group_size % 128
        joined, apart = mlp(arrays, rng, up, down, width, count)
        options = Options(mode, 2, isa, 40, 40)  # type: ignore[arg-type]
        assert np.array_equal(*(run("cpu", graph, arrays, count, options) for graph in (joined, apart))), (width, count)
        assert [any("gated" in name for name in kernels(graph, arrays, count, options)) for graph in (joined, apart)] == [1, 0]


def test_a_product_that_is_cut_does_the_swiglu_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel reads the op record that follows."""
    arrays, width, count = Arrays(), 384, 31
    joined, _ = mlp(arrays, np.random.default_rng(3), I4, I4, width, count)
    options = Options("a8", 2, None, 40, 40)
    assert any("gated" in name for name in kernels(joined, arrays, count, options))
    whole = run("cpu", joined, arrays, count, options)
    monkeypatch.setattr(cpu_program, "MAX_PRODUCTS", 2 * 2 * width * 256 * count / 3)
    spans = np.stack([np.zeros(count, np.int32), np.full(count, count, np.int32)])[None]
    # A program of its own: nothing of another run lies in its buffers.
    program = load("cpu").compile(joined, arrays, options)
    assert np.array_equal(program.run(replace(rows_of(program, count), spans=spans)), whole)


def test_floats_that_somebody_reads_are_kept() -> None:
    rng, arrays = np.random.default_rng(2), Arrays()
    inner = LinearSpec("inner", (weight(arrays, rng, Codec("f32"), 40, 144),))
    normed = LinearSpec("normed", (weight(arrays, rng, I8, 40, 256),))
    more = (Linear(0, "inner", inner, "y", add=True), Linear(0, "normed", normed, "y", add=True))
    joined, _ = mlp(arrays, rng, I4, I8, 144, 31, more)
    options = Options("a8", 2, None, 40, 40)
    assert not any("gated" in name for name in kernels(joined, arrays, 31, options))
    assert np.allclose(*(run(target, joined, arrays, 31, options) for target in ("cpu", "reference")), rtol=1e-3, atol=1e-2)
