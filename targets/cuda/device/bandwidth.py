"""Bytes per second that a GPU reads from its memory: the size of what decode reaches a share of.

A kernel reads a block of memory and does nothing else.  Beside it, what a copy on the device reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeq.errors import ResourceError
from edgeq.system import measurements
from edgeq.targets.cuda.arguments.rows import ReadMemoryArguments
from edgeq.targets.cuda.device.device import Call, Copy, Device, Kernel
from edgeq.targets.cuda.supply.pack import Variant

READ, COPY = "read_bandwidth 2 of the GPU ", "copy_bandwidth of the GPU "
KERNEL = Variant("read_memory")
BLOCK = 256 << 20
"""Bytes that are read: twice the largest L2 cache of an NVIDIA GPU, which so keeps little of them for the next round."""
READ_SECONDS = 1.0
"""Seconds in which they are read again and again, once on a machine: the memory of an idle laptop takes 0.1 to 1 s to raise its
clock (an assumption)."""
MAX_ROUNDS = 20480
"""Rounds: as many as READ_SECONDS holds at 5 TB/s, should the device's clock stand still."""
MIN_BLOCK = 16 << 20
SLOW = 0.005
"""Seconds for the least block, which is read first: at 3 GB/s.  No GPU is slower; a device that is, is not asked for BLOCK."""
BLOCKS = 8
"""Blocks of threads of each multiprocessor."""
ROUND = 128 * 4 * 16
"""Bytes that a block of threads reads in a round (kernels/read.py)."""


def copied(name: str) -> float | None:
    """Bytes per second, read and written, that were measured on the GPU of that name; None: nothing yet."""
    return measurements.known(COPY + name, 1)


def known(name: str) -> float | None:
    """Bytes per second that were read on the GPU of that name; None: nothing measured yet."""
    return measurements.known(READ + name, 1)


def measured(device: Device, kernel: Kernel, refresh: bool = False) -> float | None:
    """Bytes per second, measured in at most two seconds unless known; None: the device has no memory left for it."""
    before, room = known(device.name), device.memory()[1] // 4
    if room < MIN_BLOCK:
        return before
    try:
        if refresh or before is None:
            measurements.measured(COPY + device.name, 1, lambda: (_copies(device, room), True), True, largest=True)
        return measurements.measured(READ + device.name, 1, lambda: (_reads(device, kernel, room), True), refresh, largest=True)
    except ResourceError:
        # Another program has taken what was free.
        return before


def _reads(device: Device, kernel: Kernel, room: int) -> float:
    ctas = BLOCKS * device.multiprocessors
    out = device.allocate(ctas * 128 * 4)

    def step(address: int, nbytes: int) -> Call:
        arguments = ReadMemoryArguments(x=address, out=out.address, ctas=ctas, rounds=nbytes // (ctas * ROUND))
        return Call(kernel, *kernel.generated.bind(arguments.by_name))

    nbytes, seconds = _quickest(device, room, ctas * ROUND, step)
    return nbytes / seconds


def _copies(device: Device, room: int) -> float:
    half = room // 2

    def step(address: int, nbytes: int) -> Copy:
        return Copy("within", address + nbytes, address, nbytes)

    nbytes, seconds = _quickest(device, half, 1, step, times=2)
    return 2 * nbytes / seconds


def _quickest(
    device: Device, room: int, multiple: int, step: Callable[[int, int], Call | Copy], times: int = 1
) -> tuple[int, float]:
    """Bytes, a multiple of `multiple`, and the least seconds that `step` takes over them by the device's clock.

    times   as many bytes are allocated
    """
    least = _rounds(device, min(MIN_BLOCK, room), multiple, step, times, 0.0)
    return least if least[1] > SLOW else _rounds(device, min(BLOCK, room), multiple, step, times, READ_SECONDS)


def _rounds(
    device: Device, most: int, multiple: int, step: Callable[[int, int], Call | Copy], times: int, enough: float
) -> tuple[int, float]:
    """The same of two rounds, or as many as take `enough` seconds, over at most `most` bytes."""
    nbytes = max(1, most // multiple) * multiple
    memory = device.allocate(times * nbytes)
    device.zero(memory.address, times * nbytes)
    marks, taken = (device.mark(), device.mark()), list[float]()
    # Recorded with its marks: the host takes as long to start a kernel as a fast GPU to read the block.
    recording = device.record([marks[0], step(memory.address, nbytes), marks[1]])
    while len(taken) < 2 or (sum(taken) < enough and len(taken) < MAX_ROUNDS):
        recording.start()
        taken += device.seconds(marks)
    return nbytes, max(min(taken), 1e-9)
