"""A device that does nothing, for what the host does; its results are ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeq.targets.cuda.device.device import Call, Copy, Mark, Pinned, Recording
from edgeq.targets.cuda.run.plan import NoDevice


class Ones:
    """Pinned memory whose 32-bit numbers are all 1: the id of a token, and that all logits are finite."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.ones(-(-nbytes // 4), np.int32).view(np.uint8)[:nbytes]
        self.address = self.array.ctypes.data


class Replayed:
    def replay(self) -> None: ...


class Nothing(NoDevice):
    def pinned(self, nbytes: int) -> Pinned:
        return Ones(nbytes)

    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        return Replayed()
