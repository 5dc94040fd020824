"""The Device of an NVIDIA GPU, over the driver's own functions (CUDA Driver API) in `cuda.bindings`.

Everything goes to one stream.  What is copied to the device passes through one pinned buffer of bounded size, so that a model
of any size takes no more host memory than that; what comes back passes through the same.  A function that fails raises
DeviceError: the context is then unusable, and the program with it.  The context is dropped with the last memory of the device,
so the next program of this process begins with a sound one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DeviceError, ResourceError, UnsupportedError
from edgeq.system import machine
from edgeq.targets.cuda.device.arguments import packed
from edgeq.targets.cuda.device.calls import DriverError, bindings, called, version_text
from edgeq.targets.cuda.device.device import Call, Copy, Kernel, Mark, Memory, Pinned, Recording
from edgeq.targets.cuda.supply.nvrtc import arch_for
from edgeq.targets.cuda.supply.pack import Generated, Variant, whole

STAGING = 32 << 20
"""Bytes of the pinned buffer."""
PIECE = STAGING // 4
"""Bytes that are copied at a time, so that the processor fills one piece while the GPU takes another."""
PIECE_ALIGNMENT = 64
FETCHED = 128
"""Bytes that a miss of the L2 cache is to bring: a line, which kernels ask for once.  Ampere's default is taken to be 64."""
P = ParamSpec("P")
R = TypeVar("R")
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
REFUSED_IMAGES = {
    f"CUDA_ERROR_{name}"
    for name in ("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION", "INVALID_PTX", "JIT_COMPILER_NOT_FOUND")
}


class DriverMemory:
    """Bytes of a device, which it holds on to: memory is freed before the device is."""

    def __init__(self, device: DriverDevice, address: int, nbytes: int) -> None:
        self.address, self.nbytes, self._device = address, nbytes, device

    def __del__(self) -> None:
        self._device.release("cuMemFree", self.address)


class DriverPinned:
    """Memory of the host that the GPU reads and writes; it is freed with the last array over it."""

    def __init__(self, device: DriverDevice, address: int, nbytes: int) -> None:
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self.address, self.array = address, np.frombuffer(memoryview(memory), np.uint8)
        finalize(memory, device.release, "cuMemFreeHost", address).atexit = False


class DriverMark(Mark):
    """An event."""

    def __init__(self, device: DriverDevice, event: Any) -> None:
        self.event, self._device = event, device

    def __del__(self) -> None:
        self._device.release("cuEventDestroy", self.event)


class DriverRecording:
    """An instantiated CUDA graph.  `ended`: what comes after it whenever it is started."""

    def __init__(self, device: DriverDevice, graph: Any, ended: DriverMark) -> None:
        self._device, self._graph, self._ended = device, graph, ended

    def start(self) -> None:
        self._device.start(self._graph, self._ended)

    def wait(self) -> None:
        self._device.wait(self._ended)

    def __del__(self) -> None:
        # Memory that it copies from or to may be the next to be freed.
        self._device.release("cuEventSynchronize", self._ended.event)
        self._device.release("cuGraphExecDestroy", self._graph)


@dataclass(frozen=True)
class DriverKernel:
    generated: Generated
    function: Any


def alone(method: Callable[Concatenate[DriverDevice, P], R]) -> Callable[Concatenate[DriverDevice, P], R]:
    """A method of a device in which one thread is at a time, and the context is that thread's."""

    @wraps(method)
    def within(self: DriverDevice, /, *arguments: P.args, **named: P.kwargs) -> R:
        with self._lock:
            self._enter()
            return method(self, *arguments, **named)

    return within


class DriverDevice:
    """A GPU, for callers from any threads: the decoder and the vision tower of a model share it, and run in two.

    driver   CUDA version that the driver states: 12060 for 12.6
    """

    def __init__(self, ordinal: int = 0, cuda: Any = None) -> None:
        """DeviceError: the driver refuses, or there is no GPU of that number."""
        self._cuda = cuda = bindings() if cuda is None else cuda
        self._context: Any = None
        # Over the pinned buffer.  Reentrant: a read waits, and a memory that is full is asked how full.
        self._lock = RLock()
        self._modules: list[Any] = []
        self._call("cuInit", 0)
        self.driver: int = self._call("cuDriverGetVersion")
        self._handle = self._call("cuDeviceGet", ordinal)
        self.name = self._call("cuDeviceGetName", 256, self._handle).split(b"\0")[0].decode(errors="replace")
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.sm: int = 10 * major + minor
        self.multiprocessors: int = self._attribute("MULTIPROCESSOR_COUNT")
        self.integrated = bool(self._attribute("INTEGRATED"))
        self.total: int = self._call("cuDeviceTotalMem", self._handle)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._handle))

    def _call(self, function: str, *arguments: Any) -> Any:
        return called(self._cuda, function, *arguments)

    def _enter(self) -> None:
        """Make the context that of this thread, and make it first where nothing has run yet.

        ResourceError: the GPU has no room for a context, or the machine none for the pinned buffer.
        """
        if self._context is not None:
            self._call("cuCtxSetCurrent", self._context)
            return
        try:
            self._begin()
        except DriverError as error:
            if error.name != OUT_OF_MEMORY:
                raise
            raise ResourceError(
                f"no room on {self.name} to begin with, or none of {STAGING >> 20} MiB in this machine; end what else uses them"
            ) from None

    def _begin(self) -> None:
        context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        try:
            self._call("cuCtxSetCurrent", context)
            with suppress(DriverError):  # a hint, which not every GPU takes
                self._call("cuCtxSetLimit", self._cuda.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY, FETCHED)
            self._stream = self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
            self._staging = int(self._call("cuMemHostAlloc", STAGING, 0))
        except BaseException:
            with suppress(Exception):
                self._call("cuDevicePrimaryCtxRelease", self._handle)
            raise
        self._context, self._staged = context, 0

    @alone
    def memory(self) -> tuple[int, int]:
        """Bytes of the device and those that are free; where it shares the processor's memory, what the kernel can give."""
        free, total = self._call("cuMemGetInfo")
        # The driver counts pages of files as taken, which Linux gives back when memory is asked for.
        return total, machine.available_bytes() if self.integrated else free

    @alone
    def allocate(self, nbytes: int) -> Memory:
        try:
            address = int(self._call("cuMemAlloc", max(1, nbytes)))
        except DriverError as error:
            if error.name != OUT_OF_MEMORY:
                raise
            free = self.memory()[1]
            missing = max(0, nbytes - free)
            raise ResourceError(
                f"{self.name} has no room for {nbytes / (1 << 20):,.0f} MiB more: {free / (1 << 20):,.0f} MiB are free, "
                f"{missing / (1 << 20):,.0f} MiB are missing; end what else uses the GPU, or pass a smaller `context` or "
                "`graphs=False`"
            ) from None
        return DriverMemory(self, address, nbytes)

    def release(self, function: str, what: Any) -> None:
        """Give back memory or a graph, by that function of the driver; in a finalizer, which leaves the thread's context as it
        was, and does not tell an error of a context that is lost anyway."""
        with suppress(Exception):
            self._call("cuCtxPushCurrent", self._context)
            try:
                self._call(function, what)
            finally:
                self._call("cuCtxPopCurrent")

    @alone
    def write(self, address: int, data: NDArray[Any]) -> None:
        source, done = _bytes(data), 0
        while done < len(source):
            count = min(PIECE, len(source) - done)
            place = self._stage(count)
            ctypes.memmove(place, source.ctypes.data + done, count)
            self._call("cuMemcpyHtoDAsync", address + done, place, count, self._stream)
            done += count

    @alone
    def read(self, address: int, data: NDArray[Any]) -> None:
        target, done = _bytes(data), 0
        while done < len(target):
            count = min(PIECE, len(target) - done)
            place = self._stage(count)
            self._call("cuMemcpyDtoHAsync", place, address + done, count, self._stream)
            self.synchronize()
            ctypes.memmove(target.ctypes.data + done, place, count)
            done += count

    @alone
    def zero(self, address: int, nbytes: int) -> None:
        if nbytes:
            self._call("cuMemsetD8Async", address, 0, nbytes, self._stream)

    @alone
    def copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self._call("cuMemcpyDtoDAsync", target, source, nbytes, self._stream)

    @alone
    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        loaded: dict[Variant, Kernel] = {}
        for generated in kernels:
            if not generated.image:
                raise ValueError(f"{generated.variant.symbol} was not compiled")
            # PTX is text, and its end is where the C string ends.
            image = generated.image if generated.image[:4] == b"\x7fELF" else generated.image + b"\0"
            try:
                module = self._call("cuModuleLoadData", image)
                function = self._call("cuModuleGetFunction", module, generated.name.encode())
            except DriverError as error:
                if error.name not in REFUSED_IMAGES:
                    raise
                raise UnsupportedError(
                    f"the driver (CUDA {version_text(self.driver)}) does not take kernel {generated.variant.symbol} for "
                    f"{self.name}, sm_{self.sm}: {error.name}; install a newer driver, or run: "
                    f"edgeq build FILE --for {arch_for(self.sm)}"
                ) from None
            self._modules.append(module)
            loaded[generated.variant] = DriverKernel(generated, function)
        return loaded

    @alone
    def blocks_held(self, kernel: Kernel) -> int:
        assert isinstance(kernel, DriverKernel)
        threads = whole(kernel.generated.block[0], {})
        return int(self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel.function, threads, 0))

    @alone
    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None:
        assert isinstance(kernel, DriverKernel)
        values = packed(kernel.generated.parameters, arguments)
        try:
            self._call("cuLaunchKernel", kernel.function, *grid, *block, 0, self._stream, values, 0)
        except DriverError as error:
            raise DeviceError(f"{kernel.generated.variant.symbol}: {error}") from None

    @alone
    def pinned(self, nbytes: int) -> Pinned:
        try:
            pinned = DriverPinned(self, int(self._call("cuMemHostAlloc", max(1, nbytes), 0)), nbytes)
        except DriverError as error:
            if error.name != OUT_OF_MEMORY:
                raise
            raise ResourceError(f"this machine has no room for {nbytes >> 20:,} MiB that a GPU can read") from None
        pinned.array[:] = 0
        return pinned

    @alone
    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        """The steps as a CUDA graph, captured from the stream."""
        copies = {"in": "cuMemcpyHtoDAsync", "out": "cuMemcpyDtoHAsync", "within": "cuMemcpyDtoDAsync"}
        external = int(self._cuda.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
        # Relaxed: a finalizer may free memory of this thread meanwhile, which any other mode takes for an error.
        self._call("cuStreamBeginCapture", self._stream, self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            for step in steps:
                if isinstance(step, Copy):
                    self._call(copies[step.way], step.target, step.source, step.nbytes, self._stream)
                elif isinstance(step, Mark):
                    assert isinstance(step, DriverMark)
                    # External: a step of the graph, whose time can be asked for.
                    self._call("cuEventRecordWithFlags", step.event, self._stream, external)
                else:
                    self.launch(*step)
        except BaseException:
            # What is told is the error of the step, not that its capture cannot end well.
            with suppress(DriverError):
                self._call("cuGraphDestroy", self._call("cuStreamEndCapture", self._stream))
            raise
        graph = self._call("cuStreamEndCapture", self._stream)
        try:
            ended = DriverMark(self, self._call("cuEventCreate", int(self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
            return DriverRecording(self, self._call("cuGraphInstantiate", graph, 0), ended)
        except DriverError as error:
            if error.name != OUT_OF_MEMORY:
                raise
            raise ResourceError(f"{self.name} has no room for a graph of {len(steps)} steps") from None
        finally:
            self._call("cuGraphDestroy", graph)

    @alone
    def start(self, graph: Any, ended: DriverMark) -> None:
        try:
            self._call("cuGraphLaunch", graph, self._stream)
        except DriverError as error:
            # The first launch takes memory, for what the driver uploads.
            if error.name != OUT_OF_MEMORY:
                raise
            raise ResourceError(f"{self.name} has no room to start a graph") from None
        self._call("cuEventRecord", ended.event, self._stream)

    @alone
    def wait(self, mark: DriverMark) -> None:
        self._call("cuEventSynchronize", mark.event)

    @alone
    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)
        self._staged = 0

    @alone
    def mark(self) -> Mark:
        return DriverMark(self, self._call("cuEventCreate", 0))

    @alone
    def stamp(self, mark: Mark) -> None:
        assert isinstance(mark, DriverMark)
        self._call("cuEventRecord", mark.event, self._stream)

    @alone
    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        events = [mark.event for mark in marks if isinstance(mark, DriverMark)]
        self._call("cuEventSynchronize", events[-1])
        pairs = zip(events[:-1], events[1:], strict=True)
        return [float(self._call("cuEventElapsedTime", *pair)) / 1000 for pair in pairs]

    def _stage(self, nbytes: int) -> int:
        """The address of a part of the pinned buffer that no copy uses."""
        if self._staged + nbytes > STAGING:
            self.synchronize()
        place = self._staging + self._staged
        self._staged += -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        return place

    def __del__(self) -> None:
        if getattr(self, "_context", None) is None:
            return
        for function, whats in (
            ("cuModuleUnload", self._modules),
            ("cuMemFreeHost", [self._staging]),
            ("cuStreamDestroy", [self._stream]),
        ):
            for what in whats:
                self.release(function, what)
        with suppress(Exception):
            # The last one that lets go of it ends the context, one in which a kernel failed too.
            self._call("cuDevicePrimaryCtxRelease", self._handle)


def _bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    """A contiguous array as bytes, without a copy."""
    if not data.flags.c_contiguous:
        raise ValueError("not a contiguous array")
    return data.reshape(-1).view(np.uint8)
