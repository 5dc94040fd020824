"""A model on which squared errors of single layers give the bits to the wrong parts, and the measured divergence does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.codec import Codec
from edgeq.converters.allocation.allocate import fixed_costs, measured_frontier
from edgeq.converters.allocation.budget import Budget
from edgeq.converters.convert import carry_out
from edgeq.converters.options import ConvertOptions
from edgeq.converters.preflight import preflight
from edgeq.tools.lab.layer_errors import by_layer_errors
from edgeq.tools.lab.plant_outliers import Kinds, plant

OPTIONS = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)


def test_squared_errors_of_layers_lose_more_than_uniform_bits_where_divergences_lose_less(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # All outputs of v and up are 30 times as large and what reads them divides by it: the same function, and the same relative
    # errors of rounding, but squared errors of the two are 900 times as large.
    source = tmp_path / "scaled"
    plant(checkpoint("llama_gqa"), source, Kinds(values=30, up=30, channels=1 << 20))
    plan = preflight(str(source), OPTIONS)
    uniform = {part.name: "i3 g64 zero" for part in plan.parts()}
    read = fixed_costs(plan, plan.parts()).fixed["read"] + sum(
        part.cost(Codec.named("i3 g64 zero"), "read") for part in plan.parts()
    )
    budget = Budget("read", read)
    frontier = measured_frontier(plan, lambda *_: None, pytest.fail)
    allocations = {"uniform": uniform, "errors": by_layer_errors(plan, budget), "measured": frontier.best(budget).names}
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
    assert found["errors"] > 1.2 * found["uniform"] and found["measured"] < found["uniform"], found
