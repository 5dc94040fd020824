"""The parts of a linear layer: the emulated device against the reference, a row alone against the row among others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_floats
from edgeq.format.records import Activation, LinearSpec, SplitRow, Transform, Weight
from edgeq.targets.graph import Activate, CacheSpec, Embed, Graph, Linear, Scale
from edgeq.targets.reference.linear import transformed
from tests.cuda.comparing import both, program_of, read
from tests.cuda.emulated import BACKWARD, SHUFFLED
from tests.targets.cases import Arrays, matrix, recording, rows_of, weight
from tests.targets.products.test_constant_scales import COUNT, MODALITY, SCALES, network
from tests.targets.products.test_cpu_linear import (
    I4,
    I8,
    NARROW,
    ORDERS,
    ROW4,
    ROW8,
    WIDE,
    graph_of,
    layer,
    size_of,
    whole_numbers,
)

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

A16, INTEGER = 1e-3, 2e-6
"""Largest errors, of the size that the tests of the cpu target measure them by."""
PARTS: dict[str, dict[str, Any]] = {
    "input_scale": {"scale": True},
    "input_order": {"order": True},
    "low_rank": {"low_rank": (Codec("f16"), 16), "bias": True},
    "thin": {"low_rank": (Codec("bf16"), 3)},
    "thin f32": {"low_rank": (Codec("f32"), 5), "scale": True, "order": True},
    "token": {"activation": Activation(4, 0, False)},
    "token 8": {"activation": Activation(8, 0, False), "scale": True},
    "token symmetric": {"activation": Activation(5, 0, True)},
    "transform": {"transform": Transform(64)},
    "transform and scale": {"transform": Transform(64), "scale": True},
    "transform and all": {
        "transform": Transform(16), "scale": True, "order": True, "bias": True, "activation": NARROW,
        "low_rank": (Codec("f16"), 4),
    },
}  # fmt: skip


def agree(arrays: Arrays, x: np.ndarray, *layers: LinearSpec, mode: Any, tolerance: float) -> np.ndarray:
    graph = graph_of(arrays, x, *layers)
    oracle, y = both(graph, arrays, len(x), mode=mode)
    assert np.max(np.abs(y - oracle) / size_of(arrays, x, *layers)) < tolerance, mode
    alone = program_of(graph, arrays, len(x), mode, order=SHUFFLED)
    assert np.array_equal(read(alone, len(x), [1, len(x) - 2, 1]), y), "a row alone must give the same bits as among others"
    return y


@pytest.mark.parametrize(("codec", "columns"), [(I4, 192), (I8, 64), (ROW4, 320), (Codec("f16"), 64)], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_every_part_equals_the_reference(name: str, codec: Codec, columns: int) -> None:
    rng, arrays = np.random.default_rng(columns), Arrays()
    each = layer(arrays, rng, 37, [(codec, columns)], **PARTS[name])
    x = whole_numbers(rng, 19, columns)
    for mode in ("a16", "a8"):
        # Blocks of 8 bits hold these numbers only nearly: now and then a last bit turns a code.
        exact = each.activation or codec.kind != "int"
        agree(arrays, x, each, mode=mode, tolerance=A16 if mode == "a16" else INTEGER if exact else 2e-3)


@pytest.mark.parametrize("codec", [ROW4, Codec("int", 4, 16, False), Codec("bf16")], ids=lambda c: c.name)
@pytest.mark.parametrize("mode", ["a16", "a8"])
def test_a_row_has_the_same_bits_alone_and_among_8_17_64_70_and_200(codec: Codec, mode: Any) -> None:
    rng, arrays = np.random.default_rng(9), Arrays()
    parts: dict[str, Any] = {**PARTS["transform and all"], "activation": WIDE}
    each = layer(arrays, rng, 21, [(codec, 176), (ROW8, 16)], **parts)
    x = rng.standard_normal((200, 192)).astype(np.float32)
    program = program_of(graph_of(arrays, x, each), arrays, 200, mode)
    whole = read(program, 200)
    for count in (1, 8, 17, 64, 70):
        rows = rows_of(program, count, 200 - count, [program.new_page() for _ in range(4)])
        assert np.array_equal(program.run(rows), whole[200 - count :]), count


@pytest.mark.parametrize("low, high", [(112, 16), (160, 33), (3, 300)])
def test_two_blocks_are_added_with_a_scale_of_their_own_each(low: int, high: int) -> None:
    rng, arrays = np.random.default_rng(low), Arrays()
    x = rng.standard_normal((18, low + high)).astype(np.float32)
    x[:, low:] *= 20
    layers = [
        layer(arrays, rng, 33, [(ROW4, low), (ROW8, high)], activation=WIDE, order=True, bias=True, scale=True),
        layer(arrays, rng, 20, [(ROW4, low), (Codec("f16"), high)], activation=replace(WIDE, symmetric=True)),
    ]
    for mode in ("a16", "a8", "a4"):
        agree(arrays, x, *layers, mode=mode, tolerance=A16 if mode == "a16" else INTEGER)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (37, 33), (5, 301)])
def test_weights_of_floats(kind: Any, rows: int, columns: int) -> None:
    rng, arrays = np.random.default_rng(rows), Arrays()
    each = layer(arrays, rng, rows, [(Codec(kind), columns)], bias=True)
    x = rng.standard_normal((70, columns)).astype(np.float32)
    for mode in ("a16", "a8"):
        agree(arrays, x, each, mode=mode, tolerance=INTEGER)


@pytest.mark.parametrize("codec", [ROW4, Codec("int", 4, 16, False), Codec("int", 3, 128, False)], ids=lambda c: c.name)
def test_token_activations_of_every_width_and_of_extreme_rows(codec: Codec) -> None:
    rng, arrays = np.random.default_rng(2), Arrays()
    x = rng.standard_normal((9, 208)).astype(np.float32)
    x[0], x[1, 5] = 0, 1e6
    x[2], x[3] = -np.abs(x[2]), np.abs(x[3])
    x[4], x[4, 207] = 0, -3
    x[5], x[6] = 1e-33, x[6] * 1e25
    for bits in range(2, 9):
        for symmetric in (True, False):
            each = layer(arrays, rng, 19, [(codec, 208)], activation=Activation(bits, 0, symmetric))
            oracle, y = both(graph_of(arrays, x, each), arrays, 9, mode="a4")
            size = np.abs(x).max(1, keepdims=True) * np.abs(matrix(arrays, each.weights[0])).sum(1) + 1e-30
            assert np.max(np.abs(y - oracle) / size) < INTEGER, (bits, symmetric)
            assert not y[0].any() and not y[5].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["token", "token 8", "transform and all"])
def test_a_token_that_is_not_finite_becomes_nan_and_no_other(name: str, bad: float) -> None:
    rng, arrays = np.random.default_rng(3), Arrays()
    each = layer(arrays, rng, 20, [(ROW4, 64)], **PARTS[name])
    x = whole_numbers(rng, 4, 64)
    x[2, 40] = bad
    _, y = both(graph_of(arrays, x, each), arrays, 4, mode="a8")
    assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()


@pytest.mark.parametrize("size, order, stride, runs", [*ORDERS, (16384, 1, 1, 1)])
def test_transform_of_every_order_equals_its_matrix(size: int, order: int, stride: int, runs: int) -> None:
    rng, arrays, columns = np.random.default_rng(size), Arrays(), size * stride * runs
    base = None
    if order > 1:
        base = (np.linalg.qr(rng.standard_normal((order, order)))[0] * np.sqrt(order)).astype(np.float32)
    part = Transform(size, stride, None if base is None else arrays.add(base, "f32"))
    x = rng.standard_normal((3, columns)).astype(np.float32)
    shown = rng.choice(columns, min(columns, 48), replace=False)
    picks = np.zeros((len(shown), columns), np.float32)
    picks[np.arange(len(shown)), shown] = 1
    w = Weight(Codec("f32"), *picks.shape, {"q": arrays.add(pack_floats(picks, "f32"), "f32")})
    turn = rng.permutation(columns).astype(np.int32)
    for ordered in (False, True):
        spec = LinearSpec("layer", (w,), transform=part, input_order=arrays.add(turn, "i32") if ordered else None)
        wanted = transformed(x[:, turn] if ordered else x, part, base)
        graph = graph_of(arrays, x, spec)
        for thread_order in (0, BACKWARD):
            y = read(program_of(graph, arrays, 3, order=thread_order), 3)
            assert np.abs(y - wanted[:, shown]).max() < 3e-5


@pytest.mark.parametrize(("codec", "dtype", "index", "parts"), [
    (Codec("f32"), "f32", 5, {}),
    (Codec("int", 4, 32, False), "f16", 0, {"transform": Transform(32)}),
    (Codec("int", 8, 0, True), "f32", 63, {}),
])  # fmt: skip
def test_a_channel_whose_weights_are_kept_apart(codec: Codec, dtype: str, index: int, parts: dict[str, Any]) -> None:
    rng, arrays = np.random.default_rng(index), Arrays()
    row = arrays.add(rng.standard_normal(37).astype(np.float16 if dtype == "f16" else np.float32), dtype)
    each = LinearSpec("l", (weight(arrays, rng, codec, 37, 64),), split_row=SplitRow(index, row), **parts)
    operations = (
        Embed(-1, arrays.add(rng.standard_normal((19, 64)).astype(np.float32), "f32"), "x"),
        Activate(0, "x", 64, "active", "silu", False),
        Linear(0, "active", each, "y", 3),
        Linear(0, "active", each, "y", 3, add=True),
    )
    graph = Graph({"x": 64, "active": 64, "y": 42}, operations, "y", (CacheSpec(1, 2, 2),))
    oracle, y = both(graph, arrays, 19)
    assert np.abs(y - oracle).max() < A16 * np.abs(oracle).max()
    assert not y[:, :3].any() and not y[:, 40:].any()


@pytest.mark.parametrize(("codec", "scales", "transform"), [
    (Codec("int", 4, 0), SCALES, 0), (Codec("int", 8, 0), SCALES[:1], 32), (Codec("int", 4, 64, False), SCALES, 32),
])  # fmt: skip
def test_constant_scales_by_modality(codec: Codec, scales: tuple[float, ...], transform: int) -> None:
    arrays = Arrays()
    graph = network(arrays, scales, codec, transform)
    oracle, y = (read(program_of(graph, arrays, COUNT, "a8", order=order), COUNT, modality=MODALITY) for order in (None, 0))
    # An activation exactly between two integers may fall to either side.
    assert np.abs(y - oracle).max() < 0.02 * np.abs(oracle).max()
    assert np.median(np.abs(y - oracle)) < 1e-5 * np.abs(oracle).max()


def test_layers_of_the_same_parts_share_what_is_made_of_their_input() -> None:
    rng, arrays = np.random.default_rng(6), Arrays()
    x = whole_numbers(rng, 5, 64)
    parts: dict[str, Any] = {"transform": Transform(64), "activation": NARROW}
    same = [layer(arrays, rng, 16, [(ROW4, 64)], **parts) for _ in range(3)]
    other = layer(arrays, rng, 16, [(ROW4, 64)], **parts, scale=True)
    graph = graph_of(arrays, x, *same, other)
    program = program_of(graph, arrays, 5, "a8")
    with recording(program) as times:
        program.run(rows_of(program, 5))
    made = [re.split(r"_\d", step.kernel)[0] for step in times[0].steps]
    quantized = "quantize_input_token"
    assert made == ["butterflies", quantized, *["matvec"] * 3, "butterflies", "arrange", quantized, "matvec"]
    agree(arrays, x, *same, other, mode="a8", tolerance=INTEGER)
    # What was made of an input is made again once the input has changed.
    changed = replace(graph, operations=(*graph.operations[:2], Scale(0, "x", 0.5, "x"), *graph.operations[2:]))
    oracle, y = both(changed, arrays, 5, mode="a8")
    assert np.max(np.abs(y - oracle) / size_of(arrays, x, *same, other)) < INTEGER
