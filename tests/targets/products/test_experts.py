"""Layers of experts: the cpu target against the reference, and the reference against a loop over all experts."""

from dataclasses import replace

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import Codec, pack_floats
from edgeq.format.records import LinearSpec, Weight
from edgeq.targets import load
from edgeq.targets.family_operations import GatedAdd, Route
from edgeq.targets.graph import CacheSpec, Embed, Experts, Graph, Linear, Select
from edgeq.targets.target import Options
from tests.targets.cases import HERE, MODES, Arrays, case, matrix, rows_of, weight
from tests.targets.test_cpu_kernels import identity

HIDDEN, INNER, AMX = 64, 48, "avx512-amx"
CODECS = [
    Codec("f32"),
    Codec("bf16"),
    Codec("int", 4, 16, symmetric=False),
    Codec("int", 3, 16, symmetric=True),
    Codec("int", 8, 0, symmetric=True),
]
OTHERS = [
    Codec("half", 2, 32),
    Codec("s4", 2, 32),
    Codec("table", 4, 32),
    Codec("trellis", 2, 32),
    Codec("offset", 4, 16),
    Codec("two-level", 4, 32, False),
    Codec("two-level", 6, 16),
]
"""Those that not all targets have."""


def layer(arrays, rng, codec, rows, columns, name):
    """Random numbers of a size that keeps the result near 1."""
    if codec.integer:
        w = weight(arrays, rng, codec, rows, columns)
        scale = arrays.array(w.arrays["super_scale" if codec.coded else "scale"])
        scale[...] = np.abs(scale) * np.float16(0.3 / (1 << codec.multiplied_bits))
        if "zero" in w.arrays:
            arrays.array(w.arrays["zero"])[...] = 1 << (codec.bits - 1)
        if codec.kind == "two-level":
            factor = arrays.array(w.arrays["super_scale"])
            scale[...], factor[...] = rng.integers(30, 64, scale.shape), np.float16(0.3 / 60 / (1 << codec.bits))
            if "super_offset" in w.arrays:
                arrays.array(w.arrays["offset"])[...], arrays.array(w.arrays["super_offset"])[...] = (
                    scale,
                    -codec.center * factor,
                )
        elif "offset" in w.arrays:
            arrays.array(w.arrays["offset"])[...] = -codec.center * scale
        return LinearSpec(name, (w,))
    values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
    return LinearSpec(name, (Weight(codec, rows, columns, {"q": arrays.add(pack_floats(values, codec.kind), codec.kind)}),))


def graph_of(arrays, codec, x, experts, chosen, normalized=True, fused=True, seed=0):
    """y = x + experts(x), routed by a float matrix."""
    rng = np.random.default_rng(seed)
    router = layer(arrays, rng, Codec("f32"), experts, HIDDEN, "router")
    projections, downs = [], []
    for e in range(experts):
        parts = [("gate_up", 2 * INNER)] if fused else [("gate", INNER), ("up", INNER)]
        projections.append(tuple(layer(arrays, rng, codec, rows, HIDDEN, f"{e}.{name}") for name, rows in parts))
        downs.append(layer(arrays, rng, codec, HIDDEN, INNER, f"{e}.down"))
    operations = (
        Embed(-1, arrays.add(x, "f32"), "x"),
        Linear(0, "x", router, "router"),
        Route(0, "router", experts, chosen, normalized, "routing"),
        Embed(0, arrays.add(x, "f32"), "out"),
        Experts(0, "x", "routing", chosen, tuple(projections), tuple(downs), INNER, "out"),
        Select(-1, ("out",)),
        Linear(-1, "out", identity(arrays, HIDDEN), "y"),
    )
    buffers = {"x": HIDDEN, "out": HIDDEN, "router": experts, "routing": 2 * chosen, "y": HIDDEN}
    return Graph(buffers, operations, "y", cache=(CacheSpec(1, 2, 2),))


def run(target, graph, arrays, chunks, mode="a16", threads=0, isa=None):
    most = max(chunks)
    program = load(target).compile(graph, arrays, Options(mode, threads, isa, most, most))
    results, first = [], 0
    pages = [program.new_page() for _ in range(5)]
    for count in chunks:
        results.append(program.run(rows_of(program, count, first, pages)).copy())
        first += count
    return np.concatenate(results)


def inputs(rows, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN)).astype(np.float32)


def by_hand(arrays, graph, x, chosen, normalized):
    """Every expert for every row, in float64, weighted by zero where it is not chosen."""
    _, route, _, _, experts, *_ = graph.operations
    logits = x.astype(np.float64) @ matrix(arrays, route.linear.weights[0]).T
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    kept = np.where(shares >= np.sort(shares, axis=1)[:, -chosen][:, None], shares, 0)
    if normalized:
        kept /= kept.sum(1, keepdims=True)
    y = x.astype(np.float64)
    for e, (projection, down) in enumerate(zip(experts.projections, experts.downs, strict=True)):
        gate_up = np.concatenate([x @ matrix(arrays, part.weights[0]).T for part in projection], axis=1).astype(np.float64)
        gate, up = gate_up[:, :INNER], gate_up[:, INNER:]
        y = y + kept[:, e : e + 1] * (gate / (1 + np.exp(-gate)) * up @ matrix(arrays, down.weights[0]).T)
    return y


@pytest.mark.parametrize(
    "codec",
    # Of those that not all targets have one of a table and one with offsets.
    [*CODECS, *(pytest.param(each, marks=() if i in (2, 4) else pytest.mark.exhaustive) for i, each in enumerate(OTHERS))],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize(
    ("experts", "chosen", "normalized"),
    [
        (8, 2, True),
        (5, 3, False),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((3, 3, True), (1, 1, False))),
    ],
)
def test_only_the_chosen_experts_are_added_by_their_shares(codec, experts, chosen, normalized):
    arrays, x = Arrays(), inputs(23)
    graph = graph_of(arrays, codec, x, experts, chosen, normalized)
    oracle = run("reference", graph, arrays, [23])
    assert np.abs(oracle - by_hand(arrays, graph, x, chosen, normalized)).max() < 1e-4
    y = run("cpu", graph, arrays, [23])
    assert np.abs(y - oracle).max() < 1e-3 and np.abs(y - x).max() > 0.05


def routed_by_sigmoids(arrays, x, bias, chosen, normalized):
    """A graph that shows the routing of the logits x."""
    rows, experts = x.shape
    operations = (
        Embed(-1, arrays.add(x, "f32"), "router"),
        Route(0, "router", experts, chosen, normalized, "routing", arrays.add(bias, "f32"), 1.7),
        Select(-1, ("routing",)),
        Linear(-1, "routing", identity(arrays, 2 * chosen), "y"),
    )
    buffers = {"router": experts, "routing": 2 * chosen, "y": 2 * chosen}
    return Graph(buffers, operations, "y", cache=(CacheSpec(1, 2, 2),))


def sigmoid_logits(experts):
    """Logits with ties, with values where sigmoids saturate, and with one that is not finite; biases that change the choice."""
    rng = np.random.default_rng(4)
    x, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, experts), experts))
    x[0], x[1, ::2], x[2, ::3] = 0.5, 90, -90
    x[3], x[4, 1] = -200, np.nan
    bias[1], bias[experts - 1] = bias[0], 2.5
    return x, bias


@pytest.mark.parametrize("normalized", [True, False])
def test_a_bias_moves_the_choice_of_sigmoids_and_not_their_shares(normalized):
    chosen = 3
    x, bias = sigmoid_logits(7)
    arrays = Arrays()
    oracle, y = (run(t, routed_by_sigmoids(arrays, x, bias, chosen, normalized), arrays, [6]) for t in ("reference", "cpu"))
    assert np.array_equal(y[:, chosen:], oracle[:, chosen:], equal_nan=True)
    # What shows the routing is a product, in which a share of NaN is the whole row.
    assert np.allclose(y, oracle, rtol=1e-6, atol=1e-38, equal_nan=True) and np.isnan(oracle[4]).all()
    sound = np.delete(np.arange(6), 4)
    scores = 1 / (1 + np.exp(-x[sound].astype(np.float64)))
    best = np.argsort(-(scores.astype(np.float32) + bias), axis=1, kind="stable")[:, :chosen]
    shares = np.take_along_axis(scores, best, 1)
    shares = shares / (shares.sum(1, keepdims=True) + 1e-20) if normalized else shares
    assert np.array_equal(oracle[sound, chosen:], best)
    assert np.allclose(oracle[sound, :chosen], 1.7 * shares, rtol=1e-6, atol=1e-38)
    unmoved = np.argsort(-scores, axis=1, kind="stable")[:, :chosen]
    assert not np.array_equal(best, unmoved)


def without_gates(graph):
    """The same with experts down(relu(up x)^2), of the first projections."""
    experts = graph.operations[4]
    alone = replace(experts, projections=tuple(each[1:] for each in experts.projections), function="relu2", gated=False)
    return replace(graph, operations=(*graph.operations[:4], alone, *graph.operations[5:]))


@pytest.mark.parametrize("codec", [Codec("f32"), Codec("int", 4, 16, symmetric=False)], ids=lambda c: c.name)
def test_experts_without_a_gate(codec):
    arrays, x = Arrays(), inputs(23)
    graph = without_gates(graph_of(arrays, codec, x, 5, 2, normalized=False, fused=False))
    oracle, y = (run(target, graph, arrays, [23]) for target in ("reference", "cpu"))
    _, route, _, _, experts, *_ = graph.operations
    logits = x.astype(np.float64) @ matrix(arrays, route.linear.weights[0]).T
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    wanted = x.astype(np.float64)
    for e, (projection, down) in enumerate(zip(experts.projections, experts.downs, strict=True)):
        inner = np.maximum(x @ matrix(arrays, projection[0].weights[0]).T, 0).astype(np.float64) ** 2
        share = np.where(shares[:, e] >= np.sort(shares, axis=1)[:, -2], shares[:, e], 0)
        wanted += share[:, None] * (inner @ matrix(arrays, down.weights[0]).T)
    assert np.abs(oracle - wanted).max() < 1e-4 and np.abs(y - oracle).max() < 1e-3 and np.abs(y - x).max() > 0.05
    assert np.array_equal(run("cpu", graph, arrays, [1, 17, 5]), y)


@pytest.mark.parametrize(
    ("codec", "mode"),
    [
        *(pytest.param(codec, mode, id=f"{codec.name}-{mode}") for codec in CODECS[1:3] for mode in MODES),
        # The others in one mode, by turns.
        *(case(codec, MODES[i % 2], common=False, id=f"{codec.name}-{MODES[i % 2]}") for i, codec in enumerate(OTHERS)),
    ],
)
def test_a_row_is_bit_equal_whatever_runs_beside_it(codec, mode):
    arrays, x = Arrays(), inputs(40)
    graph = graph_of(arrays, codec, x, 6, 2)
    whole = run("cpu", graph, arrays, [40], mode, threads=2)
    for chunks in ([1] * 40, [17, 1, 22]):
        assert np.array_equal(run("cpu", graph, arrays, chunks, mode, threads=2), whole)
    assert np.abs(whole - run("reference", graph, arrays, [40], mode)).max() < (1e-3 if mode == "a16" else 0.05)


@pytest.mark.skipif(AMX not in HERE, reason="this processor has no matrix unit, or its system keeps it")
def test_unpacked_weights_of_a_thread_do_not_move_with_the_rows_of_an_expert():
    """With 16 rows and more an expert's products unpack their weights into memory of the thread."""
    arrays, x = Arrays(), inputs(300)
    graph = graph_of(arrays, Codec("int", 4, 64), x, 6, 2)
    found, expected = (run("cpu", graph, arrays, [300], "a8", threads=2, isa=isa) for isa in (AMX, "avx512-vnni"))
    assert np.array_equal(found, expected)


def test_gate_and_up_apart_give_what_they_give_in_one_layer():
    arrays, x = Arrays(), inputs(9)
    graph = graph_of(arrays, Codec("int", 4, 16), x, 4, 2, fused=False)
    oracle = run("reference", graph, arrays, [9])
    assert np.abs(oracle - by_hand(arrays, graph, x, 2, True)).max() < 1e-4
    assert np.abs(run("cpu", graph, arrays, [9]) - oracle).max() < 1e-3


def test_experts_may_differ_in_their_codecs_but_not_in_their_parts():
    arrays, x = Arrays(), inputs(9)
    graph = graph_of(arrays, Codec("int", 4, 16), x, 4, 2)
    experts = graph.operations[4]
    rng = np.random.default_rng(5)
    other = layer(arrays, rng, Codec("int", 5, 32), HIDDEN, INNER, "other") if INNER % 32 == 0 else None
    other = other or layer(arrays, rng, Codec("int", 5, 16, symmetric=False), HIDDEN, INNER, "other")
    mixed = replace(experts, downs=(*experts.downs[:3], other))
    graph = replace(graph, operations=(*graph.operations[:4], mixed, *graph.operations[5:]))
    assert np.abs(run("cpu", graph, arrays, [9]) - run("reference", graph, arrays, [9])).max() < 1e-3
    order = arrays.add(np.arange(INNER, dtype=np.int32)[::-1].copy(), "i32")
    ordered = replace(experts, downs=(*experts.downs[:3], replace(other, input_order=order)))
    graph = replace(graph, operations=(*graph.operations[:4], ordered, *graph.operations[5:]))
    with pytest.raises(UnsupportedError, match="other: its expert has other parts"):
        run("cpu", graph, arrays, [9])


def test_of_equal_logits_the_first_experts_are_chosen():
    arrays, x = Arrays(), np.zeros((2, HIDDEN), np.float32)
    graph = graph_of(arrays, Codec("f32"), x, 4, 2)
    show = (*graph.operations[:3], Select(-1, ("routing",)), Linear(-1, "routing", identity(arrays, 4), "y"))
    graph = Graph({**graph.buffers, "y": 4}, show, "y", (CacheSpec(1, 2, 2),))
    for target in ("reference", "cpu"):
        assert np.allclose(run(target, graph, arrays, [2]), [[0.5, 0.5, 0, 1]] * 2)


def test_experts_whose_shares_are_0_are_chosen_by_their_logits():
    arrays, x = Arrays(), np.abs(inputs(3))
    graph = graph_of(arrays, Codec("f32"), x, 3, 2)
    # The first expert's logit is the least, but both its share and the last one's are too small for a float32.
    router = pack_floats(np.outer([-20, 20, -10], np.ones(HIDDEN)).astype(np.float32), "f32")
    arrays.array(graph.operations[1].linear.weights[0].arrays["q"])[...] = router
    first = graph.operations[4].projections[0][0]
    arrays.array(first.weights[0].arrays["q"])[...] = np.nan
    for target in ("reference", "cpu"):
        assert np.isfinite(run(target, graph, arrays, [3])).all(), target


def test_a_gated_addition():
    arrays, x = Arrays(), inputs(5) * 20
    operations = (
        Embed(-1, arrays.add(x, "f32"), "x"),
        Embed(-1, arrays.add(x[::-1].copy(), "f32"), "out"),
        GatedAdd(0, "x", "x", "out"),
        Select(-1, ("out",)),
        Linear(-1, "out", identity(arrays, HIDDEN), "y"),
    )
    graph = Graph({"x": HIDDEN, "out": HIDDEN, "y": HIDDEN}, operations, "y", (CacheSpec(1, 2, 2),))
    wanted = x[::-1] + x / (1 + np.exp(-x[:, :1].astype(np.float64)))
    for target in ("reference", "cpu"):
        assert np.abs(run(target, graph, arrays, [5]) - wanted).max() < 1e-4


@pytest.mark.parametrize("codec", CODECS[1:3], ids=lambda c: c.name)
@pytest.mark.parametrize("fused", [True, False])
def test_experts_with_biases_and_a_clamped_swiglu(codec, fused):
    """The bias of down is inside the share."""
    arrays, x, rng = Arrays(), inputs(23), np.random.default_rng(4)
    graph = graph_of(arrays, codec, x, 5, 2, fused=fused)
    position = next(i for i, o in enumerate(graph.operations) if isinstance(o, Experts))
    experts, biases = graph.operations[position], []

    def biased(spec):
        biases.append(rng.standard_normal(spec.rows).astype(np.float32))
        return replace(spec, bias=arrays.add(biases[-1], "f32"))

    projections = tuple(tuple(biased(part) for part in each) for each in experts.projections)
    changed = replace(experts, projections=projections, downs=tuple(map(biased, experts.downs)), clamp=(1.3, 0.8))
    graph = replace(graph, operations=(*graph.operations[:position], changed, *graph.operations[position + 1 :]))
    logits = x.astype(np.float64) @ matrix(arrays, graph.operations[1].linear.weights[0]).T
    wanted, best = x.astype(np.float64), np.argsort(-logits, axis=1)[:, :2]
    of_gate_up = biases[:-5]
    for row, chosen in enumerate(best):
        shares = np.exp(logits[row, chosen] - logits[row, chosen].max())
        for share, e in zip(shares / shares.sum(), chosen, strict=True):
            each = len(of_gate_up) // 5
            inner = np.concatenate([x[row] @ matrix(arrays, part.weights[0]).T for part in changed.projections[e]])
            inner = inner + np.concatenate(of_gate_up[each * e : each * e + each])
            g, u = np.minimum(inner[:INNER], 0.8), np.clip(inner[INNER:], -0.8, 0.8)
            out = (g / (1 + np.exp(-1.3 * g)) * (u + 1)) @ matrix(arrays, changed.downs[e].weights[0]).T
            wanted[row] += share * (out + biases[-5 + e])
    oracle = run("reference", graph, arrays, [23])
    assert np.abs(oracle - wanted).max() < 1e-3
    assert np.abs(run("cpu", graph, arrays, [23]) - oracle).max() < 1e-3
    assert np.array_equal(run("cpu", graph, arrays, [1] * 23), run("cpu", graph, arrays, [23]))
