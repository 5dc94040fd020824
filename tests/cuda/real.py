"""The tests of kernels on a GPU: its driver in place of the emulator, and kernels of build/kernels in place of TVM's.

`make kernels` makes that pack; the machine with the GPU needs neither TVM nor NVRTC.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import ClassVar

from edgeq.errors import DeviceError, InputError
from edgeq.targets.cuda.device import discover
from edgeq.targets.cuda.device.device import Call, Copy, Kernel, Mark, Recording
from edgeq.targets.cuda.device.driver import DriverDevice
from edgeq.targets.cuda.supply import nvrtc
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.cuda.supply.pack_file import Pack
from edgeq.targets.cuda.supply.supply import preferred
from tests.cuda.first_run import carried


class RealDevice(DriverDevice):
    """In place of an EmulatedDevice; a GPU has its own order of threads, and its kernels are compiled already.

    pack    the only kernels that it has
    clock   of the host; an emulated device has one that tests turn
    held    what keeps the context of this process while no other device does: to make one takes a third of a second (an
            assumption), and each launch of a test has a device of its own
    """

    pack: ClassVar[Pack]
    held: ClassVar[DriverDevice | None] = None

    def __init__(self, order: int = 0, level: str = "") -> None:
        self.hold()
        super().__init__()
        self.order = order
        self.launches: dict[str, int] = {}
        self.replays = 0
        self.clock = iter(perf_counter, None)

    @classmethod
    def hold(cls) -> None:
        """Keep a context, a new one after a kernel failed, which takes its context along.  DeviceError: there is none."""
        if cls.held is not None:
            with suppress(DeviceError):
                cls.held.synchronize()
                return
            cls.held = None
            # What a failed test left behind holds the lost context too.
            gc.collect()
        cls.held = DriverDevice()
        cls.held.synchronize()

    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        return super().load([replace(each, image=self._image(each)) for each in kernels])

    def _image(self, generated: Generated) -> bytes:
        images = self.pack.kernels[generated.variant].images
        return images[preferred(list(images), self.sm, self.driver)[0]].image

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None:
        super().launch(kernel, grid, block, arguments)
        symbol = kernel.generated.variant.symbol
        self.launches[symbol] = self.launches.get(symbol, 0) + 1

    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        recording = super().record(steps)
        # Those with marks are measurements, which are not counted.
        return recording if any(isinstance(step, Mark) for step in steps) else RealRecording(self, recording)


@dataclass(frozen=True)
class RealRecording:
    """A recording whose replays its device counts."""

    device: RealDevice
    recording: Recording

    def start(self) -> None:
        self.recording.start()
        self.device.replays += 1

    def wait(self) -> None:
        self.recording.wait()


def take_the_place(emulated: ModuleType, build: ModuleType, path: Path) -> None:
    """Replace the emulated device, and what generates.

    path   of the pack

    InputError: there is no GPU, or no pack that it runs.  FormatError: the pack is damaged.
    """
    gpus = discover.find()
    if gpus.first is None:
        raise InputError(f"no GPU to test on: {gpus.refused}")
    RealDevice.pack = pack = carried.read(path)
    if not preferred(pack.archs, gpus.first.sm, gpus.driver):
        arch = nvrtc.arch_for(gpus.first.sm)
        raise InputError(f"{path} has kernels for {', '.join(pack.archs)} only; make it again with: make kernels GPU={arch}")

    def kernels(
        variants: Sequence[Variant], on_kernel: Callable[[int, str], None] = lambda done, label: None
    ) -> list[Generated]:
        missing = sorted(variant.symbol for variant in set(variants) - set(pack.kernels))
        assert not missing, f"{path} has no {', '.join(missing)}; make it again with: make kernels"
        return [pack.kernels[variant].generated for variant in variants]

    emulated.EmulatedDevice, emulated.EmulatedRecording = RealDevice, RealRecording  # type: ignore[attr-defined]
    emulated.refusal = build.refusal = lambda: None  # type: ignore[attr-defined]
    build.kernels = kernels  # type: ignore[attr-defined]
