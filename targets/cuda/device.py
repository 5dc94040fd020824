"""A CUDA device, as small as a program needs it: memory, kernels, launches.

The program, its lowering and its tests know nothing else of a GPU, so the same code runs on a driver and on an emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.pack import Generated, Variant


class Memory(Protocol):
    """Bytes on a device, from `address`, a multiple of 256; freed when the object is dropped."""

    address: int
    nbytes: int


class Kernel(Protocol):
    """A kernel that a device has loaded, and how it is launched."""

    generated: Generated


class Device(Protocol):
    """One device.  One caller at a time.

    sm   compute capability, 87 for 8.7

    DeviceError: it was lost, or a kernel failed.
    """

    name: str
    sm: int

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

    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        """Kernels made ready to launch."""
        ...

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None:
        """Start a kernel over at least one block; `arguments` in the order of its parameters, pointers as addresses."""
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
