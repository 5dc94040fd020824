"""A CUDA device, as small as a program needs it: memory, kernels, launches.

The program, its lowering and its tests know nothing else of a GPU, so the same code runs on a driver and on an emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.supply.pack import Generated, Variant


class Memory(Protocol):
    """Bytes on a device, from `address`, a multiple of 256; freed when the object is dropped."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Kernel(Protocol):
    """A kernel that a device has loaded, and how it is launched."""

    @property
    def generated(self) -> Generated: ...


class Pinned(Protocol):
    """Memory of the host that a recording copies from and to, uint8, from `address`; freed when the object is dropped."""

    @property
    def address(self) -> int: ...

    @property
    def array(self) -> NDArray[np.uint8]: ...


class Call(NamedTuple):
    """A launch, as `Device.launch` takes it."""

    kernel: Kernel
    grid: Sequence[int]
    block: Sequence[int]
    arguments: Sequence[int | float]


class Copy(NamedTuple):
    """`nbytes` from `source` to `target`: in from pinned memory to the device, out of it to pinned memory, or within it."""

    way: Literal["in", "out", "within"]
    target: int
    source: int
    nbytes: int


class Mark:
    """A point in what a device does, of which it keeps the time."""


class Recording(Protocol):
    """Calls, copies and marks that are started together, one after another as they were recorded, with the same arguments."""

    def start(self) -> None:
        """Start them after what was started before.  ResourceError: the device has no memory to start them, and none was."""
        ...

    def wait(self) -> None:
        """Wait until they have ended as often as they were started; what was started after them may still run."""
        ...


class Device(Protocol):
    """One device, for callers from any threads.

    sm                compute capability, 87 for 8.7
    multiprocessors   that run blocks side by side
    integrated        it shares its memory with the processor

    DeviceError: it was lost, or a kernel failed.
    """

    name: str
    sm: int
    multiprocessors: int
    integrated: bool

    def memory(self) -> tuple[int, int]:
        """Bytes of the device: all, and those that are free."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Memory with undefined contents.  ResourceError: there is not that much."""
        ...

    def write(self, address: int, data: NDArray[Any]) -> None:
        """Copy a contiguous array to the device, after what was launched before."""
        ...

    def read(self, address: int, data: NDArray[Any]) -> None:
        """Fill a contiguous array from the device, after what was launched before."""
        ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device, after what was launched before."""
        ...

    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        """Kernels made ready to launch.  UnsupportedError: the device does not take their image."""
        ...

    def blocks_held(self, kernel: Kernel) -> int:
        """Blocks of threads of a kernel, as large as it is launched with, that a multiprocessor holds at once."""
        ...

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None:
        """Start a kernel over at least one block; `arguments` in the order of its parameters, pointers as addresses."""
        ...

    def pinned(self, nbytes: int) -> Pinned:
        """Memory of the host, as zeros.  ResourceError: there is not that much."""
        ...

    def mark(self) -> Mark:
        """A mark for one time, or for that of every replay of a recording that has it."""
        ...

    def stamp(self, mark: Mark) -> None:
        """Let the time of the mark be that at which everything has ended that was launched before."""
        ...

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Between each mark and the next one, by the clock of the device; waits for the last."""
        ...

    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        """Calls, copies and marks to be replayed, none of which is started.  ResourceError: the device has no memory for it."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...


def upload(device: Device, array: NDArray[Any]) -> Memory:
    """A copy of a host array on the device."""
    data = np.ascontiguousarray(array)
    memory = device.allocate(data.nbytes)
    device.write(memory.address, data)
    return memory
