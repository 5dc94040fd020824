"""The gated delta rule and its gates: the reference against the step form, kernels against the reference, in every order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.network.delta_net import UNIT_EPS
from edgeq.targets.family_operations import DeltaRule, Gate, GatedNorm, delta_state
from edgeq.targets.graph import CacheSpec, Embed, Graph, Operation, Select
from tests.targets.cases import HERE, ISAS, Arrays
from tests.targets.states.state_cases import LENGTH, LONG, MEMORIES, check_computed, check_long, check_tiles, plain, results

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0


SIZES = [Sizes(1, 1, 1, 1), Sizes(2, 6, 24, 20), Sizes(3, 3, 16, 48, 2.0), Sizes(1, 2, 40, 128), Sizes(2, 2, 33, 65, 2.0)]


def step_form(x: Array, rates: Array, decay_log: Array, dt_bias: Array, s: Sizes) -> Array:
    """The textbook's recurrence: S is read and written for every row.  -> [rows, value_heads * value_dim]"""
    keys, shared = s.key_heads * s.key_dim, s.value_heads // s.key_heads
    q, k = (x[:, at : at + keys].reshape(-1, s.key_heads, s.key_dim) for at in (0, keys))
    q, k = (np.repeat(m / np.sqrt((m * m).sum(-1, keepdims=True) + UNIT_EPS), shared, axis=1) for m in (q, k))
    v = x[:, 2 * keys :].reshape(-1, s.value_heads, s.value_dim)
    beta = s.beta_scale / (1 + np.exp(-rates[:, : s.value_heads]))
    g = -np.exp(decay_log) * np.logaddexp(0, rates[:, s.value_heads :] + dt_bias)
    state, out = np.zeros((s.value_heads, s.key_dim, s.value_dim)), []
    for t in range(len(x)):
        state = state * np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * d[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t] / np.sqrt(s.key_dim)).ravel())
    return np.stack(out)


def inputs(s: Sizes, length: int = LENGTH) -> dict[str, NDArray[np.float32]]:
    """Keys come back, memories reach from one row to thousands, and now and then a head forgets everything."""
    rng = np.random.default_rng(s.value_dim)
    width = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim
    x, rates = rng.standard_normal((length, width)), rng.standard_normal((length, 2 * s.value_heads))
    keys = slice(s.key_heads * s.key_dim, 2 * s.key_heads * s.key_dim)
    x[:, keys] = 0.3 * x[:, keys] + x[rng.integers(0, 12, length), keys]
    forgets = rng.random((length, s.value_heads)) < 0.03
    rates[:, s.value_heads :][forgets] = rng.choice([50.0, 900.0], forgets.sum())
    arrays = {
        "x": x,
        "rates": rates,
        "decay_log": np.linspace(-8, 1, s.value_heads),
        "dt_bias": rng.standard_normal(s.value_heads),
    }
    return {name: each.astype(np.float32) for name, each in arrays.items()}


def graph(arrays: Arrays, s: Sizes, numbers: dict[str, NDArray[np.float32]]) -> Graph:
    """Row r of the result is the rule's at token r."""
    refs = {name: arrays.add(each, "f32") for name, each in numbers.items()}
    rule = DeltaRule(
        0, "x", "rates", s.key_heads, s.value_heads, s.key_dim, s.value_dim,
        refs["decay_log"], refs["dt_bias"], s.beta_scale, "y", 0,
    )  # fmt: skip
    operations = Embed(-1, refs["x"], "x"), Embed(-1, refs["rates"], "rates"), rule, Select(-1, ("y",))
    widths = {"x": numbers["x"].shape[1], "rates": 2 * s.value_heads, "y": s.value_heads * s.value_dim}
    state = delta_state(s.key_heads, s.value_heads, s.key_dim, s.value_dim)
    return Graph(widths, operations, "y", (CacheSpec(1, 2, 2),), (state,))


def expected(s: Sizes, numbers: dict[str, NDArray[np.float32]]) -> Array:
    return step_form(*(numbers[name].astype(np.float64) for name in ("x", "rates", "decay_log", "dt_bias")), s)


@pytest.mark.parametrize("sizes", SIZES[1:4], ids=str)
def test_the_reference_computes_the_step_form(sizes: Sizes) -> None:
    arrays, numbers = Arrays(), inputs(sizes)
    check_computed("reference", graph(arrays, sizes, numbers), arrays, expected(sizes, numbers), cuts=((7, 1, 20, 2),))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_computes_the_step_form(isa: str, sizes: Sizes) -> None:
    arrays, numbers = Arrays(), inputs(sizes)
    check_computed("cpu", graph(arrays, sizes, numbers), arrays, expected(sizes, numbers), isa)


def test_rows_and_columns_of_the_kernels_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(2, 4, 40, 100)
    numbers = inputs(sizes)
    check_tiles(monkeypatch, lambda arrays: graph(arrays, sizes, numbers), expected(sizes, numbers))


@pytest.mark.parametrize(("target", "rows"), LONG)
def test_long_memories_keep_their_digits(target: str, rows: int) -> None:
    sizes = Sizes(1, 3, 16, 16)
    arrays, numbers = Arrays(), inputs(sizes, rows)
    numbers["rates"][:, 3:] = np.clip(numbers["rates"][:, 3:], -1, 1)
    numbers |= {"decay_log": -np.log(np.log(2) * MEMORIES).astype(np.float32), "dt_bias": np.zeros(3, np.float32)}
    check_long(target, graph(arrays, sizes, numbers), arrays, expected(sizes, numbers), within=1e-6)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_what_is_not_a_number_stays_in_its_heads(target: str) -> None:
    """A value in its value head from its row on; a key in the heads that read it; a rate in its head."""
    sizes = Sizes(2, 4, 8, 16)
    for name, place, heads in (("x", 2 * 16 + 17, [1]), ("x", 16 + 9, [2, 3]), ("rates", 2, [2]), ("rates", 4, [0])):
        arrays, numbers = Arrays(), inputs(sizes)
        made = graph(arrays, sizes, numbers)
        clean = results(target, made, arrays, (LENGTH,)).reshape(LENGTH, 4, 16)
        ref = made.operations[0 if name == "x" else 1].table  # type: ignore[attr-defined]
        arrays.array(ref)[40, place] = np.nan
        found = results(target, made, arrays, (LENGTH,)).reshape(LENGTH, 4, 16)
        others = [head for head in range(4) if head not in heads]
        assert np.array_equal(found[:, others], clean[:, others]) and np.array_equal(found[:40], clean[:40])
        assert np.isnan(found[40:, heads]).any(axis=2).all()


def test_heads_of_zeros_give_zeros() -> None:
    """Neither a query nor a key has a direction then."""
    sizes = Sizes(1, 2, 16, 16)
    numbers = inputs(sizes)
    numbers["x"][:] = 0
    for target in ("reference", "cpu"):
        arrays = Arrays()
        assert not results(target, graph(arrays, sizes, numbers), arrays, (LENGTH,)).any()


def of_gates(arrays: Arrays, operation: Operation, widths: dict[str, int]) -> tuple[Graph, dict[str, Any]]:
    rng = np.random.default_rng(5)
    tables = {name: (4 * rng.standard_normal((LENGTH, widths[name]))).astype(np.float32) for name in ("x", "gate")}
    embeds = [Embed(-1, arrays.add(table, "f32"), name) for name, table in tables.items()]
    result = operation.writes()[0]
    return Graph(widths, (*embeds, operation, Select(-1, (result,))), result, (CacheSpec(1, 2, 2),)), tables


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("target", ["reference", *HERE])
@pytest.mark.parametrize(("heads", "dim", "offset"), [(1, 16, 0), (3, 20, 7), (2, 128, 64), (5, 3, 1)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_the_gated_norm_computes_its_formula(target: str, heads: int, dim: int, offset: int, gate_first: bool) -> None:
    """With `gate_first`, which comes with a gain of every head, the norm is of what was multiplied by the gate."""
    arrays, rng = Arrays(), np.random.default_rng(dim)
    gain = rng.standard_normal(dim * (heads if gate_first else 1)).astype(np.float32)
    norm = GatedNorm(0, "x", "gate", offset, heads, dim, arrays.add(gain, "f32"), 0.125, "y", gate_first)
    made, tables = of_gates(arrays, norm, {"x": heads * dim, "gate": heads * dim + offset, "y": heads * dim})
    x, gates = tables["x"].astype(np.float64).reshape(LENGTH, heads, dim), tables["gate"].astype(np.float64)[:, offset:]
    by = silu(gates)
    x = x * by.reshape(x.shape) if gate_first else x
    wanted = (x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.125) * gain.reshape(-1, dim)).reshape(LENGTH, -1)
    wanted = wanted if gate_first else wanted * by
    found = plain(target, made, arrays)
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("target", ["reference", *HERE])
@pytest.mark.parametrize(("width", "offset"), [(16, 0), (20, 7), (128, 64), (3, 2)])
def test_the_gate_computes_its_formula(target: str, width: int, offset: int) -> None:
    arrays = Arrays()
    made, tables = of_gates(arrays, Gate(0, "x", "gate", offset, width), {"x": width, "gate": width + offset})
    wanted = tables["x"] / (1 + np.exp(-tables["gate"].astype(np.float64)[:, offset:]))
    assert np.abs(plain(target, made, arrays) - wanted).max() < 2e-6 * np.abs(wanted).max()
