"""NaN and infinities: the rows that they reach give results that are not finite, on every target, and no other row changes.

A run checks its logits, so what reaches them is refused; what becomes a finite number on the way there would be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_floats
from edgeq.format.records import Activation, KvCodec, LinearSpec, LowRank, Transform, Weight
from edgeq.targets import load
from edgeq.targets.family_operations import GatedAdd
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Graph,
    HeadNorm,
    HeadRotate,
    LayerNorm,
    Linear,
    NormAdd,
    Operation,
    RmsNorm,
    RopeRotate,
    Scale,
    Select,
)
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import FLOAT_CODECS, HERE, ISAS, Arrays, case, product, run, weight
from tests.targets.products.test_experts import graph_of, inputs

NAN, INF = np.float32(np.nan), np.float32(np.inf)
COUNT = 31
"""Rows that fill tiles of 12, of 4 and of 3 tokens."""
PLANTED = {1: NAN, 13: INF, 17: -INF, 26: NAN, 30: INF}
"""Rows, at least one in each kind of tile, with what is planted there."""


def damaged(x: np.ndarray, planted: dict[int, np.float32], columns: Sequence[int]) -> np.ndarray:
    """A table with the sound rows, and after them the same with one number of some rows replaced."""
    second = x.copy()
    for i, (row, value) in enumerate(planted.items()):
        second[row, columns[i % len(columns)]] = value
    return np.concatenate([x, second]).astype(np.float32)


def differ_only(target: str, graph: Graph, arrays: Arrays, affected: Sequence[int], options: Options) -> None:
    """Runs the sound rows, the damaged ones, and the sound ones again, in which nothing may be left of the others."""
    program, results, count = load(target).compile(graph, arrays, options), [], options.max_rows
    places = np.arange(count, dtype=np.int32)
    pages = [program.new_page() for _ in range((count - 1) // PAGE + 1)]
    for first in (0, count, 0):
        rows = Rows(places + np.int32(first), places[None], places, np.zeros(count, np.int32), [pages], places)
        with np.errstate(all="ignore"):
            results.append(program.run(rows).copy())
    sound, after, again = results
    others = np.setdiff1d(places, affected)
    assert np.isfinite(sound).all() and np.array_equal(sound, again)
    assert not np.isfinite(after[list(affected)]).all(axis=1).any(), target
    assert np.array_equal(after[others], sound[others]), target


def everywhere(graph: Graph, arrays: Arrays, affected: Sequence[int], isas: Sequence[str], mode: str, **options: Any) -> None:
    count = options.pop("count", COUNT)
    for target, isa in [("reference", None), *(("cpu", isa) for isa in isas)]:
        threads = 2 if isa else 0
        differ_only(target, graph, arrays, affected, Options(mode, threads, isa, count, count, **options))  # type: ignore[arg-type]


GROUP, ROW, GROUP16 = Codec("int", 4, 128), Codec("int", 4, 0, False), Codec("int", 8, 16, False)
OFFSET, TWO_LEVELS = Codec("offset", 4, 32), Codec("two-level", 4, 32, False)
HALF, FOUR_BITS, TABLE, TRELLIS = Codec("half", 2, 32), Codec("s4", 2, 32), Codec("table", 4, 32), Codec("trellis", 2, 32)


@pytest.mark.parametrize(
    ("codec", "isa", "mode"),
    [
        case(
            codec,
            isa,
            mode,
            common=(i % 2 == j or j == 2 or codec == GROUP) if not below else codec == GROUP and j == below % 3,
            id=f"{codec.name}-{isa}-{mode}",
        )
        for i, codec in enumerate((GROUP, ROW, GROUP16, HALF, FOUR_BITS, TABLE, TRELLIS, OFFSET, TWO_LEVELS, *FLOAT_CODECS))
        for j, mode in enumerate(("a16", "a8", "a4"))
        for below, isa in enumerate(HERE)
        # What is not on the best set is there in one of the modes.
        if not below or codec == GROUP or (i + j + below) % 3 == 0
    ],
)
def test_products(codec: Codec, mode: str, isa: str) -> None:
    rng, arrays = np.random.default_rng(1), Arrays()
    w = weight(arrays, rng, codec, 40, 272)
    x = damaged(rng.standard_normal((COUNT, 272)).astype(np.float32), PLANTED, (0, 130, 271))
    everywhere(product(arrays, x, w), arrays, list(PLANTED), [isa], mode)
    for row in (0, 1):
        one = product(arrays, x[[row, COUNT + row]], w)
        everywhere(one, arrays, [0] if row in PLANTED else [], [isa], mode, count=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("part", ["token", "symmetric", "thin", "transform", "scale"])
def test_parts_of_a_layer(part: str, isa: str) -> None:
    rng, arrays = np.random.default_rng(2), Arrays()
    columns = 320
    w = weight(arrays, rng, ROW, 37, columns)
    thin = LowRank(*(weight(arrays, rng, Codec("f16"), *shape) for shape in ((37, 5), (5, columns))))
    factors = arrays.add(rng.uniform(0.5, 2, columns).astype(np.float32), "f32")
    parts: dict[str, dict[str, Any]] = {
        "token": {"activation": Activation(4, 0, False)},
        "symmetric": {"activation": Activation(8, 0, True)},
        "thin": {"low_rank": thin},
        "transform": {"transform": Transform(64)},
        "scale": {"input_scale": factors},
    }
    x = damaged(rng.standard_normal((COUNT, columns)).astype(np.float32), PLANTED, (0, 130, 319))
    layer = LinearSpec("layer", (w,), **parts[part])
    operations = (Embed(-1, arrays.add(x, "f32"), "x"), Select(-1, ("x",)), Linear(-1, "x", layer, "y"))
    for mode in ("a8", "a16"):
        everywhere(Graph({"x": columns, "y": 37}, operations, "y", (CacheSpec(1, 2, 2),)), arrays, list(PLANTED), [isa], mode)


WIDTHS = [48, 40]
"""Channels that fill whole vectors, and that do not."""


def row_operations(name: str, arrays: Arrays, width: int) -> tuple[tuple[Operation, ...], str]:
    """Operations on x [rows, 2 * width], the first of which reads its first channels, and the buffer with the result."""
    rng = np.random.default_rng(3)
    gain, bias = (arrays.add(rng.uniform(0.5, 2, width).astype(np.float32), "f32") for _ in range(2))
    wide = arrays.add(rng.uniform(0.5, 2, 2 * width).astype(np.float32), "f32")
    some = arrays.add(np.tile(rng.standard_normal((COUNT, width)).astype(np.float32), (2, 1)), "f32")
    other = Embed(-1, some, "s")
    norm = RmsNorm(0, "s", gain, 1e-5, "n")
    cases: dict[str, tuple[tuple[Operation, ...], str]] = {
        "rms_norm": ((RmsNorm(0, "x", wide, 1e-5, "x2"),), "x2"),
        "layer_norm": ((LayerNorm(0, "x", wide, wide, 1e-5, "x2"),), "x2"),
        "swiglu": ((Activate(0, "x", width, "s"),), "s"),
        "gelu": ((Activate(0, "x", width, "s", "gelu", False),), "s"),
        "quick_gelu": ((Activate(0, "x", width, "s", "quick_gelu", False),), "s"),
        "geglu": ((Activate(0, "x", width, "s", "gelu_pytorch_tanh"),), "s"),
        "relu": ((Activate(0, "x", width, "s", "relu", False),), "s"),
        "relu2": ((Activate(0, "x", width, "s", "relu2", False),), "s"),
        "norm_add": ((Activate(0, "x", width, "n"), other, NormAdd(0, "n", gain, 1e-5, "s"), norm), "n"),
        "gated_add": ((Activate(0, "x", width, "n"), other, GatedAdd(0, "n", "x", "s"), norm), "n"),
        "scale": ((Activate(0, "x", width, "s"), Scale(0, "s", 3.0, "s"), LayerNorm(0, "s", gain, bias, 1e-5, "n")), "n"),
    }
    return cases[name]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("codec", [Codec("f32"), ROW], ids=lambda c: c.name)
@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm", "swiglu", "geglu", "relu", "relu2", "norm_add", "gated_add", "scale"]
)
def test_operations_on_rows(name: str, codec: Codec, width: int) -> None:
    rng, arrays = np.random.default_rng(width), Arrays()
    operations, out = row_operations(name, arrays, width)
    # max(-inf, 0) is 0.
    planted = {row: abs(value) for row, value in PLANTED.items()} if name.startswith("relu") else PLANTED
    # The gate of a gated addition is channel 0, and sigmoid(-inf) is 0.
    columns = (0, 5, 33) if name != "gated_add" else (1, 5, 33)
    x = damaged(rng.standard_normal((COUNT, 2 * width)).astype(np.float32), planted, columns)
    buffers = {"x": 2 * width, "x2": 2 * width, "s": width, "n": width, "y": 20}
    last = Linear(-1, out, LinearSpec("last", (weight(arrays, rng, codec, 20, buffers[out]),)), "y")
    operations = (Embed(-1, arrays.add(x, "f32"), "x"), *operations, Select(-1, (out,)), last)
    everywhere(Graph(buffers, operations, "y", (CacheSpec(1, 2, 2),)), arrays, list(PLANTED), HERE[:1], "a8")


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "norm_add"])
def test_squares_that_overflow_do_not_make_zeros(name: str) -> None:
    arrays, width = Arrays(), 48
    operations, out = row_operations(name, arrays, width)
    x = damaged(np.random.default_rng(4).standard_normal((COUNT, 2 * width)), {}, (0,))
    x[COUNT + 3] *= np.float32(1e25)
    buffers = {"x": 2 * width, "x2": 2 * width, "s": width, "n": width, "y": 20}
    last = Linear(-1, out, LinearSpec("last", (weight(arrays, np.random.default_rng(4), ROW, 20, buffers[out]),)), "y")
    operations = (Embed(-1, arrays.add(x, "f32"), "x"), *operations, Select(-1, (out,)), last)
    graph = Graph(buffers, operations, "y", (CacheSpec(1, 2, 2),))
    everywhere(graph, arrays, [3], HERE[:1], "a8")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", ["a16", "a8", "a4"])
def test_gate_and_up_in_one_pass(mode: str, isa: str) -> None:
    rng, arrays = np.random.default_rng(5), Arrays()
    gain = arrays.add(rng.uniform(0.5, 2, 256).astype(np.float32), "f32")
    w, v = weight(arrays, rng, GROUP, 512, 256), weight(arrays, rng, GROUP, 40, 256)
    x = damaged(rng.standard_normal((COUNT, 256)).astype(np.float32), PLANTED, (0, 130, 255))
    operations = (
        Embed(-1, arrays.add(x, "f32"), "x"),
        RmsNorm(0, "x", gain, 1e-5, "n"),
        Linear(0, "n", LinearSpec("gate_up", (w,)), "g"),
        Activate(0, "g", 256, "i"),
        Select(-1, ("i",)),
        Linear(-1, "i", LinearSpec("down", (v,)), "y"),
    )
    graph = Graph({"x": 256, "n": 256, "g": 512, "i": 256, "y": 40}, operations, "y", (CacheSpec(1, 2, 2),))
    everywhere(graph, arrays, list(PLANTED), [isa], mode)


CACHES = [KvCodec("f16"), KvCodec("int8"), KvCodec("int4"), KvCodec("int4", 4), KvCodec("int4", 20)]


@pytest.mark.parametrize(
    ("kv", "dim", "change"),
    [
        case(kv, dim, change, common=(i + j) % 3 == k, id=f"{kv.name}-{dim}-{change}")
        for i, kv in enumerate(CACHES)
        for j, dim in enumerate((20, 32))
        for k, change in enumerate(("none", "norm", "rotate"))
    ],
)
def test_cache_and_attention(kv: KvCodec, dim: int, change: str) -> None:
    """What a key or a value brings reaches the rows that see it, and not those before it, which read the same page."""
    heads, kv_heads, window, count = 4, 2, 30, 90
    q, k = heads * dim, kv_heads * dim
    rng = np.random.default_rng(dim)
    numbers = rng.standard_normal((count, q + 2 * k)).astype(np.float32)
    for place, value in ((0, NAN), (5, INF), (q + 1, NAN), (q + k - 1, INF), (q + k, NAN), (q + 2 * k - 1, INF), (q + k, -INF)):
        arrays = Arrays()
        matrix = arrays.add(rng.integers(-127, 128, (dim, dim), dtype=np.int8), "i8")
        scale, gain = (arrays.add(rng.uniform(0.5, 1, n).astype(np.float32), "f32") for n in (1, dim))
        frequencies = tuple(100.0 ** (-2 * i / dim) for i in range(dim // 2))
        both = ((0, heads), (q, kv_heads))
        changes: list[Operation] = [HeadNorm(0, "x", at, n, dim, gain, 1e-5) for at, n in both] if change == "norm" else []
        changes += [RopeRotate(0, "x", at, n, dim, frequencies) for at, n in both]
        changes += [HeadRotate(0, "x", at, n, dim, matrix, scale) for at, n in both] if change == "rotate" else []
        x, row = damaged(numbers, {41: value}, (place,)), 41
        operations = (
            Embed(-1, arrays.add(x, "f32"), "x"),
            *changes,
            CacheWrite(0, "x", q, q + k, kv_heads, dim, cache=0),
            Attention(0, "x", 0, "a", heads, kv_heads, dim, dim**-0.5, window, cache=0),
            Select(-1, ("a",)),
            Linear(-1, "a", LinearSpec("last", (weight(arrays, rng, ROW, 20, q),)), "y"),
        )
        graph = Graph({"x": q + 2 * k, "a": q, "y": 20}, operations, "y", (CacheSpec(kv_heads, dim, dim),))
        affected = [row] if place < q else list(range(row, row + window))
        everywhere(graph, arrays, affected, HERE[:1], "a8", kv=kv, count=count)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("codec", [Codec("f32"), Codec("int", 4, 16)], ids=lambda c: c.name)
def test_experts(codec: Codec, normalized: bool) -> None:
    """Every logit of the router is NaN or infinite in the damaged rows, then a single one is."""
    arrays = Arrays()
    x = damaged(inputs(COUNT), PLANTED, (0, 17, 63))
    graph = graph_of(arrays, codec, x, 6, 4, normalized)
    for mode in ("a16", "a8"):
        everywhere(graph, arrays, list(PLANTED), HERE[:1], mode)
    router = damaged(np.random.default_rng(6).standard_normal((COUNT, 6)).astype(np.float32), PLANTED, (0, 3, 5))
    sound = np.concatenate([inputs(COUNT)] * 2)
    operations = list(graph.operations)
    operations[0], operations[3] = (Embed(-1, arrays.add(sound, "f32"), out) for out in ("x", "out"))
    operations[1] = Embed(-1, arrays.add(router, "f32"), "router")
    graph = Graph(graph.buffers, tuple(operations), "y", (CacheSpec(1, 2, 2),))
    everywhere(graph, arrays, list(PLANTED), HERE[:1], "a8")


@pytest.mark.parametrize("kv", [KvCodec("f16"), KvCodec("int8"), KvCodec("int4", 4, 3)], ids=lambda kv: kv.name)
@pytest.mark.parametrize("window", [0, 1])
def test_scores_so_low_that_unseen_positions_would_count_give_nan(window: int, kv: KvCodec) -> None:
    """-1e30 marks what a query does not see: scores below it let numbers of unseen positions, even of other texts, in."""
    rng, heads, dim = np.random.default_rng(6), 2, 16
    width = heads * dim
    for size, lost in ((1e30, False), (3e31, True), (1e35, True)):
        arrays = Arrays()
        x = np.abs(rng.standard_normal((9, width + 2 * dim))).astype(np.float32) + 0.1
        # Queries of one sign and keys of the other, which lie in the range of f16: scores are near -0.1 * size ... -4 * size.
        x[:, :width] *= -np.float32(size / 10)
        x[:, width : width + dim] *= 0.3
        eye = pack_floats(np.eye(width, dtype=np.float32), "f32")
        last = LinearSpec("last", (Weight(Codec("f32"), width, width, {"q": arrays.add(eye, "f32")}),))
        operations = (
            Embed(-1, arrays.add(x, "f32"), "x"),
            CacheWrite(0, "x", width, width + dim, 1, dim, 0),
            Attention(0, "x", 0, "a", heads, 1, dim, dim**-0.5, window, 0),
            Select(-1, ("a",)),
            Linear(-1, "a", last, "y"),
        )
        graph = Graph({"x": width + 2 * dim, "a": width, "y": width}, operations, "y", (CacheSpec(1, dim, dim),))
        for target in ("reference", "cpu"):
            with np.errstate(all="ignore"):
                y = run(target, graph, arrays, 9, Options("a16", 2 if target == "cpu" else 0, kv=kv))
            assert np.isnan(y).all() if lost else np.isfinite(y).all(), (target, size)
