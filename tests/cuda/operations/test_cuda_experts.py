"""Mixtures of experts: the emulated device against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_floats
from edgeq.format.records import LinearSpec
from edgeq.targets.family_operations import ShareScale
from edgeq.targets.graph import CacheSpec, Experts, Function, Graph, Linear, Select
from tests.cuda.comparing import both, program_of, read
from tests.cuda.emulated import SHUFFLED
from tests.targets.cases import Arrays
from tests.targets.products.test_experts import (
    CODECS,
    HIDDEN,
    INNER,
    graph_of,
    inputs,
    layer,
    routed_by_sigmoids,
    sigmoid_logits,
    without_gates,
)
from tests.targets.test_cpu_kernels import identity, shown

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize(("experts", "chosen", "normalized"), [(8, 2, True), (5, 3, False), (1, 1, False)])
def test_only_the_chosen_experts_are_added_by_their_shares(codec: Codec, experts: int, chosen: int, normalized: bool) -> None:
    arrays, x = Arrays(), inputs(23)
    graph = graph_of(arrays, codec, x, experts, chosen, normalized)
    oracle, y = both(graph, arrays, 23)
    assert np.abs(y - oracle).max() < 1e-3 * np.abs(oracle).max() and np.abs(y - x).max() > 0.05
    # However the rows are cut, each has the same bits.
    assert np.array_equal(read(program_of(graph, arrays, 23, order=SHUFFLED), 23, [1, 17, 5]), y)


def test_experts_of_two_layers_and_of_other_codecs_and_parts() -> None:
    arrays, x = Arrays(), inputs(9)
    graph = graph_of(arrays, Codec("int", 4, 16), x, 4, 2, fused=False)
    experts = graph.operations[4]
    other = layer(arrays, np.random.default_rng(5), Codec("int", 5, 16, symmetric=False), HIDDEN, INNER, "other")
    order = arrays.add(np.arange(INNER, dtype=np.int32)[::-1].copy(), "i32")
    mixed = replace(experts, downs=(*experts.downs[:3], replace(other, input_order=order)))  # type: ignore[call-arg, attr-defined]
    graph = replace(graph, operations=(*graph.operations[:4], mixed, *graph.operations[5:]))
    oracle, y = both(graph, arrays, 9)
    assert np.abs(y - oracle).max() < 1e-3


@pytest.mark.parametrize("experts", [4, 33, 64])
def test_routing(experts: int) -> None:
    """Ties go to the first; by logits where shares are too small for f32; NaN where a logit is none."""
    arrays, chosen = Arrays(), 3
    x = np.random.default_rng(0).standard_normal((6, experts)).astype(np.float32)
    x[0], x[1], x[1, -1] = 0, -200, 5
    x[2] = np.round(x[2])
    graph = graph_of(arrays, Codec("f32"), np.ones((6, HIDDEN), np.float32), experts, chosen)
    table = replace(graph.operations[0], table=arrays.add(x, "f32"), out="router")  # type: ignore[call-arg]
    route = replace(graph.operations[2], normalized=False)  # type: ignore[call-arg]
    show = (table, route, Select(-1, ("routing",)), Linear(-1, "routing", identity(arrays, 2 * chosen), "y"))
    shown = Graph({"router": experts, "routing": 2 * chosen, "y": 2 * chosen}, show, "y", (CacheSpec(1, 2, 2),))
    oracle, y = both(shown, arrays, 6)
    assert np.array_equal(y[:, chosen:], oracle[:, chosen:]) and np.allclose(y, oracle, rtol=1e-5, atol=1e-30)
    arrays.array(table.table)[4, 1] = np.nan  # type: ignore[attr-defined]
    _, y = both(shown, arrays, 6)
    assert np.isnan(y[4]).any() and np.isfinite(np.delete(y, 4, 0)).all()


@pytest.mark.parametrize("experts", [7, 40])
def test_routing_by_sigmoids(experts: int) -> None:
    arrays, chosen = Arrays(), 3
    oracle, y = both(routed_by_sigmoids(arrays, *sigmoid_logits(experts), chosen, True), arrays, 6)
    assert np.array_equal(y[:, chosen:], oracle[:, chosen:], equal_nan=True)
    assert np.allclose(y, oracle, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("function", "clamp"), [("gelu_pytorch_tanh", None), ("silu", (1.3, 0.4))], ids=["gelu", "clamped"])
def test_experts_with_biases_another_function_and_limits(function: Function, clamp: tuple[float, float] | None) -> None:
    arrays, x, rng = Arrays(), inputs(9), np.random.default_rng(2)
    graph = graph_of(arrays, Codec("table", 4, 32), x, 4, 2)
    experts = graph.operations[4]
    assert isinstance(experts, Experts)

    def biased(linear: LinearSpec) -> LinearSpec:
        return replace(linear, bias=arrays.add(rng.standard_normal(linear.rows).astype(np.float32), "f32"))

    other = replace(
        experts,
        projections=tuple(tuple(map(biased, each)) for each in experts.projections),
        downs=tuple(map(biased, experts.downs)),
        function=function,
        clamp=clamp,
    )
    plain, _ = both(graph, arrays, 9)
    oracle, y = both(replace(graph, operations=(*graph.operations[:4], other, *graph.operations[5:])), arrays, 9)
    assert np.abs(y - oracle).max() < 1e-3 < np.abs(plain - oracle).max()


def test_experts_without_a_gate_of_a_router_of_sigmoids() -> None:
    arrays, x = Arrays(), inputs(9)
    graph = without_gates(graph_of(arrays, Codec("int", 4, 16), x, 5, 2, fused=False))
    bias = arrays.add(np.array([0, 3, 0, -3, 0.5], np.float32), "f32")
    by_sigmoids = replace(graph.operations[2], bias=bias)  # type: ignore[call-arg]
    oracle, y = both(replace(graph, operations=(*graph.operations[:2], by_sigmoids, *graph.operations[3:])), arrays, 9)
    assert np.abs(y - oracle).max() < 1e-3 < np.abs(y - x).max()


def test_shares_are_multiplied_by_numbers_of_their_experts() -> None:
    """A row chooses some of more experts."""
    rng, arrays, chosen = np.random.default_rng(0), Arrays(), 3
    names = rng.permuted(np.tile(np.arange(7), (5, 1)), axis=1)[:, :chosen]
    x = np.concatenate([rng.uniform(size=(5, chosen)), names], axis=1).astype(np.float32)
    scales = arrays.add(rng.standard_normal(7).astype(np.float16), "f16")
    oracle, y = both(shown(arrays, x, [ShareScale(0, "x", chosen, scales)], "x", {"x": 2 * chosen, "_dim": 2}), arrays, 5)
    assert np.array_equal(y, oracle) and not np.array_equal(y, x)


def test_an_expert_that_no_row_chose_is_not_read() -> None:
    arrays, x = Arrays(), np.abs(inputs(3))
    graph = graph_of(arrays, Codec("f32"), x, 3, 2)
    router = pack_floats(np.outer([-20, 20, -10], np.ones(HIDDEN)).astype(np.float32), "f32")
    arrays.array(graph.operations[1].linear.weights[0].arrays["q"])[...] = router  # type: ignore[attr-defined]
    arrays.array(graph.operations[4].projections[0][0].weights[0].arrays["q"])[...] = np.nan  # type: ignore[attr-defined]
    assert np.isfinite(both(graph, arrays, 3)[1]).all()
