"""Numbers by which tokens are drawn, some of which can be looked at before they are taken."""

from __future__ import annotations

from collections import deque

import numpy as np


class Uniforms:
    """Numbers from 0 to, and without, 1, of a seeded generator (PCG64).

    sample   which of several texts of one prompt; all but the first have generators of their own, derived from the seed
    """

    def __init__(self, seed: int | None, sample: int = 0) -> None:
        derived = sample and seed is not None
        of = np.random.SeedSequence(seed, spawn_key=(sample,)) if derived else seed
        self._random = np.random.Generator(np.random.PCG64(of))
        self._coming: deque[float] = deque()

    def take(self) -> float:
        return self._coming.popleft() if self._coming else self._random.random()

    def coming(self) -> tuple[float, float]:
        """The next two that `take` gives."""
        while len(self._coming) < 2:
            self._coming.append(self._random.random())
        return self._coming[0], self._coming[1]
