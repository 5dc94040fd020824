"""What can be had of a model: for every budget the allocation with the least divergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from edgeq.converters.budget.budget import Budget, Unit
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.probing.decode_times import DecodeTimes
from edgeq.converters.probing.estimate import estimated, grid
from edgeq.converters.probing.record import Divergences
from edgeq.converters.probing.solver import solve
from edgeq.errors import InputError
from edgeq.format.codec import Codec

POINTS = 10
SECOND_LOOK = 0.25
"""Share of the parts of which one codec more is measured."""
NEIGHBOURS = (0.8, 0.9, 1.0, 1.1, 1.25)
"""Shares of the bytes of an allocation at which others are shown beside it."""
READ: Unit = "read"
SECONDS: Unit = "seconds"


@dataclass(frozen=True)
class FrontierPoint:
    """An allocation, part -> codec in execution order, with what it takes and its predicted divergence in nats.

    bits      per weight, of everything stored for linear layers;  size, read   bytes of the file, and read for a token
    seconds   that this machine takes for a token; None: not measured
    """

    codecs: Mapping[str, Codec]
    kl: float
    bits: float
    size: int
    read: int
    seconds: float | None = None

    @property
    def names(self) -> dict[str, str]:
        return {part: codec.name for part, codec in self.codecs.items()}


@dataclass(frozen=True)
class Costs:
    """What a file takes besides its parts: bytes by unit, and the weights that bits are an average of."""

    fixed: Mapping[Unit, int]
    weights: int


def cost_of(part: AllocationPart, codec: Codec, unit: Unit, times: DecodeTimes | None) -> float:
    """What a part takes in `codec`, as `unit` counts it; `times`: for seconds."""
    if unit != SECONDS:
        return part.cost(codec, unit)
    assert times is not None
    return times.seconds(codec, lambda other: part.cost(other, READ))


def refuse_unmeetable(budget: Budget, parts: Sequence[AllocationPart], costs: Costs, times: DecodeTimes | None = None) -> None:
    """InputError: even the cheapest codec of every part takes more than `budget`.  A divergence cannot be judged unmeasured.

    times   for a budget of seconds
    """
    unit = budget.unit
    if unit == "kl":
        return
    least = costs.fixed.get(unit, 0) + sum(
        min(cost_of(part, codec, unit, times) for codec in part.candidates()) for part in parts
    )
    amount = 8 * least / costs.weights if unit == "bits" else least
    if budget.amount < amount:
        # Rounded up, so that what the message says can be met.
        raise InputError(f"{budget}: cannot be met; the nearest that can is {Budget(unit, 1.005 * amount)}")


@dataclass(frozen=True)
class Frontier:
    """The parts of a model, what was measured of them, and what the rest of the file takes; `times`: of this machine."""

    parts: Sequence[AllocationPart]
    measured: Divergences
    costs: Costs
    times: DecodeTimes | None = None

    @cached_property
    def _tables(self) -> list[dict[Codec, float]]:
        return [estimated(part, self.measured[part.name]) for part in self.parts]

    def _cost(self, unit: Unit) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
        return [
            np.array([cost_of(part, codec, unit, self.times) for codec in table], np.float64)
            for part, table in zip(self.parts, self._tables, strict=True)
        ]

    def best(self, budget: Budget) -> FrontierPoint:
        """The allocation with the least divergence that `budget` allows; of a divergence that with the fewest bytes read.

        InputError: nothing meets the budget; the message has the nearest that can be met.
        """
        refuse_unmeetable(budget, self.parts, self.costs, self.times)
        losses = [np.array([*table.values()]) for table in self._tables]
        if budget.unit == "kl":
            chosen = solve(self._cost(READ), losses, budget.amount)
        else:
            chosen = solve(losses, self._cost(budget.unit), self._room(budget))
        if chosen is None:
            least = sum(loss.min() for loss in losses)
            raise InputError(f"{budget}: cannot be met; the least divergence of all allocations is {least:.3g}")
        return self._point(chosen)

    def _room(self, budget: Budget) -> float:
        """What the parts may take, in bytes or, for a budget of seconds, in those."""
        limit = budget.amount * self.costs.weights / 8 if budget.unit == "bits" else budget.amount
        return limit - self.costs.fixed.get(budget.unit, 0)

    def _point(self, chosen: Sequence[int]) -> FrontierPoint:
        codecs = {p.name: [*table][i] for p, table, i in zip(self.parts, self._tables, chosen, strict=True)}
        return self.point(codecs)

    def point(self, codecs: Mapping[str, Codec]) -> FrontierPoint:
        """What an allocation takes, all of whose codecs are candidates of their parts."""
        kl = sum(table[codecs[part.name]] for part, table in zip(self.parts, self._tables, strict=True))
        taken = {
            unit: self.costs.fixed[unit] + sum(part.cost(codecs[part.name], unit) for part in self.parts)
            for unit in self.costs.fixed
        }
        times = self.times
        seconds = None if times is None else sum(cost_of(p, codecs[p.name], SECONDS, times) for p in self.parts)
        return FrontierPoint(dict(codecs), kl, 8 * taken["bits"] / self.costs.weights, taken["size"], taken["read"], seconds)

    def points(self, count: int = POINTS) -> list[FrontierPoint]:
        """Allocations from the fewest bytes read to nearly the most, evenly spaced by their logarithm."""
        costs = self._cost(READ)
        fixed = self.costs.fixed[READ]
        low, high = (fixed + sum(float(f(cost)) for cost in costs) for f in (np.min, np.max))
        limits = np.geomspace(low, high, count + 1)[:-1]
        return [self.best(Budget(READ, float(limit) * (1 + 1e-9))) for limit in limits]

    def neighbours(self, chosen: FrontierPoint, unit: Unit) -> list[FrontierPoint]:
        """The best allocations in NEIGHBOURS times the bytes of `chosen`, which is among them, by rising bytes.

        unit   "size" or "read": which bytes
        Left out is what would take fewer than the smallest allocation does, or gives no other one.
        """
        amount, found = chosen.size if unit == "size" else chosen.read, list[FrontierPoint]()
        for share in NEIGHBOURS:
            try:
                point = chosen if share == 1 else self.best(Budget(unit, share * amount))
            except InputError:
                continue
            if point is chosen or point.codecs not in (chosen.codecs, *(other.codecs for other in found)):
                found.append(point)
        return found

    def second_look(self) -> dict[str, Codec]:
        """What is worth measuring besides the grid: of the parts that lose most, the codec most often chosen on the frontier.

        It follows from the grid alone, so that it is the same whatever the budget, and after every resumption.
        """
        first = {part.name: {c.name: self.measured[part.name][c.name] for c in grid(part)} for part in self.parts}
        points = replace(self, measured=first).points()
        tables = {part.name: estimated(part, first[part.name]) for part in self.parts}
        shares = {part.name: sum(tables[part.name][p.codecs[part.name]] / p.kl for p in points) for part in self.parts}
        largest = sorted(shares, key=lambda name: -shares[name])[: max(1, round(SECOND_LOOK * len(shares)))]
        found = {}
        for part in self.parts:
            chosen = Counter(p.codecs[part.name] for p in points if p.codecs[part.name].name not in first[part.name])
            if part.name in largest and chosen:
                found[part.name] = chosen.most_common(1)[0][0]
        return found
