"""Operations over whole rows: the emulated device against the reference."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import LinearSpec
from edgeq.targets.family_operations import (
    ArrayScale,
    Gate,
    GatedAdd,
    Limit,
    RowMean,
    ScaleAdd,
    ScaleShift,
    SoftCap,
    ValueNorm,
)
from edgeq.targets.graph import (
    Activate,
    CacheSpec,
    Embed,
    Function,
    Graph,
    HeadNorm,
    InjectVectors,
    LayerNorm,
    Linear,
    NormAdd,
    Operation,
    PositionAdd,
    RmsNorm,
    Scale,
    Select,
)
from tests.cuda.comparing import both, program_of
from tests.targets.cases import Arrays, rows_of, weight
from tests.targets.test_cpu_kernels import identity, shown

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

ROWS, WIDTH = 5, 300


def result(
    arrays: Arrays, x: np.ndarray, *operations: Operation, out: str = "x", width: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    widths = {"x": x.shape[1], "_dim": 2} | ({out: width} if width else {})
    return both(shown(arrays, x, operations, out, widths), arrays, len(x))


@pytest.fixture
def arrays() -> Arrays:
    return Arrays()


@pytest.fixture
def x() -> np.ndarray:
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32) * 3
    rows[1] = 0
    rows[2] *= 1e4
    return rows


def stored(arrays: Arrays, width: int, seed: int, dtype: str = "f32"):
    values = np.random.default_rng(seed).standard_normal(width).astype(np.float32)
    return arrays.add(values.astype(np.float16 if dtype == "f16" else np.float32), dtype)


@pytest.mark.parametrize("width", [1, 16, 40, 300])
@pytest.mark.parametrize("offset", [0, 300], ids=["centered", "far-from-zero"])
def test_norms(arrays: Arrays, x: np.ndarray, width: int, offset: int) -> None:
    x = x[:, :width] + np.float32(offset)
    gain, bias = stored(arrays, width, 1, "f16"), stored(arrays, width, 2)
    for operation in (
        RmsNorm(0, "x", gain, 1e-5, "n"),
        LayerNorm(0, "x", gain, bias, 1e-5, "n"),
    ):
        oracle, y = result(arrays, x, operation, out="n", width=width)
        assert np.abs(y - oracle).max() < (1e-5 if offset == 0 or isinstance(operation, RmsNorm) else 1e-3)


def test_a_norm_is_added_to_the_residual(arrays: Arrays, x: np.ndarray) -> None:
    gain = stored(arrays, WIDTH, 1)
    oracle, y = result(arrays, x[[0, 1, 3]], Scale(0, "x", 0.5, "x"), NormAdd(0, "x", gain, 1e-5, "x"))
    assert np.abs(y - oracle).max() < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e20])
def test_a_row_whose_squares_f32_does_not_hold_becomes_nan_and_no_other(arrays: Arrays, x: np.ndarray, bad: float) -> None:
    x[3, 7] = bad
    gain = stored(arrays, WIDTH, 1)
    for operation in (RmsNorm(0, "x", gain, 1e-5, "x"), LayerNorm(0, "x", gain, gain, 1e-5, "x")):
        _, y = result(arrays, x, operation)
        assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()
    _, y = result(arrays, x, HeadNorm(0, "x", 0, 15, 20, stored(arrays, 20, 2), 1e-5))
    # The product that shows the result carries the NaN of one head through its row.
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()


@pytest.mark.parametrize("head_dim", [8, 32, 72, 128])
def test_a_norm_of_heads_leaves_what_is_beside_them(arrays: Arrays, head_dim: int) -> None:
    x = np.random.default_rng(1).standard_normal((ROWS, 7 * head_dim + 3)).astype(np.float32)
    oracle, y = result(arrays, x, HeadNorm(0, "x", 3, 6, head_dim, stored(arrays, head_dim, 2), 1e-6))
    assert np.abs(y - oracle).max() < 1e-5
    assert np.array_equal(y[:, :3], x[:, :3]) and np.array_equal(y[:, 3 + 6 * head_dim :], x[:, 3 + 6 * head_dim :])


@pytest.mark.parametrize("function", get_args(Function))
@pytest.mark.parametrize("gated", [False, True])
def test_activations_over_the_whole_range_of_floats(arrays: Arrays, function: Function, gated: bool) -> None:
    # Squares of larger ones are infinite.
    far = 1e18 if function == "relu2" else 1e20
    gates = np.concatenate([np.linspace(-60, 60, 200), [-far, -1e9, 0, 1e9, far], np.linspace(-4, 4, 195)])
    x = np.concatenate([gates, np.full(len(gates), 1.5)])[None].repeat(3, 0).astype(np.float32)
    oracle, y = result(arrays, x, Activate(0, "x", 400, "s", function, gated), out="s", width=400)
    assert np.isfinite(y).all()
    assert (np.abs(y - oracle) <= 4e-6 * np.maximum(np.abs(oracle), 1)).all()


@pytest.mark.parametrize("width", [16, 300])
def test_a_clamped_swiglu(arrays: Arrays, width: int) -> None:
    """Gates are limited above, the other factor on both sides; NaN stays in its row."""
    x = np.random.default_rng(width).standard_normal((5, 2 * width)).astype(np.float32) * 3
    x[0, [0, 1, 2]], x[1, [width, width + 1, width + 2]] = (-1e30, 1e30, 2.0), (-1e30, 1e30, -2.0)
    x[2, 3], x[3, width + 3] = np.nan, np.nan
    oracle, y = result(arrays, x, Activate(0, "x", width, "s", clamp=(1.3, 2.0)), out="s", width=width)
    sound = [0, 1, 4]
    assert np.isfinite(y[sound]).all() and np.isnan(y[[2, 3]]).any(axis=1).all()
    assert np.abs(y[sound] - oracle[sound]).max() < 4e-6 * 2 * 3


@pytest.mark.parametrize("dim", [16, 18, 40, 512])
@pytest.mark.parametrize("apart", [False, True], ids=["in-place", "beside"])
def test_a_norm_of_values(arrays: Arrays, dim: int, apart: bool) -> None:
    """Beside: what they are made of stays, as keys do."""
    heads = 5
    x = np.random.default_rng(dim).standard_normal((ROWS, 2 * heads * dim)).astype(np.float32) * 10
    begin = heads * dim if apart else 0
    oracle, y = result(arrays, x, ValueNorm(0, "x", 0, begin, heads, dim, 1e-2))
    assert np.abs(y - oracle).max() < 1e-5
    assert np.array_equal(y[:, : heads * dim], x[:, : heads * dim]) is apart
    assert np.array_equal(y[:, heads * dim :], x[:, heads * dim :]) is not apart


@pytest.mark.parametrize("width", [16, 300])
def test_a_cap(arrays: Arrays, width: int) -> None:
    x = np.random.default_rng(width).standard_normal((ROWS, width)).astype(np.float32) * 3
    x[0, :6] = -1e30, 1e30, -1e4, 1e4, 1e-3, 0
    oracle, y = result(arrays, x, SoftCap(0, "x", 4.0))
    assert np.abs(y - oracle).max() < 2e-6
    assert y[0, :4].tolist() == [-4, 4, -4, 4] and y[0, 5] == 0


@pytest.mark.parametrize("width", [16, 300])
@pytest.mark.parametrize("function", ["sigmoid", "silu", None])
def test_factors_of_a_stream_sums_and_gates(arrays: Arrays, width: int, function: str | None) -> None:
    x = np.random.default_rng(width).standard_normal((ROWS, width)).astype(np.float32)
    operations = (
        Scale(0, "x", 2.0, "y"),
        ArrayScale(0, "x", stored(arrays, 1, 3, "f16")),
        ScaleAdd(0, "y", -0.7, "x"),
        Gate(0, "x", "y", 3, width - 3, function=function),  # type: ignore[arg-type]
    )
    oracle, y = both(shown(arrays, x, operations, "x", {"x": width, "y": width, "_dim": 2}), arrays, ROWS)
    assert np.abs(y - oracle).max() < 1e-6 * np.abs(oracle).max() and not np.array_equal(y, x)


@pytest.mark.parametrize("width", [16, 300])
def test_limits_of_some_columns_and_means_that_are_scaled_and_shifted(arrays: Arrays, width: int) -> None:
    """Infinite numbers have a nearest one, NaN stays; other columns are as they were."""
    x = np.random.default_rng(width).standard_normal((ROWS, 4 * width)).astype(np.float32) * 3
    x[0, 3:7] = -np.inf, np.inf, -1e30, 1e30
    x[1, 5] = np.nan
    operations = (
        Scale(0, "x", 1e-4, "limited"),
        Limit(0, "x", 3, width, -2.5, 1.0, "limited"),
        Limit(0, "limited", 3, width, -np.inf, 0.5, "limited"),
        RowMean(0, "limited", 4, "mean"),
        ScaleShift(0, "mean", stored(arrays, width, 3, "f16"), stored(arrays, width, 4)),
    )
    widths = {"x": 4 * width, "limited": 4 * width, "mean": width, "_dim": 2}
    oracle, y = both(shown(arrays, x, operations, "mean", widths), arrays, ROWS)
    # What shows the buffer multiplies it by a matrix.
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False, False, False]
    sound = [0, 2, 3, 4]
    assert np.abs(y[sound] - oracle[sound]).max() < 2e-6 and np.isfinite(y[sound]).all()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_scale_and_learned_positions(arrays: Arrays, x: np.ndarray, dtype: str) -> None:
    values = np.random.default_rng(4).standard_normal((9, WIDTH))
    table = arrays.add(values.astype({"f32": np.float32, "f16": np.float16}[dtype]), dtype)
    oracle, y = result(arrays, x, Scale(0, "x", 11.3137085, "x"), PositionAdd(0, "x", table))
    assert np.array_equal(y, oracle)


def test_a_gated_addition(arrays: Arrays, x: np.ndarray) -> None:
    oracle, y = result(arrays, x, Scale(0, "x", 1.0, "out"), GatedAdd(0, "x", "x", "out"), out="out", width=WIDTH)
    assert np.abs(y - oracle).max() <= 1e-6 * np.abs(oracle).max()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [31, 300])
def test_rows_of_a_tied_head_of_floats(arrays: Arrays, kind: str, width: int) -> None:
    head = LinearSpec("head", (weight(arrays, np.random.default_rng(0), Codec(kind), 19, width),))  # type: ignore[arg-type]
    last = Select(-1, ("x",)), Linear(-1, "x", identity(arrays, width), "y")
    graph = Graph({"x": width, "y": width}, (Embed(-1, head, "x"), *last), "y", (CacheSpec(1, 2, 2),))
    oracle, y = both(graph, arrays, 19)
    assert np.array_equal(y, oracle)


@pytest.mark.parametrize(
    "codec",
    [
        Codec("int", 3, 16, False), Codec("half", 7, 0), Codec("half", 2, 16), Codec("s4", 5, 32), Codec("table", 1, 32),
        Codec("table", 4, 0, wide=True), *(Codec("trellis", bits, 16) for bits in (1, 2, 3)),
    ],
    ids=lambda codec: codec.name,
)  # fmt: skip
def test_rows_of_a_tied_head_have_the_numbers_of_its_codec(arrays: Arrays, codec: Codec) -> None:
    """All products are exact in float32."""
    head = LinearSpec("head", (weight(arrays, np.random.default_rng(0), codec, 37, 75),))
    last = Select(-1, ("x",)), Linear(-1, "x", identity(arrays, 75), "y")
    graph = Graph({"x": 75, "y": 75}, (Embed(-1, head, "x"), *last), "y", (CacheSpec(1, 2, 2),))
    oracle, y = both(graph, arrays, 37)
    assert np.array_equal(y, oracle) and oracle.any(axis=1).all()


@pytest.mark.parametrize("add", [False, True])
def test_vectors_that_rows_bring(arrays: Arrays, x: np.ndarray, add: bool) -> None:
    graph = shown(arrays, x, [InjectVectors(0, "x"), InjectVectors(0, "x", WIDTH, add)], "x", {"x": WIDTH, "_dim": 2})
    vectors = np.random.default_rng(5).standard_normal((7, 2 * WIDTH)).astype(np.float32)
    results = []
    for order in (None, 0):
        program = program_of(graph, arrays, ROWS, order=order)
        rows = rows_of(program, ROWS)
        rows.vectors, rows.vector_of = vectors, np.array([-1, 6, -1, 2, 6], np.int32)
        results.append(program.run(rows).copy())
        results.append(program.run(rows_of(program, ROWS)).copy())
    assert np.array_equal(results[0], results[2]) and np.array_equal(results[1], results[3])
    assert not np.array_equal(results[0], results[1])
