"""The tests of kernels on a GPU: its driver in place of the emulator, and kernels of build/kernels in place of TVM's.

`make kernels` makes that pack; the machine with the GPU needs neither TVM nor NVRTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeq.targets.cuda import pack_file
from edgeq.targets.cuda.device import Kernel
from edgeq.targets.cuda.driver import DriverDevice
from edgeq.targets.cuda.pack import Generated, Variant
from edgeq.targets.cuda.pack_file import Pack
from edgeq.targets.cuda.supply import preferred

PACK = Path(__file__).parents[2] / "build" / "kernels" / "tests.kernels"


@cache
def pack() -> Pack:
    data = pack_file.read(PACK)
    assert data is not None, f"{PACK} is not there; make it with: make kernels"
    return pack_file.decode(data, PACK)


def kernels(variants: Sequence[Variant], on_kernel: Callable[[int, str], None] = lambda done, label: None) -> list[Generated]:
    """In place of build.kernels."""
    return [pack().kernels[variant].generated for variant in variants]


class RealDevice(DriverDevice):
    """In place of an EmulatedDevice; a GPU has its own order of threads."""

    def __init__(self, order: int = 0) -> None:
        super().__init__()
        self.order = order
        self.launches: dict[str, int] = {}
        self.replays = 0

    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        return super().load([replace(each, image=self._image(each)) for each in kernels])

    def _image(self, generated: Generated) -> bytes:
        images = pack().kernels[generated.variant].images
        return images[preferred(list(images), self.sm, self.driver)[0]].image

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None:
        super().launch(kernel, grid, block, arguments)
        symbol = kernel.generated.variant.symbol
        self.launches[symbol] = self.launches.get(symbol, 0) + 1

    def replay(self, graph: Any) -> None:
        super().replay(graph)
        self.replays += 1


def take_the_place(emulated: ModuleType, build: ModuleType) -> None:
    """Of the emulated device, and of what generates."""
    emulated.EmulatedDevice = RealDevice  # type: ignore[attr-defined]
    emulated.refusal = build.refusal = lambda: None  # type: ignore[attr-defined]
    build.kernels = kernels  # type: ignore[attr-defined]
