"""The choice of one candidate for every part, so that the sum of losses is least while the sum of costs stays within a limit.

This is the multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", chapter 11).  Taking
candidates from the convex hull of each part, as greedy methods do, leaves a gap of up to one step of the largest part; here it
is closed: dynamic programming over the states (cost, loss) that no other state beats in both, where a state is dropped as soon
as the Lagrangian bound of what is still to be chosen shows that it cannot become better than the best choice known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MAX_STATES = 1 << 18
"""States kept after a part: of more, the best in each of so many spans of cost.  No instance of a model has come near it."""
BISECTIONS = 100
SLACK = 1e-12
"""Share by which sums in another order may differ."""


@dataclass(frozen=True)
class _Part:
    """The candidates of one part that no other beats in cost and loss, by rising cost; `index`: their places in the input."""

    index: Integers
    cost: Floats
    loss: Floats

    def least(self, price: float) -> int:
        return int(np.argmin(self.loss + price * self.cost))


def solve(losses: Sequence[ArrayLike], costs: Sequence[ArrayLike], limit: float) -> tuple[int, ...] | None:
    """Index of the chosen candidate of every part; None: even the cheapest candidates cost more than `limit`.

    losses, costs   of every part its candidates' numbers, none negative, one part's arrays of the same length
    """
    parts = [
        _undominated(np.asarray(loss, np.float64), np.asarray(cost, np.float64))
        for loss, cost in zip(losses, costs, strict=True)
    ]
    if sum(float(part.cost[0]) for part in parts) > limit * (1 + SLACK):
        return None
    if sum(float(part.cost[-1]) for part in parts) <= limit:
        return tuple(int(part.index[-1]) for part in parts)
    price = _price(parts, limit)
    best = _improved(parts, [part.least(price) for part in parts], limit)
    found = _search(parts, limit, price, sum(float(part.loss[i]) for part, i in zip(parts, best, strict=True)))
    return tuple(int(part.index[i]) for part, i in zip(parts, found or best, strict=True))


def _undominated(loss: Floats, cost: Floats) -> _Part:
    order = np.lexsort((loss, cost))
    loss, cost = loss[order], cost[order]
    better = np.concatenate([[True], loss[1:] < np.minimum.accumulate(loss)[:-1]])
    return _Part(order[better].astype(np.int64), cost[better], loss[better])


def _price(parts: Sequence[_Part], limit: float) -> float:
    """The price of cost at which the least sum of loss + price x cost just fits the limit: the Lagrangian's best multiplier."""

    def cost(price: float) -> float:
        return sum(float(part.cost[part.least(price)]) for part in parts)

    steps = [-np.diff(part.loss) / np.diff(part.cost) for part in parts if len(part.cost) > 1]
    slopes = np.concatenate(steps)
    low, high = float(slopes.min()) / 2, float(slopes.max()) * 2
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if cost(middle) <= limit else (middle, high)
    return high


def _improved(parts: Sequence[_Part], chosen: list[int], limit: float) -> list[int]:
    """`chosen`, which fits, with single candidates exchanged for better ones for as long as one still fits."""
    spent = sum(float(part.cost[i]) for part, i in zip(parts, chosen, strict=True))
    while True:
        gain, change = 0.0, None
        for p, part in enumerate(parts):
            room = limit - spent + float(part.cost[chosen[p]])
            best = int(np.searchsorted(part.cost, room, "right")) - 1
            saved = float(part.loss[chosen[p]] - part.loss[best])
            if best != chosen[p] and saved > gain:
                gain, change = saved, (p, best)
        if change is None:
            return chosen
        p, best = change
        spent += float(parts[p].cost[best] - parts[p].cost[chosen[p]])
        chosen[p] = best


def _search(parts: Sequence[_Part], limit: float, price: float, known: float) -> list[int] | None:
    """A choice with a lower loss than `known`; None: there is none."""
    # Bounds at several prices: the best one is tightest for states that spend as the optimum does; at 0 it is the loss itself.
    prices = price * np.array([0.0, 0.8, 1.0, 1.25])
    relaxed = np.array([[float((part.loss + x * part.cost).min()) for part in parts] for x in prices])
    # [price, part]: the least that all parts from this one on add to loss + price x cost; the last column is 0.
    after = np.concatenate([np.cumsum(relaxed[:, ::-1], axis=1)[:, ::-1], np.zeros((len(prices), 1))], axis=1)
    cheapest = np.concatenate([np.cumsum([part.cost[0] for part in parts][::-1])[::-1], [0.0]])
    room, allowed = limit * (1 + SLACK), known * (1 - SLACK)
    cost, loss = np.zeros(1), np.zeros(1)
    steps: list[tuple[Integers, Integers]] = []
    for p, part in enumerate(parts):
        costs, losses = (cost[:, None] + part.cost).ravel(), (loss[:, None] + part.loss).ravel()
        bound = (losses + after[:, p + 1, None] - prices[:, None] * (limit - costs)).max(0)
        kept = np.flatnonzero((costs + cheapest[p + 1] <= room) & (bound < allowed))
        if not len(kept):
            return None
        kept = _pareto(costs, losses, kept, limit)
        steps.append((kept // len(part.cost), kept % len(part.cost)))
        cost, loss = costs[kept], losses[kept]
    state, chosen = int(np.argmin(loss)), list[int]()
    for parent, choice in reversed(steps):
        chosen.append(int(choice[state]))
        state = int(parent[state])
    return chosen[::-1]


def _pareto(cost: Floats, loss: Floats, kept: Integers, limit: float) -> Integers:
    """Those of the states `kept` that no other beats in cost and loss."""
    order: Integers = kept[np.lexsort((loss[kept], cost[kept]))]
    lowest = np.minimum.accumulate(loss[order])
    order = order[np.concatenate([[True], loss[order][1:] < lowest[:-1]])]
    if len(order) > MAX_STATES:
        # By falling loss as cost rises: the last state of a span has its least loss.
        span = (cost[order] * (MAX_STATES / limit)).astype(np.int64)
        order = order[np.concatenate([span[1:] != span[:-1], [True]])]
    return order
