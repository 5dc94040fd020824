"""Attention in bf16 for rows that see ranges, by whatever multiplies here: within what bf16 rounds of the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.records import Mode
from edgeq.system import machine
from edgeq.system.devices import DEVICES
from edgeq.targets import load
from edgeq.targets.cpu.ahead import jobs_for
from edgeq.targets.cpu.jit import processor
from edgeq.targets.cpu.kernels.attention import bf16_panel
from edgeq.targets.cpu.kernels.attention.bf16_vectors import FEATURE
from edgeq.targets.graph import Attention, CacheSpec, CacheWrite, Embed, Graph
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import HERE, Arrays, recording

ISAS = [
    pytest.param(
        isa, marks=pytest.mark.skipif(not (there and bf16_panel.COMPILES), reason="this processor does not multiply bf16 so")
    )
    for isa, there in (
        ("avx512-amx", "avx512-amx" in HERE),
        ("avx512-vnni", "avx512-vnni" in HERE and FEATURE in machine.cpu().features),
    )
]


def attention_case(dim: int, count: int, sessions: int, damaged: dict[tuple[int, int], float] | None = None):
    """Two frames of unequal length, seen whole (kind 0), and windows of 16 slots (kind 1), dealt out to `sessions` sessions."""
    arrays, heads, total = Arrays(), 2, count * sessions
    x = np.random.default_rng(dim).standard_normal((total, 3 * heads * dim)).astype(np.float32)
    for place, value in (damaged or {}).items():
        x[place] = value
    slots = np.arange(total, dtype=np.int32) // sessions
    first = count * 3 // 7
    frames = np.where(slots < first, [[0], [first]], [[first], [count]])
    windows = np.stack([slots // 16 * 16, np.minimum(slots // 16 * 16 + 16, count)])
    spans = np.stack([frames, windows]).astype(np.int32)

    def result(
        span: int, target: str, isa: str | None, order: np.ndarray | None = None, mode: Mode = "a8", kernels: list | None = None
    ) -> np.ndarray:
        operations = (
            Embed(-1, arrays.add(x, "f32"), "x"),
            CacheWrite(0, "x", heads * dim, 2 * heads * dim, heads, dim, cache=0),
            Attention(0, "x", 0, "a", heads, heads, dim, dim**-0.5, 0, cache=0, span=span),
        )
        graph = Graph({"x": 3 * heads * dim, "a": heads * dim}, operations, "a", (CacheSpec(heads, dim, dim),))
        program = load(target).compile(graph, arrays, Options(mode, 2, isa, max_rows=total, max_logits=total))
        pages = [[program.new_page() for _ in range(count // PAGE + 1)] for _ in range(sessions)]
        order = np.arange(total, dtype=np.int32) if order is None else order
        rows = Rows(
            order, slots[None][:, order], slots[order], order % sessions, pages, np.arange(total, dtype=np.int32),
            spans=spans[:, :, order],
        )  # fmt: skip
        with recording(program) as times:
            found = program.run(rows).copy()
        if kernels is not None:
            kernels += [step.kernel for step in times[0].steps]
        return found

    return result, spans


ATTENTION = [(80, 600, 1), (20, 90, 2)]
MORE_ATTENTION = [(64, 150, 1), (72, 290, 1), (16, 33, 3), (128, 257, 1), (81, 100, 1), (8, 1, 1)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dim", "count", "sessions"),
    [*ATTENTION, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE_ATTENTION)],
)
def test_attention_is_that_of_the_reference_but_for_what_bf16_rounds(dim: int, count: int, sessions: int, isa: str) -> None:
    """bf16 keeps 8 bits: scores of about 1 are within 2^-7, and weights and values within 2^-8 of themselves."""
    result, _ = attention_case(dim, count, sessions)
    for span in (0, 1):
        expected, found = result(span, "reference", None), result(span, "cpu", isa)
        assert np.abs(found - expected).max() < 0.02
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.004 * np.sqrt(np.mean(expected**2)) * (1 + dim / 40)
        order = np.random.default_rng(0).permutation(count * sessions).astype(np.int32)
        assert np.array_equal(result(span, "cpu", isa, order), found[order])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("place", [0, 2 * 80 + 5, 4 * 80 + 79], ids=["query", "key", "value"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_attention_brings_what_is_not_finite_to_the_rows_that_see_it(place: int, value: float, isa: str) -> None:
    row = 41
    result, spans = attention_case(80, 150, 1, {(row, place): value})
    sees = (spans[1, 0] <= row) & (row < spans[1, 1])
    found = result(1, "cpu", isa)
    finite = np.isfinite(found).all(axis=1)
    assert np.array_equal(finite, np.arange(150) != row if place < 2 * 80 else ~sees)


@pytest.mark.parametrize("isa", ISAS)
def test_16_bit_activations_keep_float32(isa: str) -> None:
    result, _ = attention_case(20, 90, 1)
    named: dict[str, list] = {"a8": [], "a16": []}
    found = {mode: result(0, "cpu", isa, mode=mode, kernels=kernels) for mode, kernels in named.items()}
    assert "attend_bf16" in named["a8"] and "attend" in named["a16"]
    expected = result(0, "reference", None)
    assert np.abs(found["a16"] - expected).max() < 1e-5 < np.abs(found["a8"] - expected).max()


@pytest.mark.parametrize(
    ("ours", "its", "compiles"), [({FEATURE}, set(), True), (set(), {FEATURE}, True), (set(), {FEATURE}, False)]
)
def test_a_device_gets_what_its_own_processor_multiplies(
    ours: set[str], its: set[str], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, here = DEVICES["x86-avx512-vnni"], processor.current()
    there = processor.of_device(device)
    monkeypatch.setattr(processor, "current", lambda: replace(here, features=here.features - {FEATURE} | ours))
    monkeypatch.setattr(processor, "of_device", lambda _: replace(there, features=there.features | its))
    monkeypatch.setattr(bf16_panel, "COMPILES", compiles)
    graph = Graph(
        {"x": 48, "a": 16}, (Attention(0, "x", 0, "a", 1, 1, 16, 0.25, 0, cache=0, span=0),), "a", (CacheSpec(1, 16, 16),)
    )
    jobs = jobs_for(device, graph, Arrays(), Options("a8", isa="avx512-vnni"), ["a8"])
    assert {factory.__name__ for factory, _ in jobs} & {"attend", "attend_bf16"} == {
        "attend_bf16" if its and compiles else "attend"
    }
