"""The exact choice of one candidate a part, held to brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from edgeq.converters.probing import solver
from edgeq.converters.probing.solver import solve

Table = list[list[float]]


def brute(losses: Table, costs: Table, limit: float) -> float | None:
    found = None
    for choice in itertools.product(*(range(len(part)) for part in losses)):
        loss = sum(part[i] for part, i in zip(losses, choice, strict=True))
        if sum(part[i] for part, i in zip(costs, choice, strict=True)) <= limit and (found is None or loss < found):
            found = loss
    return found


def test_the_choice_is_the_best_of_all() -> None:
    for seed in range(40):
        the_choice_is_the_best_of_all(seed)


def the_choice_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 6, random.integers(1, 7))
    losses = [(random.random(n) * 10 ** random.uniform(-3, 0)).tolist() for n in sizes]
    # Many equal costs, some of 0: every kind of tie.
    costs = [random.integers(0, 12, n).astype(float).tolist() for n in sizes]
    for limit in random.uniform(0, 12 * len(sizes), 6):
        best, found = brute(losses, costs, limit), solve(losses, costs, limit)
        assert (best is None) is (found is None)
        if best is not None and found is not None:
            assert sum(part[i] for part, i in zip(costs, found, strict=True)) <= limit
            assert sum(part[i] for part, i in zip(losses, found, strict=True)) == pytest.approx(best, rel=1e-9)


def test_what_lies_above_the_convex_hull_is_chosen_where_it_is_best() -> None:
    # The middle candidate lies above the line between the others: no price makes it the least.
    assert solve([[10.0, 6.0, 0.0]], [[0.0, 5.0, 10.0]], 9) == (1,)
    assert solve([[10.0, 6.0, 0.0], [1.0, 0.0]], [[0.0, 5.0, 10.0], [0.0, 4.0]], 9) == (1, 1)


def test_nothing_fits_everything_fits_and_just_fits() -> None:
    losses, costs = [[3.0, 1.0], [2.0, 1.0]], [[1.0, 4.0], [2.0, 5.0]]
    assert solve(losses, costs, 2.9) is None
    assert solve(losses, costs, 3) == (0, 0)
    assert solve(losses, costs, 9) == (1, 1) == solve(losses, costs, math.inf)


def model(parts: int, seed: int) -> tuple[Table, Table]:
    """Losses and costs as a model has them: 7 widths in 4 group sizes."""
    random, sizes = np.random.default_rng(seed), (16, 32, 64, 128)
    losses, costs = Table(), Table()
    for _ in range(parts):
        weights, level = float(random.choice([1, 0.5, 3, 1.5])) * 4e6, 10 ** random.normal(-3, 0.5)
        noise = random.uniform(0.9, 1.1, (7, 4))
        losses.append([level * 1.3**g / (2**b - 1) ** 2 * noise[b - 2, g] for b in range(2, 9) for g in range(4)])
        costs.append([weights * (b / 8 + 3 / size) for b in range(2, 9) for size in sizes])
    return losses, costs


def test_a_large_model_is_solved_within_its_limit_and_better_than_by_the_hull() -> None:
    losses, costs = model(300, 0)
    limit = 1.6 * sum(part[3] for part in costs)
    found = solve(losses, costs, limit)
    parts = [solver._undominated(np.array(loss), np.array(cost)) for loss, cost in zip(losses, costs, strict=True)]
    price = solver._price(parts, limit)
    hull = [part.least(price) for part in parts]
    assert found is not None
    spent, lost = (sum(part[i] for part, i in zip(table, found, strict=True)) for table in (costs, losses))
    assert spent <= limit and lost < sum(float(part.loss[i]) for part, i in zip(parts, hull, strict=True))


def test_with_few_states_the_choice_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, costs = model(40, 1)
    limit = 1.5 * sum(part[3] for part in costs)
    exact = solve(losses, costs, limit)
    monkeypatch.setattr(solver, "MAX_STATES", 4)
    found = solve(losses, costs, limit)
    assert found is not None and exact is not None
    lost = [sum(part[i] for part, i in zip(losses, choice, strict=True)) for choice in (exact, found)]
    assert sum(part[i] for part, i in zip(costs, found, strict=True)) <= limit and lost[0] <= lost[1] < 1.05 * lost[0]
