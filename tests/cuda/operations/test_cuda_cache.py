"""The cache of keys and values in every codec, and rotated heads: the emulated device against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.records import KvCodec
from edgeq.targets.graph import Attention, HeadNorm, HeadRotate, Linear, Select
from edgeq.targets.rows import PAGE
from tests.cuda.comparing import both, program_of, read
from tests.cuda.emulated import SHUFFLED
from tests.targets.cases import Arrays, rows_of
from tests.targets.test_cache import Heads, beside, dropping
from tests.targets.test_cpu_kernels import identity

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

F16, INT8 = KvCodec(), KvCodec("int8")
CODECS = [F16, INT8, *(KvCodec("int4", high) for high in (0, 3, 8)), KvCodec("int4", 8, bits=2), KvCodec("int4", 0, bits=3)]
WHOLE = KvCodec("int4", 20)
"""All dimensions of a head of 20 in 8 bits."""
TOLERANCE = 5e-6


@pytest.mark.parametrize("dim", [20, 32, 72])
@pytest.mark.parametrize("kv", [*CODECS, WHOLE], ids=lambda kv: kv.name)
@pytest.mark.parametrize("heads, kv_heads, window, positions", [(4, 2, 0, 70), (6, 1, 70, 150), (2, 2, 5, 65)])
def test_attention_equals_the_reference_however_it_is_cut(
    kv: KvCodec, dim: int, heads: int, kv_heads: int, window: int, positions: int
) -> None:
    shape, arrays = Heads(heads, kv_heads, dim, window), Arrays()
    graph = shape.graph(arrays, shape.numbers(positions))
    oracle, y = both(graph, arrays, positions, kv=kv)
    # The same numbers are cached: only the order of sums differs.
    assert np.abs(y - oracle).max() < TOLERANCE * np.abs(oracle).max()
    program = program_of(graph, arrays, positions, kv=kv, order=SHUFFLED)
    assert np.array_equal(read(program, positions, [5, 1, 3, positions - 10, 1]), y), "chunks must not change a bit"
    assert graph.page_bytes(kv) == len(program.save_page(program.new_page()))


@pytest.mark.parametrize("dim", [260, 512])
def test_wide_heads_whose_values_no_registers_hold(dim: int) -> None:
    shape, arrays, positions = Heads(4, 2, dim), Arrays(), 70
    x = shape.numbers(positions)
    q, k = shape.widths
    oracle, y = both(shape.graph(arrays, x), arrays, positions)
    assert np.abs(y - oracle).max() < TOLERANCE * np.abs(oracle).max()
    program = program_of(shape.graph(arrays, x), arrays, positions, order=SHUFFLED)
    assert np.array_equal(read(program, positions, [1, 5, positions - 6]), y), "chunks must not change a bit"
    # The last dimension of the last head.
    x[66, q + 2 * k - 1] = np.inf
    oracle, bad = both(shape.graph(arrays, x), arrays, positions)
    assert np.array_equal(np.isnan(bad), np.isnan(oracle)) and np.isnan(bad[66:]).any(axis=1).all()
    assert np.array_equal(bad[:66], y[:66])


@pytest.mark.parametrize("window", [0, 30])
def test_a_sink_takes_its_share_and_gives_nothing(window: int) -> None:
    """Sinks that take nothing, almost all, all, and what the scores leave."""
    shape, arrays, positions = Heads(8, 2, 64, window, (-np.inf, 20.0, 0.5, -3.0, 3.0, -1e38, 1e30, 100.0)), Arrays(), 90
    graph = shape.graph(arrays, shape.numbers(positions))
    oracle, y = both(graph, arrays, positions)
    assert np.isfinite(y).all() and np.abs(y - oracle).max() < TOLERANCE * np.abs(oracle).max()
    heads = np.abs(y.reshape(positions, 8, 64)).max(axis=(0, 2))
    assert heads[0] > 1 and heads[1] < 0.1 and heads[6] == 0
    program = program_of(graph, arrays, positions, order=SHUFFLED)
    assert np.array_equal(read(program, positions, [5, 1, 3, positions - 10, 1]), y), "chunks must not change a bit"


SLOPES = (0.5, 0.25, 1e-3, -0.05, 3.0, 0.0)
"""Those of six heads, as many as are no power of two."""


@pytest.mark.parametrize(
    ("shape", "kv"),
    [
        (Heads(6, 2, 64, window=70, cap=0.5), F16),
        (Heads(6, 2, 32, slopes=SLOPES), F16),
        (Heads(6, 1, 32, window=70, cap=1.5, slopes=SLOPES), KvCodec("int4", 3)),
    ],
    ids=["cap", "slopes", "both"],
)
def test_a_cap_and_slopes_of_scores(shape: Heads, kv: KvCodec) -> None:
    """Before the softmax: a cap of what is scaled, then slopes, each with its sign and of its own head."""
    arrays, positions = Arrays(), 150
    x = shape.numbers(positions)
    graph = shape.graph(arrays, x)
    oracle, y = both(graph, arrays, positions, kv=kv)
    largest = np.abs(oracle).max()
    assert np.abs(y - oracle).max() < TOLERANCE * largest
    program = program_of(graph, arrays, positions, kv=kv, order=SHUFFLED)
    assert np.array_equal(read(program, positions, [5, 1, 3, positions - 10, 1]), y), "chunks must not change a bit"
    wrong = list[Heads]()
    if shape.cap:
        wrong += [replace(shape, cap=cap) for cap in (None, shape.cap * shape.dim**-0.5)]
    if shape.slopes:
        wrong += [replace(shape, slopes=slopes) for slopes in ((), tuple(-s for s in SLOPES), tuple(sorted(SLOPES)))]
    for other in wrong:
        found = read(program_of(other.graph(arrays, x), arrays, positions, kv=kv, order=None), positions)
        assert np.abs(found - oracle).max() > 0.05 * largest


@pytest.mark.parametrize("sink", [0.0, -np.inf])
def test_scores_that_are_all_masked_leave_nothing_beside_a_sink(sink: float) -> None:
    """And NaN beside none, as one that is masked itself is."""
    shape, arrays = Heads(2, 1, 32, sinks=(sink, sink)), Arrays()
    x = np.abs(shape.numbers(3))
    x[1, : shape.widths[0]] = -1e32
    oracle, y = both(shape.graph(arrays, x), arrays, 3)
    for found in (oracle, y):
        assert np.isfinite(found[[0, 2]]).all() and (np.isnan(found[1]).all() if sink else not found[1].any())


@pytest.mark.parametrize("kv", [F16, INT8, KvCodec("int4", 4)], ids=lambda kv: kv.name)
def test_layers_of_other_shapes_lie_in_pages_together(kv: KvCodec) -> None:
    arrays, chunks = Arrays(), [80, 1, 60, 40, 19]
    graph, alone = beside(arrays, 200)
    wanted = np.concatenate([read(program_of(each, arrays, 200, kv=kv), 200, chunks) for each in alone], axis=1)
    assert np.array_equal(dropping(program_of(graph, arrays, 200, kv=kv), 70, chunks), wanted)


@pytest.mark.parametrize("kv", CODECS, ids=lambda kv: kv.name)
@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-38, 3e38, 65504.0, 65600.0])
def test_heads_of_one_number_are_no_division_by_zero(kv: KvCodec, value: float) -> None:
    shape, arrays = Heads(2, 1, 32), Arrays()
    x = shape.numbers(4)
    x[1:3, shape.widths[0] :] = value
    oracle, y = both(shape.graph(arrays, x), arrays, 4, kv=kv)
    assert np.isfinite(oracle[0]).all() and np.abs(y[0] - oracle[0]).max() < 1e-5
    if abs(value) < 1e30:
        assert np.isfinite(oracle).all() and np.abs(y - oracle).max() < 1e-5 * max(1, np.abs(oracle).max())


@pytest.mark.parametrize("kv", CODECS, ids=lambda kv: kv.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_position_that_is_not_finite_reaches_the_rows_that_see_it_alone(kv: KvCodec, bad: float, part: int) -> None:
    shape, arrays = Heads(2, 1, 32, window=3), Arrays()
    x = shape.numbers(9)
    q, k = shape.widths
    x[4, q + part * k + 5] = bad
    oracle, y = both(shape.graph(arrays, x), arrays, 9, kv=kv)
    seen = np.isin(np.arange(9), (4, 5, 6))
    assert np.isnan(y[seen]).any(axis=1).all() and np.isfinite(y[~seen]).all()
    assert np.array_equal(np.isnan(y), np.isnan(oracle))


@pytest.mark.parametrize("kv", [F16, INT8, KvCodec("int4", 8)], ids=lambda kv: kv.name)
def test_spans_of_slots(kv: KvCodec) -> None:
    """Rows see what they are told to, also later slots of the same run."""
    shape, arrays, count = Heads(4, 2, 32), Arrays(), 70
    graph = shape.graph(arrays, shape.numbers(count))
    graph = replace(graph, operations=tuple(
        replace(op, span=1) if isinstance(op, Attention) else op for op in graph.operations
    ))  # fmt: skip
    rng = np.random.default_rng(0)
    spans = np.zeros((2, 2, count), np.int32)
    spans[1, 0] = rng.integers(0, count, count)
    spans[1, 1] = [rng.integers(first, count) + 1 for first in spans[1, 0]]
    results = []
    for order in (None, 0):
        program = program_of(graph, arrays, count, kv=kv, order=order)
        results.append(program.run(replace(rows_of(program, count), spans=spans)).copy())
    assert np.abs(results[1] - results[0]).max() < TOLERANCE * np.abs(results[0]).max()


@pytest.mark.parametrize("kv", CODECS, ids=lambda kv: kv.name)
def test_pages_are_saved_and_what_lay_after_a_trimmed_cache_leaves_no_trace(kv: KvCodec) -> None:
    shape, arrays = Heads(2, 1, 32), Arrays()
    graph = shape.graph(arrays, shape.numbers(80))
    program = program_of(graph, arrays, 80, kv=kv)
    pages = [program.new_page() for _ in range(80 // PAGE + 1)]
    fresh = program.run(rows_of(program, 80, 0, pages)).copy()
    assert np.array_equal(program.run(rows_of(program, 50, 30, pages)), fresh[30:])
    pages = [program.load_page(np.frombuffer(program.save_page(page), np.uint8)) for page in pages]
    assert np.array_equal(program.run(rows_of(program, 10, 70, pages)), fresh[70:])


@pytest.mark.parametrize("dim", [32, 72])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "head-norm"])
def test_rotated_heads_equal_the_reference(dim: int, normed: bool) -> None:
    rng, shape, arrays = np.random.default_rng(dim), Heads(dim=dim), Arrays()
    matrix = arrays.add(rng.integers(-127, 128, (dim, dim), dtype=np.int8), "i8")
    scale = arrays.add(np.array([0.3 / 127], np.float32), "f32")
    where = ((0, shape.heads), (shape.widths[0], shape.kv_heads))
    gain = arrays.add(rng.uniform(0.5, 2, dim).astype(np.float32), "f32")
    norms = tuple(HeadNorm(1, "x", offset, heads, dim, gain, 1e-6) for offset, heads in where) if normed else shape.turns()
    spins = tuple(HeadRotate(1, "x", offset, heads, dim, matrix, scale) for offset, heads in where)
    x = shape.numbers(70)
    x[5], x[6] = 0, 2
    graph = shape.graph(arrays, x, (*norms, *spins))
    for kv in (F16, KvCodec("int4", dim // 8)):
        oracle, y = both(graph, arrays, 70, kv=kv)
        # Now and then a number lies so near the middle of two codes that the last bit of a norm or an angle decides.
        assert np.abs(y - oracle).mean() < 2e-3 * np.abs(oracle).mean()
        assert np.array_equal(y, read(program_of(graph, arrays, 70, kv=kv), 70, [1, 60, 9]))


@pytest.mark.parametrize("dim", [32, 72, 128])
def test_a_rotation_of_heads_gives_the_bits_of_the_reference(dim: int) -> None:
    rng, shape, arrays = np.random.default_rng(4), Heads(dim=dim), Arrays()
    matrix = arrays.add(rng.integers(-127, 128, (dim, dim), dtype=np.int8), "i8")
    scale = arrays.add(np.array([1 / 127], np.float32), "f32")
    q, k = shape.widths
    x = shape.numbers(9) * 100
    x[1], x[2], x[3] = 0, 5, -5
    spins = (HeadRotate(1, "x", 0, shape.heads, dim, matrix, scale), HeadRotate(1, "x", q, shape.kv_heads, dim, matrix, scale))
    graph = shape.graph(arrays, x, spins)
    width = q + 2 * k
    shown = (Select(-1, ("x",)), Linear(-1, "x", identity(arrays, width), "y"))
    graph = replace(graph, buffers={"x": width, "y": width}, operations=(*graph.operations[:3], *shown))
    oracle, y = both(graph, arrays, 9)
    assert np.array_equal(oracle, y)
