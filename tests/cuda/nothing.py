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
    def __init__(self, device: Nothing) -> None:
        self._device = device

    def start(self) -> None:
        self._device.started.append(self)

    def wait(self) -> None:
        """It has ended, and what was started before it too."""
        if self in self._device.started:
            del self._device.started[: self._device.started.index(self) + 1]


class Nothing(NoDevice):
    """started   recordings that nobody has waited for: while there are none, a GPU would wait for the host"""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Replayed] = []

    def pinned(self, nbytes: int) -> Pinned:
        return Ones(nbytes)

    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        return Replayed(self)
