"""A model whose outputs are scaled so that squared errors mislead: bits by measured divergences lose less than uniform ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.converters.budget.budget import Budget
from edgeq.converters.convert import carry_out
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing.allocate import fixed_costs, measured_frontier
from edgeq.format.codec import Codec
from edgeq.tools.lab.plant_outliers import Kinds, plant

OPTIONS = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)


@pytest.mark.exhaustive
def test_bits_by_measured_divergences_lose_less_than_uniform_ones(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # All outputs of v and up are 30 times as large and what reads them divides by it: the same function, and the same relative
    # errors of rounding, but squared errors of the two are 900 times as large, and would take the bits of all others.
    source = tmp_path / "scaled"
    plant(checkpoint("llama_gqa"), source, Kinds(values=30, up=30, channels=1 << 20))
    plan = preflight(str(source), OPTIONS)
    uniform = {part.name: "i3 g64 zero" for part in plan.parts()}
    read = fixed_costs(plan, plan.parts()).fixed["read"] + sum(
        part.cost(Codec.named("i3 g64 zero"), "read") for part in plan.parts()
    )
    budget = Budget("read", read)
    frontier = measured_frontier(plan, lambda *_: None, pytest.fail)
    allocations = {"uniform": uniform, "measured": frontier.best(budget).names}
    found = {}
    for name, allocation in allocations.items():
        made = carry_out(
            preflight(str(source), replace(OPTIONS, allocation=allocation)), tmp_path / f"{name}.edgeq", lambda *_: None
        )
        sizes = made.file.metadata.bytes_per_token()
        assert sizes["weights"] + sizes["head"] <= read
        measured = made.file.metadata.provenance["measured"]
        assert isinstance(measured, dict)
        found[name] = measured["kl"]
    assert found["measured"] < found["uniform"], found
