"""Widths that fill neither a vector of 16 channels, nor a chunk of 32, nor their last group of weights."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_floats
from edgeq.format.quantization import activation_block, activation_limit, rounded
from edgeq.format.records import LinearSpec, Transform, Weight
from edgeq.targets import load
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.kernels.rows import activate, elementwise
from edgeq.targets.graph import Activate, CacheSpec, Embed, Function, Graph, Linear, RmsNorm, Select
from edgeq.targets.target import Options
from tests.targets.cases import HERE, Arrays, case, matrix, product, rows_of, run, tried, weight
from tests.targets.test_requantization import File, hard, layer, program_of
from tests.targets.test_requantization import graph_of as masters_graph

WIDTHS = (84, 100, 172, 200, 340)
GROUPS = (16, 32, 64, 128, 0)


def exact_input(rng: np.random.Generator, rows: int, columns: int, codec: Codec, limit: int) -> np.ndarray:
    """Activations that integers hold exactly: every block has the value limit/128, all are multiples of 1/128."""
    x = rng.integers(-limit, limit + 1, (rows, columns)).astype(np.float32)
    x[:, :: activation_block(codec)] = limit
    return x / 128


def in_make_test(symmetric: bool, group: int, isa: str) -> bool:
    return isa == HERE[0] and not symmetric and group in (64, 0)


@pytest.mark.parametrize(
    ("symmetric", "group", "isa"),
    [
        case(
            kind == "symmetric",
            group,
            isa,
            common=in_make_test(kind == "symmetric", group, isa),
            id=f"{kind}-{group}-{isa}",
        )
        for i, kind in enumerate(("symmetric", "zero"))
        for group in GROUPS
        for below, isa in enumerate(HERE)
        # Sets below the best have half of the sizes with zero points and the others without.
        if not below or (GROUPS.index(group) + i + below) % 2
    ],
)
def test_products_equal_the_formula(group: int, symmetric: bool, isa: str) -> None:
    """Four bits in both modes; 3 and 8 bits in the exhaustive tests where other tests need their kernels (`tried`)."""
    rng, below = np.random.default_rng(group), HERE.index(isa)
    for bits, columns in [*((4, width) for width in WIDTHS), (3, 84), (8, 100)]:
        codec, arrays = Codec("int", bits, group, symmetric), Arrays()
        w = weight(arrays, rng, codec, 21, columns)
        for mode, limit in (("a16", 127), ("a8", activation_limit(codec, "a8"))):
            if not (bits == 4 or in_make_test(symmetric, group, isa) or tried(below, codec, mode)):
                continue
            x = exact_input(rng, 18, columns, codec, limit)
            graph = product(arrays, x, w)
            size = np.abs(x) @ np.abs(matrix(arrays, w)).T + 1
            many = run("cpu", graph, arrays, 18, Options(mode, 2, isa))  # type: ignore[arg-type]
            error = np.abs(many - x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64)) / size
            assert error.max() < (2e-5 if mode == "a16" else 1e-6), (mode, bits, columns)
            one = run("cpu", graph, arrays, 1, Options(mode, 1, isa))  # type: ignore[arg-type]
            assert np.array_equal(one[0], many[0]), "a row alone must give the same bits as among others"


def test_tied_embeddings_equal_their_dequantized_rows() -> None:
    rng = np.random.default_rng(1)
    for group in GROUPS:
        for bits, columns in ((4, 84), (7, 100)):
            arrays, codec = Arrays(), Codec("int", bits, group, False)
            table = weight(arrays, rng, codec, 19, columns)
            eye = pack_floats(np.eye(columns, dtype=np.float32), "f32")
            identity = Weight(Codec("f32"), columns, columns, {"q": arrays.add(eye, "f32")})
            operations = (
                Embed(-1, LinearSpec("head", (table,)), "x"),
                Select(-1, ("x",)),
                Linear(-1, "x", LinearSpec("eye", (identity,)), "y"),
            )
            graph = Graph({"x": columns, "y": columns}, operations, "y", (CacheSpec(1, 2, 2),))
            assert np.array_equal(run("cpu", graph, arrays, 19, Options("a16", 2)), matrix(arrays, table)), codec.name


def mlp(
    arrays: Arrays, kind: tuple[Function, bool], width: int, group: int, *, transform: int = 0, norm: bool = False
) -> Graph:
    """x, a product, an activation, perhaps a norm over its result, and a product of that."""
    rng, hidden = np.random.default_rng(width), 100
    gates = 1 + kind[1]
    up = weight(arrays, rng, Codec("int", 4, group), gates * width, hidden)
    down = weight(arrays, rng, Codec("int", 4, group, False), 24, width)
    for each in (up, down):
        scale = arrays.array(each.arrays["scale"])
        scale[...] = np.abs(scale) * np.float16(0.02)
    if "zero" in down.arrays:
        arrays.array(down.arrays["zero"])[...] = 8
    table = arrays.add(rng.standard_normal((31, hidden)).astype(np.float32), "f32")
    gain = arrays.add(np.ones(width, np.float32), "f32")
    parts = {"transform": Transform(transform)} if transform else {}
    operations = [
        Embed(-1, table, "x"),
        Linear(0, "x", LinearSpec("up", (up,)), "gates"),
        Activate(0, "gates", width, "inner", *kind),
        *([RmsNorm(0, "inner", gain, 1e-5, "normed")] if norm else []),
        Linear(0, "normed" if norm else "inner", LinearSpec("down", (down,), **parts), "y"),  # type: ignore[arg-type]
    ]
    buffers = {"x": hidden, "gates": gates * width, "inner": width, "normed": width, "y": 24}
    return Graph(buffers, (*operations, Select(-1, ("y",))), "y", cache=(CacheSpec(1, 2, 2),))


@pytest.mark.parametrize(
    ("kind", "isa"),
    [
        case(kind, isa, common=isa == HERE[0] and kind[1], id=f"{kind[0]}-{isa}")
        for kind in (("silu", True), ("gelu_pytorch_tanh", True), ("relu", False))
        for isa in HERE
    ],
)
def test_activations_equal_the_reference(kind: tuple[Function, bool], isa: str) -> None:
    # 208 and 400 are whole blocks: their SwiGLU is done by the product.
    for width, group in ((84, 16), (100, 64), (172, 128), (200, 32), (208, 128), (400, 64), (340, 0)):
        for parts in ({}, {"norm": True}, {"transform": 4}):
            arrays = Arrays()
            graph = mlp(arrays, kind, width, group, **parts)  # type: ignore[arg-type]
            oracle = run("reference", graph, arrays, 31, Options("a16"))
            y = run("cpu", graph, arrays, 31, Options("a16", 2, isa))
            assert np.abs(y - oracle).max() < 1e-3 * np.abs(oracle).max(), (width, group, parts)
            assert np.array_equal(run("cpu", graph, arrays, 1, Options("a16", 1, isa))[0], y[0]), (width, group, parts)
            # An activation exactly between two integers may fall to either side.
            cheap, wanted = (
                run("cpu", graph, arrays, 31, Options("a8", 2, isa)),
                run("reference", graph, arrays, 31, Options("a8")),
            )
            assert np.abs(cheap - wanted).max() < 3e-2 * np.abs(wanted).max(), (width, group, parts)


# Without a gate all functions, with one those that models have.
@pytest.mark.parametrize(
    ("factory", "literals"),
    [
        (elementwise.swiglu, (4, 0)),
        *((activate.activate, (4, f, 0)) for f in range(5)),
        *((activate.activate, (4, f, 1)) for f in (1, 2)),
    ],
)
def test_results_are_padded_with_zeros_and_nothing_is_written_after_them(factory, literals) -> None:  # type: ignore[no-untyped-def]
    for width in (1, 8, 15, 17, 84, 200):
        results_are_padded_with_zeros(factory, literals, width)


def results_are_padded_with_zeros(factory, literals, width) -> None:  # type: ignore[no-untyped-def]
    count, padded = 3, -(-width // 16) * 16
    # What lies after a row, and after gate and up, must not get into the padding.
    x, out = np.full((count, 2 * padded + 16), np.nan, np.float32), np.full((count, padded + 16), 7, np.float32)
    x[:, : 2 * width], rows = 1, np.array([count], np.int64)
    args = elementwise.ActivationArgs(
        rows=rows.ctypes.data,
        x=x.ctypes.data,
        x_stride=x.strides[0],
        width=width,
        out=out.ctypes.data,
        out_stride=out.strides[0],
    )
    record = np.array(args.record(), np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address(factory, *literals))(record.ctypes.data, 0, 1, 0)
    assert (out[:, :width] > 0.5).all() and not out[:, width:padded].any() and (out[:, padded:] == 7).all()


@pytest.mark.parametrize("group", GROUPS)
def test_both_targets_requantize_to_the_same_bits(group: int) -> None:
    rng, codec = np.random.default_rng(group), Codec("int", 4, group, False)
    for master in (Codec("int", 8, 128), Codec("bf16")):
        for columns in (84, 100, 172, 200):
            file = File()
            spec = layer(file, "layer", hard(rng, 21, columns), codec, master)
            graph = masters_graph(file, np.ones((2, columns), np.float32), [spec], columns)
            s, made = np.exp(rng.standard_normal(columns)).astype(np.float32), []
            for target in ("reference", "cpu"):
                program = program_of(target, graph, file)
                made.append(program.new_weights())
                program.requantize(made[-1], [s, s])
            expected = rounded(matrix(file, spec.master) * s, codec)
            for name, ref in spec.weights[0].arrays.items():
                assert np.array_equal(made[0].array(ref), made[1].array(ref)), (name, columns)
                assert np.array_equal(made[1].array(ref), expected[name]), (name, columns)
            program = load("cpu").compile(graph, file, replace(Options("a16"), max_rows=8, max_logits=8))
            program.run(rows_of(program, 2))
