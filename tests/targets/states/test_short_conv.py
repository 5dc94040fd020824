"""Convolutions over tokens: the reference against its formula, kernels against the reference, rows in every order."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.targets.family_operations import ShortConv, SiluConv
from edgeq.targets.graph import CacheSpec, Embed, Graph, Select
from edgeq.targets.states import LOG, StateSpec
from tests.targets.cases import ISAS, Arrays
from tests.targets.states.state_cases import LENGTH, results


def graph(arrays: Arrays, width: int, taps: int, gated: bool = True) -> tuple[Graph, np.ndarray]:
    """Row r of the result is the convolution at token r; and what it has to be, float64 [LENGTH, width]."""
    rng, parts = np.random.default_rng(width + taps), 3 if gated else 1
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((LENGTH, parts * width), (width, taps)))
    kind = ShortConv if gated else SiluConv
    conv = kind(0, "x", width, arrays.add(weight, "f32"), "y", 0)
    operations = Embed(-1, arrays.add(x, "f32"), "x"), conv, Select(-1, ("y",))
    state = StateSpec("tail", (taps - 1, width))
    made = Graph({"x": parts * width, "y": width}, operations, "y", (CacheSpec(1, 2, 2),), (state,))
    exact = x.astype(np.float64)
    inputs = exact[:, :width] * exact[:, 2 * width :] if gated else exact
    before = np.concatenate([np.zeros((taps - 1, width)), inputs])
    total = sum(weight[:, j] * before[j : j + LENGTH] for j in range(taps))
    return made, exact[:, width : 2 * width] * total if gated else total / (1 + np.exp(-total))


@pytest.mark.parametrize("width", [5, 16, 40])
@pytest.mark.parametrize("taps", [2, 3, 7, 20])
@pytest.mark.parametrize("gated", [True, False])
def test_the_reference_computes_its_formula(width: int, taps: int, gated: bool) -> None:
    arrays = Arrays()
    made, expected = graph(arrays, width, taps, gated)
    found = results("reference", made, arrays, (LENGTH,))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.array_equal(found, results("reference", made, arrays, (1,)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("width", "taps"), [(5, 2), (16, 3), (40, 3), (33, 7), (64, 20)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_kernel_computes_what_the_reference_does(isa: str, width: int, taps: int, gated: bool) -> None:
    arrays = Arrays()
    made, expected = graph(arrays, width, taps, gated)
    whole = results("cpu", made, arrays, (LENGTH,), isa)
    assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()
    for counts in ((1,), (7, 1, 20, 2), (LOG, LOG + 1)):
        assert np.array_equal(results("cpu", made, arrays, counts, isa), whole)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_what_is_not_a_number_stays_in_its_session_and_channel(target: str) -> None:
    arrays = Arrays()
    made, _ = graph(arrays, 24, 3)
    table = arrays.array(made.operations[0].table)  # type: ignore[attr-defined]
    clean = results(target, made, arrays, (LENGTH,))
    table[40, 3] = np.nan
    found = results(target, made, arrays, (LENGTH,))
    assert np.isnan(found[40:43, 3]).all() and np.isnan(found).sum() == 3
    found[40:43, 3] = clean[40:43, 3]
    assert np.array_equal(found, clean)
