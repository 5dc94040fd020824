"""Requantized weights: the rule, the kernel over the order of the file, and the sums that the scales follow from."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import Codec, dequantize, pack_floats, unpack_groups, unpack_integers
from edgeq.format.quantization import rounded
from edgeq.format.records import LinearSpec, Weight
from edgeq.targets import load
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Scale, Select
from edgeq.targets.requantization import HostWeights, InputSums, shared_inputs
from edgeq.targets.target import Options
from tests.targets.cases import Arrays, matrix, rows_of

CODECS = [
    Codec("int", 2, 16, False), Codec("int", 3, 32), Codec("int", 4, 32, False), Codec("int", 5, 64, False),
    Codec("int", 6, 128), Codec("int", 7, 0, False), Codec("int", 8, 16, False), Codec("int", 4, 0),
]  # fmt: skip
MASTERS = [Codec("int", 8, 128), Codec("int", 8, 0, False), Codec("bf16"), Codec("f16"), Codec("f32")]


class File(Arrays):
    """Arrays in memory that a program may want to let go of."""

    def pages(self, ref):
        return 0, 0


def stored(file: File, w: np.ndarray, codec: Codec) -> Weight:
    parts = rounded(w, codec) if codec.kind == "int" else {"q": pack_floats(w, codec.kind)}
    dtypes = {"q": "u8" if codec.kind == "int" else codec.kind, "scale": "f16", "zero": "u8"}
    refs = {name: file.add(a, dtypes[name]) for name, a in parts.items()}
    return Weight(codec, *w.shape, refs)


def layer(file: File, name: str, w: np.ndarray, codec: Codec, master: Codec) -> LinearSpec:
    kept = stored(file, w, master)
    return LinearSpec(name, (stored(file, matrix(file, kept), codec),), master=kept)


def hard(rng, rows, columns):
    """Rows of very different size, one of zeros, one without negative weights, one with a single large weight."""
    w = rng.standard_normal((rows, columns)) * np.exp(2 * rng.standard_normal((rows, 1))) * 0.01
    w[1], w[2] = 0, np.abs(w[2])
    w[3, 5] = 300
    return w.astype(np.float32)


def graph_of(file: File, x: np.ndarray, layers: list[LinearSpec], width: int) -> Graph:
    """All layers read the same input, one output behind the other; then they read it again, halved."""
    rows = sum(each.rows for each in layers)
    reads, offset = [], 0
    for each in layers:
        reads.append(Linear(0, "x", each, "y", offset))
        offset += each.rows
    first = layers[0].weights[0]
    again = layer(file, "again", matrix(file, layers[0].master)[::-1], first.codec, layers[0].master.codec)
    operations = (
        Embed(-1, file.add(x, "f32"), "x"), *reads, Scale(0, "x", 0.5, "x"), Linear(1, "x", again, "y", 0, add=True),
        Select(-1, ("y",)),
    )  # fmt: skip
    return Graph({"x": width, "y": rows}, operations, "y", cache=(CacheSpec(1, 2, 2),))


def program_of(target: str, graph: Graph, file: File, **options):
    return load(target).compile(graph, file, Options(options.pop("mode", "a16"), max_rows=40, max_logits=40, **options))


@pytest.mark.parametrize(
    ("codec", "master"),
    [
        # Two widths, and every master in one whose products other tests need: each other pair compiles kernels of its own.
        *(pytest.param(codec, MASTERS[0], marks=pytest.mark.exhaustive if i % 7 else ()) for i, codec in enumerate(CODECS)),
        *((CODECS[2], master) for master in MASTERS[1:]),
        *(pytest.param(CODECS[i], MASTERS[i], marks=pytest.mark.exhaustive) for i in (1, 3, 4)),
    ],
    ids=lambda c: c.name.replace(" ", "-"),
)
def test_both_targets_round_a_master_to_the_same_bits(codec, master):
    rng = np.random.default_rng(codec.bits)
    shapes = [(33, 384), (16, 128)]
    shapes += [(20, 80)] if codec.group_size == 16 and master.group_size == 0 else []
    shapes += [(18, 19)] if codec.group_size == 0 and master.group_size == 0 else []
    for rows, columns in shapes:
        file = File()
        spec = layer(file, "layer", hard(rng, rows, columns), codec, master)
        graph = graph_of(file, np.ones((2, columns), np.float32), [spec], columns)
        s = np.exp(rng.standard_normal(columns)).astype(np.float32)
        made = []
        for target in ("reference", "cpu"):
            program = program_of(target, graph, file, **({"threads": 2} if target == "cpu" else {}))
            weights = program.new_weights()
            program.requantize(weights, [s, s])
            made.append(weights)
            assert np.array_equal(weights.input_scales[0], 1 / s)
        for name, ref in spec.weights[0].arrays.items():
            assert np.array_equal(made[0].array(ref), made[1].array(ref)), name
        expected = rounded(matrix(file, spec.master) * s, codec)
        for name, ref in spec.weights[0].arrays.items():
            assert np.array_equal(made[1].array(ref), expected[name]), name


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_scales_of_one_give_the_rounding_of_the_master_bit_by_bit(target):
    rng, file, codec = np.random.default_rng(0), File(), Codec("int", 3, 32, False)
    spec = layer(file, "layer", hard(rng, 48, 256), codec, Codec("int", 8, 128))
    program = program_of(target, graph_of(file, np.ones((2, 256), np.float32), [spec], 256), file)
    weights = program.new_weights()
    program.requantize(weights, [np.ones(256, np.float32)] * 2)
    for ref in spec.weights[0].arrays.values():
        assert np.array_equal(weights.array(ref), file.array(ref))
    rows = rows_of(program, 2)
    assert np.array_equal(program.run(rows).copy(), program.run_requantized(rows, weights))


@pytest.mark.parametrize("codec", [Codec("int", 4, 32, False), Codec("int", 3, 32)], ids=lambda c: c.name.replace(" ", "-"))
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_what_is_not_finite_makes_the_scale_of_its_group_nan_and_no_other(target, codec):
    file = File()
    w = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    w[4, 3], w[5, 40] = np.nan, -np.inf
    kept = Weight(Codec("f32"), 16, 64, {"q": file.add(pack_floats(w, "f32"), "f32")})
    clean = np.where(np.isfinite(w), w, 0).astype(np.float32)
    spec = LinearSpec("layer", (stored(file, clean, codec),), master=kept)
    program = program_of(target, graph_of(file, np.ones((1, 64), np.float32), [spec], 64), file)
    weights = program.new_weights()
    program.requantize(weights, [np.ones(64, np.float32)] * 2)
    made = {name: weights.array(ref) for name, ref in spec.weights[0].arrays.items()}
    assert np.argwhere(np.isnan(unpack_groups(made["scale"], 16))).tolist() == [[4, 0], [5, 1]]
    assert unpack_integers(made["q"], 16, 64).max() < 1 << codec.bits
    others = np.delete(np.arange(16), [4, 5])
    assert np.array_equal(dequantize(codec, 16, 64, made)[others], dequantize(codec, 16, 64, rounded(clean, codec))[others])


def test_the_cpu_names_the_masters_that_it_reads():
    file = File()
    spec = layer(file, "layer", np.ones((16, 64), np.float32), Codec("int", 2, 32), Codec("int", 4, 32))
    program = program_of("cpu", graph_of(file, np.ones((1, 64), np.float32), [spec], 64), file)
    with pytest.raises(UnsupportedError, match="i8, f16, bf16 and f32, not i4 g32.*reference"):
        program.requantize(program.new_weights(), [np.ones(64, np.float32)] * 2)


class Case:
    """Three layers that share an input, and a fourth reading of it, over 30 tokens."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.file, codec, master = File(), Codec("int", 3, 32, False), Codec("int", 8, 128)
        w = rng.standard_normal((84, 128)).astype(np.float32)
        cuts = {"q": w[:48], "k": w[48:64], "v": w[64:]}
        layers = [layer(self.file, name, part, codec, master) for name, part in cuts.items()]
        self.x = (rng.standard_normal((30, 128)) * np.exp(rng.standard_normal(128))).astype(np.float32)
        self.layers, self.graph = layers, graph_of(self.file, self.x, layers, 128)
        self.again = shared_inputs(self.graph)[1].layers[0]

    def sums(self, target: str, cuts: tuple[int, ...], counted=None) -> tuple[InputSums, np.ndarray]:
        program = program_of(target, self.graph, self.file)
        sums, parts, first = program.new_sums(), [], 0
        pages = [program.new_page()]
        for last in (*cuts, 30):
            rows = rows_of(program, last - first, first, pages)
            rows.counted = None if counted is None else counted[first:last]
            parts.append(program.run_summing(rows, sums).copy())
            first = last
        return sums, np.concatenate(parts)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_layers_that_read_the_same_share_its_sums(case):
    inputs = shared_inputs(case.graph)
    assert [[each.name for each in shared.layers] for shared in inputs] == [["q", "k", "v"], ["again"]]


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_sums_are_of_squares_and_do_not_depend_on_the_chunks(case, target):
    whole, _ = case.sums(target, ())
    assert whole.tokens == 30
    squares = (case.x.astype(np.float64) ** 2).sum(0)
    assert np.allclose(whole.squares()[0], squares, rtol=1e-5) and np.allclose(whole.squares()[1], squares / 4, rtol=1e-5)
    for cuts in ((1,), (12, 13), (5, 9, 22)):
        assert np.array_equal(case.sums(target, cuts)[0].values, whole.values)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_rows_that_do_not_count_leave_no_trace(case, target):
    counted = np.arange(30) % 3 != 0
    sums, _ = case.sums(target, (8,), counted)
    assert sums.tokens == counted.sum()
    assert np.allclose(sums.squares()[0], (case.x[counted].astype(np.float64) ** 2).sum(0), rtol=1e-5)


def test_both_targets_add_the_same_and_run_the_masters(case):
    (ours, y), (theirs, wanted) = case.sums("cpu", (7,)), case.sums("reference", ())
    assert np.array_equal(ours.values, theirs.values)
    exact = np.concatenate([case.x @ matrix(case.file, each.master).T for each in case.layers], 1)
    exact[:, :48] += case.x / 2 @ matrix(case.file, case.again.master).T
    assert np.abs(wanted - exact).max() < 1e-4 * np.abs(exact).max()
    assert np.abs(y - exact).max() < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("mode", ["a16", "a8"])
def test_a_copy_runs_like_the_product_it_stands_for(case, mode):
    s = [np.exp(np.random.default_rng(i).standard_normal(128)).astype(np.float32) for i in range(2)]
    results = []
    for target in ("reference", "cpu"):
        program = program_of(target, case.graph, case.file, mode=mode)
        weights = program.new_weights()
        program.requantize(weights, s)
        rows = rows_of(program, 30)
        many = program.run_requantized(rows, weights).copy()
        own = program.run(rows).copy()
        assert not np.allclose(many, own), "the copy was not used"
        alone = program.run_requantized(rows_of(program, 1), weights)
        assert np.array_equal(alone[0], many[0]), "a row alone must give the same bits as among others"
        results.append(many)
    assert np.abs(results[0] - results[1]).max() < 1e-3 * np.abs(results[0]).max()
    if mode == "a16":
        expected = np.concatenate([product_of(weights, each, case.x / s[0]) for each in case.layers], 1)
        expected[:, :48] += product_of(weights, case.again, case.x / 2 / s[1])
        assert np.abs(results[1] - expected).max() < 1e-3 * np.abs(expected).max()


def product_of(copy: HostWeights, each: LinearSpec, x: np.ndarray) -> np.ndarray:
    weight = each.weights[0]
    return x @ dequantize(weight.codec, weight.rows, weight.columns, {n: copy.array(ref) for n, ref in weight.arrays.items()}).T


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system cannot be told")
def test_where_memory_is_short_masters_leave_it_behind_their_product(case, monkeypatch):
    from edgeq.targets.cpu.lowering import requantize

    told = []

    class Paged(File):
        def pages(self, ref):
            told.append(ref)
            return mmap.PAGESIZE, 0

    file = Paged()
    file._arrays = case.file._arrays
    monkeypatch.setattr(requantize, "available_bytes", lambda: 1)
    program = program_of("cpu", case.graph, file)
    program.run_summing(rows_of(program, 3), program.new_sums())
    assert set(told) == {ref for each in (*case.layers, case.again) for ref in each.master.arrays.values()}
