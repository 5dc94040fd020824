"""The cache of keys and values in every codec, and the rotation of heads: the cpu target against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.records import KvCodec
from edgeq.targets import load
from edgeq.targets.graph import (
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Graph,
    HeadNorm,
    HeadRotate,
    Linear,
    Operation,
    RopeRotate,
    Select,
)
from edgeq.targets.reference.attention import cached
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import ISAS, Arrays, case, rows_of
from tests.targets.test_cpu_kernels import identity


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values side by side in the rows of a table."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    window: int = 0
    sinks: tuple[float, ...] = ()
    cap: float | None = None
    slopes: tuple[float, ...] = ()

    @property
    def widths(self) -> tuple[int, int]:
        return self.heads * self.dim, self.kv_heads * self.dim

    def numbers(self, positions: int, seed: int = 0) -> np.ndarray:
        """Random, but for one dimension of every key that is far from 0, as real keys have."""
        q, k = self.widths
        x = np.random.default_rng(seed).standard_normal((positions, q + 2 * k)).astype(np.float32)
        x[:, q + 3 : q + k : self.dim] += 6
        return x

    def graph(self, arrays: Arrays, x: np.ndarray, changes: tuple[Operation, ...] = ()) -> Graph:
        """Attention over what `changes` make of x, the result as logits."""
        q, k = self.widths
        sinks = arrays.add(np.array(self.sinks, np.float32), "f32") if self.sinks else None
        scale, more = self.dim**-0.5, {"sinks": sinks, "cap": self.cap, "slopes": self.slopes}
        operations = (
            Embed(-1, arrays.add(x.astype(np.float32), "f32"), "x"),
            *changes,
            CacheWrite(1, "x", q, q + k, self.kv_heads, self.dim, cache=1),
            Attention(1, "x", 0, "a", self.heads, self.kv_heads, self.dim, scale, self.window, 1, **more),
            Select(-1, ("a",)),
            Linear(-1, "a", identity(arrays, q), "y"),
        )
        buffers = {"x": q + 2 * k, "a": q, "y": q}
        return Graph(buffers, operations, "y", cache=(CacheSpec(self.kv_heads, self.dim, self.dim),) * 2)

    def turns(self) -> tuple[Operation, ...]:
        frequencies = tuple(1000.0 ** (-2 * i / self.dim) for i in range(self.dim // 2))
        return (
            RopeRotate(1, "x", 0, self.heads, self.dim, frequencies),
            RopeRotate(1, "x", self.widths[0], self.kv_heads, self.dim, frequencies),
        )


def compiled(target: str, graph: Graph, arrays: Arrays, count: int, kv: KvCodec, threads: int = 2, isa: str | None = None):
    return load(target).compile(graph, arrays, Options("a16", threads if target == "cpu" else 0, isa, count, count, 0, kv))


def run(
    target: str, graph: Graph, arrays: Arrays, count: int, kv: KvCodec, chunks: list[int] | None = None, isa: str | None = None
) -> np.ndarray:
    program = compiled(target, graph, arrays, count, kv, isa=isa)
    pages, first, seen = [program.new_page() for _ in range((count - 1) // PAGE + 1)], 0, []
    for part in chunks or [count]:
        seen.append(program.run(rows_of(program, part, first, pages)).copy())
        first += part
    return np.concatenate(seen)


F16, INT8 = KvCodec("f16"), KvCodec("int8")
CODECS = [F16, INT8, *(KvCodec("int4", high) for high in (0, 4, 8, 16)), KvCodec("int4", 4, bits=3)]
DIMS = (32, 64, 80, 128)


@pytest.mark.parametrize("kv", [*CODECS, KvCodec("int4", 3), KvCodec("int4", 20)], ids=lambda kv: kv.name)
def test_a_page_takes_the_bytes_that_its_codec_promises(kv):
    for dim in (20, *DIMS):
        a_page_takes_the_bytes_that_its_codec_promises(kv, dim)


def a_page_takes_the_bytes_that_its_codec_promises(kv, dim):
    shape, arrays = Heads(dim=dim), Arrays()
    graph = shape.graph(arrays, shape.numbers(2))
    page = compiled("cpu", graph, arrays, 2, kv, threads=1).new_page()
    # only whole numbers and those of int8 are padded, to 16 dimensions
    width = -(-dim // 16) * 16
    stored = replace(graph, cache=(CacheSpec(2, width, width),) * 2) if kv.kind != "int4" else graph
    assert page.full.data.nbytes == stored.page_bytes(kv)
    if kv == KvCodec("int4", 8) and dim == 64:
        assert graph.page_bytes(kv) == 2 * 2 * 2 * PAGE * (28 + 8 + 16)


CUT = [(4, 2, 0, 150), (6, 1, 70, 200), (2, 2, 5, 150)]
"""Heads, key heads, a window and positions: units of 18, 30 and 9 queries, which are 6 + 2 + 1."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "positions", "kv", "dim"),
    [
        # Of every two there is one with each other: all pairs, a third of the cases.
        case(*cut, kv, dim, common=(i + j + k) % 3 == 0, id=f"{'-'.join(map(str, cut))}-{kv.name}-{dim}")
        for i, cut in enumerate(CUT)
        for j, kv in enumerate(CODECS)
        for k, dim in enumerate(DIMS)
    ],
)
def test_attention_equals_the_reference_however_it_is_cut(kv, dim, heads, kv_heads, window, positions):
    shape, arrays = Heads(heads, kv_heads, dim, window), Arrays()
    graph = shape.graph(arrays, shape.numbers(positions))
    oracle, y = (run(target, graph, arrays, positions, kv) for target in ("reference", "cpu"))
    # the same numbers are cached: only the order of sums differs
    assert np.abs(y - oracle).max() < 5e-6 * np.abs(oracle).max()
    pieces = run("cpu", graph, arrays, positions, kv, [5, 1, 3, positions - 10, 1])
    assert np.array_equal(y, pieces), "chunks must not change a bit"


SHAPES = Heads(4, 2, 32, 70), Heads(2, 1, 72), Heads(6, 3, 20, 40), Heads(2, 2, 32, 7)


def beside(arrays: Arrays, positions: int) -> tuple[Graph, list[Graph]]:
    """A graph with attention of SHAPES side by side, over a cache with a layer for each, and a graph for each alone."""
    alone, operations, buffers, offset, ends = list[Graph](), list[Operation](), dict[str, int](), 0, 0
    numbers = [shape.numbers(positions, seed) for seed, shape in enumerate(SHAPES)]
    for i, (shape, x) in enumerate(zip(SHAPES, numbers, strict=True)):
        (q, k), heads = shape.widths, (shape.heads, shape.kv_heads, shape.dim)
        alone.append(shape.graph(arrays, x))
        operations.append(CacheWrite(i, "x", offset + q, offset + q + k, shape.kv_heads, shape.dim, cache=i))
        operations.append(Attention(i, "x", offset, f"a{i}", *heads, shape.dim**-0.5, shape.window, cache=i))
        offset, buffers[f"a{i}"] = offset + q + 2 * k, q
    operations.append(Select(-1, tuple(buffers)))
    for name, q in buffers.items():
        operations.append(Linear(-1, name, identity(arrays, q), "y", ends))
        ends += q
    first = Embed(-1, arrays.add(np.concatenate(numbers, axis=1), "f32"), "x")
    cache = tuple(CacheSpec(each.kv_heads, each.dim, each.dim, each.window or None) for each in SHAPES)
    return Graph({"x": offset, **buffers, "y": ends}, (first, *operations), "y", cache), alone


def dropping(program, window: int, chunks: list[int]) -> np.ndarray:
    """The results of runs of `chunks` rows over pages of which what no row sees in layers with a window is dropped."""
    pages, first, seen = [program.new_page() for _ in range((sum(chunks) - 1) // PAGE + 1)], 0, []
    for part in chunks:
        for i in range(max(0, first - window + 1) // PAGE):
            pages[i] = pages[i].without_windows()
        seen.append(program.run(rows_of(program, part, first, pages)).copy())
        first += part
    assert pages[0].windowed is None and pages[-1].windowed is not None
    copied = [program.copy_page(page) for page in pages]
    for page, other in zip(pages, copied, strict=True):
        stored = program.save_page(page)
        loaded = program.load_page(np.frombuffer(stored, np.uint8))
        assert len(stored) == len(program.page_memory(page.windowed is not None))
        assert program.save_page(other) == program.save_page(loaded) == stored
    return np.concatenate(seen)


@pytest.mark.parametrize("kv", [F16, INT8, KvCodec("int4", 4)], ids=lambda kv: kv.name)
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_layers_of_other_shapes_lie_in_pages_together(target, kv):
    arrays, chunks = Arrays(), [80, 1, 60, 40, 19]
    graph, alone = beside(arrays, 200)
    wanted = np.concatenate([run(target, each, arrays, 200, kv, chunks) for each in alone], axis=1)
    assert np.array_equal(run(target, graph, arrays, 200, kv, chunks), wanted)
    assert np.array_equal(dropping(compiled(target, graph, arrays, 200, kv), 70, chunks), wanted)


def test_the_cpu_target_has_no_values_of_another_width():
    graph = Graph({"x": 8, "y": 8}, (), "y", (CacheSpec(1, 8, 4),))
    with pytest.raises(UnsupportedError, match="values of 4 numbers beside keys of 8 yet; run with --target reference"):
        compiled("cpu", graph, Arrays(), 1, F16)


def test_the_portable_kernels_equal_the_reference():
    shape, arrays = Heads(6, 2, 64), Arrays()
    graph, kv = shape.graph(arrays, shape.numbers(100)), KvCodec("int4", 8)
    oracle, y = run("reference", graph, arrays, 100, kv), run("cpu", graph, arrays, 100, kv, isa="portable")
    assert np.abs(y - oracle).max() < 5e-6 * np.abs(oracle).max()


@pytest.mark.parametrize("high", [0, 1, 3, 20])
def test_heads_that_fill_no_vector_are_cached_whole(high):
    shape, arrays = Heads(dim=20), Arrays()
    graph = shape.graph(arrays, shape.numbers(70))
    oracle, y = (run(target, graph, arrays, 70, KvCodec("int4", high)) for target in ("reference", "cpu"))
    assert np.abs(y - oracle).max() < 5e-6 * np.abs(oracle).max()


@pytest.mark.parametrize("kv", CODECS, ids=lambda kv: kv.name)
def test_heads_of_one_number_are_no_division_by_zero(kv):
    for value in (0.0, 3.0, -2.5, 1e-38, 3e38):
        heads_of_one_number_are_no_division_by_zero(kv, value)


def heads_of_one_number_are_no_division_by_zero(kv, value):
    shape, arrays = Heads(), Arrays()
    x = shape.numbers(4)
    x[1:3, shape.widths[0] :] = value
    graph = shape.graph(arrays, x)
    with np.errstate(over="ignore", invalid="ignore"):
        oracle, y = (run(target, graph, arrays, 4, kv) for target in ("reference", "cpu"))
    assert np.isfinite(oracle[0]).all() and np.abs(y[0] - oracle[0]).max() < 1e-5
    if abs(value) < 1e30:
        assert np.isfinite(oracle).all() and np.abs(y - oracle).max() < 1e-5 * max(1, np.abs(oracle).max())


def test_int4_keeps_numbers_to_half_a_step_of_their_range():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((50, 3, 64)) + 4).astype(np.float32)
    x[:, :, 56:] *= 30
    for keys in (True, False):
        error = np.abs(cached(x, KvCodec("int4", 8), keys) - x)
        for part, levels in ((slice(0, 56), 15), (slice(56, 64), 255)):
            least, most = x[:, :, part].min(axis=2), x[:, :, part].max(axis=2)
            if keys:
                least, most = np.minimum(least, 0), np.maximum(most, 0)
            step = (most - least) / levels
            assert (error[:, :, part].max(axis=2) <= step * 0.5001 + 1e-6).all()
            assert (error[:, :, part].max(axis=2) > step * 0.3).mean() > 0.5


@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("high", [0, 8])
@pytest.mark.parametrize("least", [65000.0, 65504.0, 65600.0, 1e30])
def test_int4_limits_both_ends_of_a_range_to_the_numbers_of_f16(least: float, high: int, dim: int) -> None:
    shape, arrays = Heads(dim=dim), Arrays()
    x = shape.numbers(6)
    q, k = shape.widths
    values = x[:, q + k :]
    values[2:4] = np.float32(least) * (1 + np.abs(values[2:4]) / 1000)
    values[3] *= -1
    graph = shape.graph(arrays, x)
    oracle, y = (run(target, graph, arrays, 6, KvCodec("int4", high)) for target in ("reference", "cpu"))
    assert np.isfinite(oracle).all() and np.abs(y - oracle).max() < 5e-6 * np.abs(oracle).max()
    assert np.abs(oracle).max() < 65504.1


def test_int4_with_all_dimensions_high_is_finer_than_int8():
    x = np.random.default_rng(2).uniform(1, 2, (30, 2, 64)).astype(np.float32)
    whole, symmetric = (np.abs(cached(x, kv, False) - x).max() for kv in (KvCodec("int4", 64), INT8))
    assert whole < symmetric < np.abs(cached(x, KvCodec("int4"), False) - x).max()


@pytest.mark.parametrize("kv", CODECS, ids=lambda kv: kv.name)
def test_sessions_in_one_run_give_the_bits_they_give_alone(kv):
    shape, arrays = Heads(), Arrays()
    graph = shape.graph(arrays, shape.numbers(90), shape.turns())
    program = compiled("cpu", graph, arrays, 90, kv)
    lengths, alone = (70, 20), []
    for session, length in enumerate(lengths):
        rows = rows_of(program, length)
        rows.tokens = rows.tokens + np.int32(70 * session)
        alone.append(program.run(rows).copy())
    pages = [[program.new_page() for _ in range(2)] for _ in lengths]
    slots = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    order = np.random.default_rng(3).permutation(90)
    every = np.arange(90, dtype=np.int32)
    sessions = np.repeat(np.arange(2, dtype=np.int32), lengths)
    together = program.run(Rows(every[order], slots[None, order], slots[order], sessions[order], pages, every))
    assert np.array_equal(together[np.argsort(order)], np.concatenate(alone))


@pytest.mark.parametrize("kv", CODECS, ids=lambda kv: kv.name)
def test_what_lay_behind_a_trimmed_cache_leaves_no_trace(kv):
    shape, arrays = Heads(), Arrays()
    graph = shape.graph(arrays, shape.numbers(80))
    program = compiled("cpu", graph, arrays, 80, kv)
    pages = [program.new_page() for _ in range(2)]
    fresh = program.run(rows_of(program, 80, 0, pages)).copy()
    again = program.run(rows_of(program, 50, 30, pages)).copy()
    assert np.array_equal(fresh[30:], again)


@pytest.mark.parametrize("dim", [20, *DIMS])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "head-norm"])
def test_rotated_heads_equal_the_reference(dim, normed):
    rng, shape, arrays = np.random.default_rng(dim), Heads(dim=dim), Arrays()
    matrix = arrays.add(rng.integers(-127, 128, (dim, dim), dtype=np.int8), "i8")
    scale = arrays.add(np.array([0.3 / 127], np.float32), "f32")
    q, k = shape.widths
    where = ((0, shape.heads), (q, shape.kv_heads))
    gain = arrays.add(rng.uniform(0.5, 2, dim).astype(np.float32), "f32")
    norms = tuple(HeadNorm(1, "x", offset, heads, dim, gain, 1e-6) for offset, heads in where) if normed else ()
    spins = tuple(HeadRotate(1, "x", offset, heads, dim, matrix, scale) for offset, heads in where)
    x = shape.numbers(70)
    x[5] = 0
    x[6] = 2
    graph = shape.graph(arrays, x, (*norms, *spins) if normed else (*shape.turns(), *spins))
    for kv in (F16, KvCodec("int4", dim // 8)):
        oracle, y = (run(target, graph, arrays, 70, kv) for target in ("reference", "cpu"))
        # now and then a number lies so near the middle of two codes that the last bit of a norm or an angle decides
        assert np.abs(y - oracle).mean() < 2e-3 * np.abs(oracle).mean()
        assert np.array_equal(y, run("cpu", graph, arrays, 70, kv, [1, 60, 9]))


@pytest.mark.parametrize("dim", [20, *DIMS])
@pytest.mark.parametrize("whole", [True, False], ids=["over all heads", "after the rotation"])
def test_norms_over_all_heads_and_norms_after_the_rotation_equal_the_reference(dim, whole):
    rng, shape, arrays = np.random.default_rng(dim), Heads(dim=dim), Arrays()
    norms = []
    for offset, heads in ((0, shape.heads), (shape.widths[0], shape.kv_heads)):
        size = heads * dim if whole else dim
        gain = arrays.add(rng.uniform(0.2, 3, size).astype(np.float32), "f32")
        norms.append(HeadNorm(1, "x", offset, heads * dim // size, size, gain, 1e-6))
    x = shape.numbers(70)
    x[5] = 0
    turns = shape.turns()
    graph = shape.graph(arrays, x, (*norms, *turns) if whole else (*turns, *norms))
    oracle, y = (run(target, graph, arrays, 70, F16) for target in ("reference", "cpu"))
    assert np.abs(y - oracle).max() < 2e-3 * np.abs(oracle).max()
    assert np.array_equal(y, run("cpu", graph, arrays, 70, F16, [1, 60, 9]))
    # The other order gives other numbers.
    swapped = shape.graph(arrays, x, (*turns, *norms) if whole else (*norms, *turns))
    assert np.abs(run("reference", swapped, arrays, 70, F16) - oracle).max() > 2e-2 * np.abs(oracle).max()
    if whole:
        with pytest.raises(UnsupportedError, match="a norm over several heads after a change of each head"):
            compiled("cpu", swapped, arrays, 70, F16)


@pytest.mark.parametrize("dim", [20, *DIMS])
def test_a_rotation_of_heads_gives_the_bits_of_the_reference(dim):
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
    graph = replace(graph, buffers={"x": width, "y": width}, operations=(*graph.operations[:4], *shown))
    oracle, y = (run(target, graph, arrays, 9, F16) for target in ("reference", "cpu"))
    assert np.array_equal(oracle, y)
    assert np.array_equal(y[:, q + k :], x[:, q + k :])
    exact = x[:, :q].reshape(9, -1, dim) @ (arrays.array(matrix) / 127)
    error = np.abs(y[:, :q].reshape(9, -1, dim) - exact).max(axis=2)
    # a step of 8 bits over the range of a head, at most half of it in each of its numbers
    reach = np.ptp(np.concatenate([x[:, :q].reshape(9, -1, dim), np.zeros((9, shape.heads, 1))], axis=2), axis=2) / 255
    assert (error <= reach * np.abs(arrays.array(matrix) / 127).sum(axis=0).max()).all()


@pytest.mark.parametrize("kv", [F16, INT8], ids=lambda kv: kv.name)
@pytest.mark.parametrize("window", [0, 30])
def test_wanted_rows_alone_read_keys_of_an_earlier_layer(kv, window):
    """Behind the selection their queries are normed and turned by positions of their own, and read a cache of another layer."""
    shape, arrays, positions, rng = Heads(window=window), Arrays(), 90, np.random.default_rng(0)
    x, gain = shape.numbers(positions), arrays.add(rng.uniform(0.5, 2, shape.dim).astype(np.float32), "f32")
    first = shape.graph(arrays, x, shape.turns())
    embed, *turns, write, attention, _, linear = first.operations
    own = [HeadNorm(2, "x", 0, shape.heads, shape.dim, gain, 1e-5), replace(shape.turns()[0], layer=2)]
    behind = (*own, replace(attention, layer=2), linear)
    graph = replace(first, operations=(embed, turns[1], write, Select(-1, ("x",)), *behind))
    before = replace(first, operations=(embed, turns[1], write, *behind[:-1], Select(-1, ("a",)), linear))
    oracle = run("reference", before, arrays, positions, kv)
    assert np.array_equal(run("reference", graph, arrays, positions, kv), oracle)
    y = run("cpu", graph, arrays, positions, kv)
    assert np.abs(y - oracle).max() < (2e-3 if kv == F16 else 0.05) * np.abs(oracle).max()
    assert np.array_equal(run("cpu", graph, arrays, positions, kv, [7, 1, 64, 18]), y)
    assert np.array_equal(run("cpu", before, arrays, positions, kv), y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", [F16, INT8, KvCodec("int4", 4)], ids=lambda kv: kv.name)
@pytest.mark.parametrize("window", [0, 30])
def test_a_sink_takes_its_share_and_gives_nothing(isa, kv, window):
    """Sinks that take nothing, almost all, and what the scores leave; rows one by one have the bits of all at once."""
    shape, arrays = Heads(heads=6, window=window, sinks=(-np.inf, 20.0, 0.5, -3.0, 3.0, -1e38)), Arrays()
    positions, (q, k) = 90, shape.widths
    x = shape.numbers(positions)
    graph = shape.graph(arrays, x)
    oracle, y = run("reference", graph, arrays, positions, kv), run("cpu", graph, arrays, positions, kv, isa=isa)
    assert np.abs(y - oracle).max() < 2e-4
    assert np.array_equal(run("cpu", graph, arrays, positions, kv, [7, 1, 64, 18], isa), y)
    if kv == F16:
        keys, values = (cached(x[:, at : at + k].reshape(-1, 2, 64), kv, keys) for at, keys in ((q, True), (q + k, False)))
        for row, head in ((0, 1), (50, 1), (50, 2), (89, 4), (89, 0)):
            first = max(0, row + 1 - window) if window else 0
            scores = keys[first : row + 1, head // 3] @ x[row, 64 * head : 64 * head + 64].astype(np.float64) / 8
            weights = np.exp(scores - scores.max())
            total = weights.sum() + np.exp(shape.sinks[head] - scores.max())
            wanted = weights @ values[first : row + 1, head // 3] / total
            assert np.abs(y[row, 64 * head : 64 * head + 64] - wanted).max() < 2e-4, (row, head)


@pytest.mark.parametrize("kv", [F16, INT8, KvCodec("int4", 4)], ids=lambda kv: kv.name)
@pytest.mark.parametrize("cap", [0.5, 40.0])
def test_scores_are_capped_before_the_softmax(cap: float, kv: KvCodec) -> None:
    """Some far above the cap, most below."""
    shape, arrays = Heads(heads=6, window=24, cap=cap), Arrays()
    positions, (q, k) = 90, shape.widths
    x = shape.numbers(positions)
    graph = shape.graph(arrays, x)
    oracle, y = run("reference", graph, arrays, positions, kv), run("cpu", graph, arrays, positions, kv)
    assert np.abs(y - oracle).max() < 2e-4
    assert np.array_equal(run("cpu", graph, arrays, positions, kv, [7, 1, 64, 18]), y)
    if kv == F16:
        keys, values = (cached(x[:, at : at + k].reshape(-1, 2, 64), kv, keys) for at, keys in ((q, True), (q + k, False)))
        for row, head in ((50, 2), (89, 4)):
            first = max(0, row + 1 - 24)
            scores = keys[first : row + 1, head // 3] @ x[row, 64 * head : 64 * head + 64].astype(np.float64) / 8
            assert (np.abs(scores).max() > 2 * cap) == (cap < 1)
            weights = np.exp(cap * np.tanh(scores / cap))
            wanted = weights @ values[first : row + 1, head // 3] / weights.sum()
            assert np.abs(y[row, 64 * head : 64 * head + 64] - wanted).max() < 2e-4, (row, head)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kv", [F16, *(pytest.param(kv, marks=pytest.mark.exhaustive) for kv in (INT8, KvCodec("int4", 4)))], ids=lambda kv: kv.name
)
@pytest.mark.parametrize("window", [0, 30])
def test_scores_grow_with_the_slots_of_keys(isa, kv, window):
    """By the slope of each head, of either sign; rows one by one have the bits of all at once."""
    shape, arrays = Heads(heads=6, window=window, slopes=(0.5, 0.25, 1e-3, -0.05, 3.0, 0.0)), Arrays()
    positions, (q, k) = 150, shape.widths
    x = shape.numbers(positions)
    graph = shape.graph(arrays, x)
    oracle, y = run("reference", graph, arrays, positions, kv), run("cpu", graph, arrays, positions, kv, isa=isa)
    assert np.abs(y - oracle).max() < 2e-4
    assert np.array_equal(run("cpu", graph, arrays, positions, kv, [7, 1, 64, 78], isa), y)
    if kv == F16:
        keys, values = (cached(x[:, at : at + k].reshape(-1, 2, 64), kv, keys) for at, keys in ((q, True), (q + k, False)))
        for row, head in ((0, 1), (50, 0), (63, 3), (64, 4), (149, 1), (149, 2), (149, 5)):
            first = max(0, row + 1 - window) if window else 0
            scores = keys[first : row + 1, head // 3] @ x[row, 64 * head : 64 * head + 64].astype(np.float64) / 8
            scores += shape.slopes[head] * (np.arange(first, row + 1) - row)
            weights = np.exp(scores - scores.max())
            wanted = weights @ values[first : row + 1, head // 3] / weights.sum()
            assert np.abs(y[row, 64 * head : 64 * head + 64] - wanted).max() < 2e-4, (row, head)
