"""Bytes per second that a GPU reads from its memory: the size of what decode reaches a share of.

No kernel of a model reads memory and nothing else, so the driver copies a block of memory on the device: it reads and writes
every byte, and both together are what the memory gives.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from edgeq import measurements
from edgeq.targets.cuda.device import Memory

WHAT = "read_bandwidth of the GPU "
BLOCK, LEAST_BLOCK, ROUNDS = 256 << 20, 16 << 20, 8


@runtime_checkable
class Copying(Protocol):
    """A device that copies and takes times, which an emulated one does not."""

    name: str

    def memory(self) -> tuple[int, int]: ...

    def allocate(self, nbytes: int) -> Memory: ...

    def copy_seconds(self, target: int, source: int, nbytes: int) -> float: ...


def known(name: str) -> float | None:
    """What was measured on the GPU of that name; None: nothing yet."""
    return measurements.known(WHAT + name, 1)


def measured(device: Copying, refresh: bool = False) -> float | None:
    """Bytes per second, measured in a tenth of a second unless known; None: the device has no memory left for it."""
    block = min(BLOCK, device.memory()[1] // 4)
    if block < LEAST_BLOCK and not known(device.name):
        return None

    def measure() -> tuple[float, bool]:
        source, target = device.allocate(block), device.allocate(block)
        seconds = min(device.copy_seconds(target.address, source.address, block) for _ in range(ROUNDS))
        return 2 * block / seconds, True

    return measurements.measured(WHAT + device.name, 1, measure, refresh and block >= LEAST_BLOCK, largest=True)
