"""Predictions by gradients: they are what is measured where errors are small, and deep models are judged by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from edgeq.converters.budget.budget import Budget
from edgeq.converters.calibration.head import last_norm
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing import gradients
from edgeq.converters.probing.allocate import measured_frontier
from edgeq.converters.probing.estimate import grid
from edgeq.converters.probing.gradients import GradientProbe, by_gradients, gradient_at_end, taken_rows
from edgeq.converters.probing.measurements import probe_rows
from edgeq.converters.probing.probe import Probe
from edgeq.converters.probing.record import Divergences
from edgeq.format.codec import Codec

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)
FOUR = Codec("int", 4, 32, symmetric=False)


def silent(*_: object) -> None:
    pass


def plan_of(folder: Path) -> ConversionPlan:
    return preflight(str(folder), replace(SMALL, budget=Budget("bits", 3.4)))


def test_predictions_are_what_is_measured_where_errors_are_small() -> None:
    plan = preflight("models/tiny-llama", replace(SMALL, budget=Budget("bits", 4.0), calibration_length=256))
    parts = [part for part in plan.parts() if part.name in ("layers.1.down", "layers.4.o", "layers.4.gate_up", "layers.5.qkv")]
    found: list[Divergences] = [{}, {}]
    for kind, divergences in zip((GradientProbe, Probe), found, strict=True):
        for measured in kind(plan, parts, lambda part: (FOUR,), probe_rows(plan), silent).run():
            divergences.update(measured)
    predicted, measured = found
    assert predicted.keys() == measured.keys() == {part.name for part in parts}
    ratios = {name: predicted[name][FOUR.name] / measured[name][FOUR.name] for name in predicted}
    # An eighth to a third of the output channels stands for all of them.
    assert all(0.7 < ratio < 1.4 for ratio in ratios.values()), ratios


def test_the_gradient_at_the_end_is_that_of_the_labels_log_likelihood(checkpoint: Callable[..., Path]) -> None:
    plan = plan_of(checkpoint("llama_gqa", num_hidden_layers=1))
    config, random = plan.method.stored_config, torch.Generator().manual_seed(1)
    states = torch.randn(2, 700, config.hidden_size, generator=random)
    found = gradient_at_end(config, plan.model, plan.compute, states)
    norm, head = last_norm(config, plan.model), torch.from_numpy(plan.model.whole("model.embed_tokens.weight"))
    states.requires_grad_()
    logits = norm(states) @ head.T
    # Of which label it is the gradient is not told; it is that of one of them.
    (expected,) = torch.autograd.grad((logits.softmax(-1).detach() * logits.log_softmax(-1)).sum(), states)
    assert float(expected.abs().max()) < 1e-4, "the expectation over labels is 0"
    token = found[0, 5]
    each = torch.autograd.functional.jacobian(lambda x: -functional.log_softmax(norm(x) @ head.T, -1), states[0, 5].detach())
    gaps = (each - token).abs().amax(1)
    assert float(gaps.min()) < 1e-4 * float(token.abs().max()) < float(gaps.median())
    # Over many tokens the labels have the frequencies of the prediction: the mean of their gradients is near 0.
    flat = found.flatten(0, 1)
    assert float(flat.mean(0).norm()) < 4 * float(flat.norm(dim=1).mean()) / len(flat) ** 0.5


def test_the_rows_that_stand_for_all_are_whole_blocks_at_every_place_of_a_head() -> None:
    assert taken_rows(64).tolist() == list(range(64))
    taken = taken_rows(3072)
    assert len(taken) < 3072 // 8
    blocks = (taken[::16] // 16).tolist()
    assert {block % 4 for block in blocks} == {0, 1, 2, 3} and len(taken) == 16 * len(blocks) >= 16 * 8


@pytest.mark.parametrize("family, possible", [("llama_mha", True), ("opt", True), ("mixtral", False), ("lfm2", False)])
def test_which_models_gradients_serve(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, possible: bool
) -> None:
    plan = plan_of(checkpoint(family))
    assert not by_gradients(plan)
    monkeypatch.setattr(gradients, "DEEP", 1)
    assert by_gradients(plan) == possible


def test_a_deep_model_is_predicted_in_one_run_in_the_codecs_of_the_grid(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "DEEP", 1)
    plan, asked = plan_of(checkpoint("llama_gqa", intermediate_size=128)), list[dict[str, int]]()

    def run(self: GradientProbe) -> Iterator[Divergences]:
        asked.append({part.name: len(self.grid(part)) for part in self.missing})
        for part in self.missing:
            yield {part.name: {codec.name: 0.01 / (2**codec.bits - 1) ** 2 for codec in self.grid(part)}}

    monkeypatch.setattr(GradientProbe, "run", run)
    frontier = measured_frontier(plan, silent, pytest.fail)
    (only,) = asked
    assert only == {part.name: len(grid(part)) for part in plan.parts()}
    assert {name: len(values) for name, values in frontier.measured.items()} == only


def test_a_probe_by_gradients_goes_on_with_what_is_missing(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(checkpoint("llama_gqa", intermediate_size=128))

    def run(parts: list[str]) -> Divergences:
        missing = [part for part in plan.parts() if part.name in parts]
        found: Divergences = {}
        for measured in GradientProbe(plan, missing, lambda part: part.candidates()[:1], probe_rows(plan), silent).run():
            found.update(measured)
        return found

    both = run(["layers.0.down", "layers.1.o"])
    assert run(["layers.1.o"]) == {"layers.1.o": both["layers.1.o"]} and both["layers.1.o"] != both["layers.0.down"]
