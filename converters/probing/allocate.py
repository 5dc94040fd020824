"""From a budget to a plan: probe, frontier, and the allocation that the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgeq.converters.budget.budget import Budget, Unit
from edgeq.converters.budget.part_names import TABLE
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.budget.prediction import AllocationPrediction
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.decode_choice import MAX_DECODED, DecodeHere, closest, refuse_too_fast
from edgeq.converters.probing.estimate import grid
from edgeq.converters.probing.frontier import SECONDS, Costs, Frontier, FrontierPoint, refuse_unmeetable
from edgeq.converters.probing.gradients import by_gradients
from edgeq.converters.probing.measurements import Measurements, record_of, refuse_short_text
from edgeq.converters.probing.probe import OnProgress
from edgeq.converters.probing.record import ChosenAllocation
from edgeq.errors import InputError
from edgeq.format.codec import Codec
from edgeq.network.config import VisionConfig

PROVENANCE_BYTES = 256
"""Size in the provenance of each part: its codec and its measurements."""


@dataclass(frozen=True)
class AllocationResult:
    """`plan` carries out the allocation `point` of `frontier`."""

    plan: ConversionPlan
    frontier: Frontier
    point: FrontierPoint


def allocate(
    plan: ConversionPlan, on_progress: OnProgress, warn: Callable[[str], None], here: DecodeHere | None = None
) -> AllocationResult:
    """Choose the codec of every part under the budget of `plan`, which `preflight` made; `here`: for a budget of seconds.

    Measures what no run before has measured of the same source, text and options.  Killed and called again, it goes on after
    the last decoder layer measured, to the same allocation.
    InputError: the text is too short, or nothing meets the budget.  ResourceError: too little memory.
    """
    budget = plan.options.budget
    assert budget is not None
    if budget.unit == SECONDS:
        if here is None:
            raise InputError(
                "a budget of seconds goes with the decode times of this machine: use the command line, or give bytes"
            )
        return _within_seconds(plan, budget, here, on_progress, warn)
    parts = plan.parts()
    # Before hours of measurements, not after them.
    refuse_unmeetable(budget, parts, fixed_costs(plan, parts))
    frontier = measured_frontier(plan, on_progress, warn)
    point = frontier.best(budget)
    return AllocationResult(with_allocation(plan, point, frontier), frontier, point)


def _within_seconds(
    plan: ConversionPlan, budget: Budget, here: DecodeHere, on_progress: OnProgress, warn: Callable[[str], None]
) -> AllocationResult:
    """The allocation that was chosen when the same was asked before, or one that is chosen by decoding it now."""
    refuse_short_text(plan)
    key, parts = f"{budget.amount} {here.setting}", plan.parts()

    def label(done: int) -> None:
        on_progress(done, MAX_DECODED, "decoding an allocation")

    choice = record_of(plan).choices.get(key)
    if choice is not None and (choice.alone or here.resumes) and _codecs(choice, parts):
        warn("the codecs are those that were chosen when this speed was asked for before")
        frontier = measured_frontier(plan, on_progress, warn)
    else:
        label(0)
        refuse_too_fast(budget, parts, here)
        frontier = measured_frontier(plan, on_progress, warn)
        choice = closest(frontier, budget, here, label, warn)
        record = record_of(plan)
        record.choices[key] = choice
        record.keep()
        if not choice.alone:
            warn("something else ran meanwhile: the same command may choose other codecs next time; --save-plan keeps these")
    frontier = replace(frontier, times=here.times.scaled(choice.ratio))
    point = frontier.point(_codecs(choice, parts))
    return AllocationResult(with_allocation(plan, point, frontier), frontier, point)


def _codecs(choice: ChosenAllocation, parts: Sequence[AllocationPart]) -> dict[str, Codec]:
    """The codecs of a choice by part; none of one that is not a choice of these parts."""
    found = {part.name: codec for part in parts for codec in part.candidates() if codec.name == choice.names.get(part.name)}
    return found if len(found) == len(parts) else {}


def measured_frontier(plan: ConversionPlan, on_progress: OnProgress, warn: Callable[[str], None]) -> Frontier:
    """The parts with their measured divergences, from the cache or from a probe now.  Errors: as `Measurements.of` and
    `Measurements.measure`."""
    measurements = Measurements.of(plan)
    parts, found = measurements.parts, measurements.divergences
    costs, codecs = fixed_costs(plan, parts), {part.name: grid(part) for part in parts}
    measurements.measure(codecs, on_progress, warn)
    # In a deep model it would take as long as the first one: all of the text runs again.
    second = {} if by_gradients(plan) else Frontier(parts, found, costs).second_look()
    measurements.measure({name: (codec,) for name, codec in second.items()}, on_progress, warn)
    # There may be more: what budgets for other devices chose from.
    asked = {name: {codec.name for codec in (*first, second.get(name, first[0]))} for name, first in codecs.items()}
    measured = {name: {codec: value for codec, value in found[name].items() if codec in names} for name, names in asked.items()}
    return Frontier(parts, measured, costs)


def with_allocation(plan: ConversionPlan, point: FrontierPoint, frontier: Frontier) -> ConversionPlan:
    """`plan` with the codecs of `point`."""
    budget = plan.options.budget
    # Seconds measured again are others: a killed conversion goes on with its codecs, whatever they followed from.
    options = replace(plan.options, allocation=point.names, budget=None if budget and budget.unit == SECONDS else budget)
    return replace(plan.with_options(options), prediction=AllocationPrediction(point.kl, frontier.measured))


def fixed_costs(plan: ConversionPlan, parts: Sequence[AllocationPart]) -> Costs:
    """What the file takes besides the weights of its parts: norms, text, biases, metadata."""
    metadata = plan.metadata()
    sizes = metadata.bytes_per_token()
    apart = (VisionConfig.prefix, TABLE)
    linears = [linear for name, linear in metadata.linears.items() if not name.startswith(apart)]
    total: dict[Unit, int] = {
        "bits": sum(linear.nbytes for linear in linears),
        "size": plan.output_bytes + PROVENANCE_BYTES * len(parts),
        "read": sizes["weights"] + sizes["head"],
    }
    units: tuple[Unit, ...] = ("bits", "size", "read")
    now = {unit: sum(part.cost(part.items[0].recipe.codec, unit) for part in parts) for unit in units}
    weights = sum(linear.rows * linear.columns for linear in linears)
    return Costs({unit: total[unit] - now[unit] for unit in now}, weights)
