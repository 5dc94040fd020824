"""A CUDA device that runs the generated text on the CPU: g++ compiles it with emulator/emulator.h.

It shows what kernels compute, missing barriers and waits, reads of memory that was never written (it is NaN), writes past the
end of an allocation, and launches that a GPU would refuse.  It does not show speed, nor how an mma rounds inside.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DeviceError
from edgeq.targets.cuda.device.device import Call, Copy, Kernel, Mark, Memory, Pinned, Recording
from edgeq.targets.cuda.supply.pack import POINTER, Generated, Variant

HERE = Path(__file__).parent / "emulator"
BUILD = Path(__file__).parents[2] / "build" / "emulator"
FORWARD, BACKWARD, SHUFFLED = 0, 1, 2
"""Orders in which the threads of a block, and its blocks, take turns.

Asynchronous copies are done when they are asked for in BACKWARD, else when they are waited for.
"""
CHECKED = 3
"""FORWARD, and every access of a kernel is checked: within an allocation, an array, and at a multiple of its bytes."""
CHECKS = ["-fsanitize=kernel-address,bounds,alignment", "-fno-sanitize-recover=bounds,alignment"]
CHECKS += [f"--param=asan-{name}=0" for name in ("instrumentation-with-call-threshold", "stack", "globals")]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
# Registers of a function are given out at once and not loop by loop: an eighth of a kernel's time, and none of its launches'.
FLAGS += ["-fira-region=one"]
FLAGS += ["-mavx2", "-mf16c", "-mfma"] if platform.machine() == "x86_64" else []
GUARD = 256
"""Bytes after an allocation that nothing may write."""
ALIGNMENT = 256
UNWRITTEN = 0xFF
MAX_BLOCK, MAX_GRID = 1024, (2**31 - 1, 65535, 65535)

CTYPES = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}
CASTS = {"int32": "int", "int64": "int64_t", "float32": "float"}
ASM = re.compile(r'asm(?: volatile)?\(\s*"((?:[^"\\]|\\.)*)"\s*:(.*?)\);', re.S)
OPERAND = re.compile(r'"[=+]?\w+"\s*\((\w+)\)')
INSTRUCTIONS = {
    "add.rn.f32",
    "sub.rn.f32",
    "mul.rn.f32",
    "fma.rn.f32",
    "prefetch.global.L2",
    "sub.rn.f16x2",
    "fma.rn.f16x2",
    "lop3.b32",
    "mov.s32",
    "prmt.b32",
    "cp.async.cg.shared.global",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32",
}
"""Those that emulator.h has."""


def refusal() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    return None if shutil.which("g++") else "g++ is not installed"


def called(match: re.Match[str]) -> str:
    """Inline assembly as the call of a function of emulator.h.  NotImplementedError: an instruction that it does not have."""
    text, operands = match[1].rstrip("; "), OPERAND.findall(match[2])
    name, _, rest = text.partition(" ")
    places = [int(n) for n in re.findall(r"%(\d+)", rest)]
    if name not in INSTRUCTIONS or places != list(range(len(operands))):
        raise NotImplementedError(f"the emulator does not know the instruction {text!r}")
    immediate = re.findall(r"(?<![%\w])\d+", rest)
    return f"ptx_{re.sub(r'[.:]+', '_', name)}({', '.join([*operands, *immediate])});"


def translated(generated: Generated) -> str:
    """A kernel as C++ with an entry point that takes the addresses of its arguments."""
    body = ASM.sub(called, generated.text)
    # A declaration before the definition would have to repeat what __shared__ becomes; alignas may not follow `static`.
    body = re.sub(r'extern "C" __global__ void[^{;]*;', "", body)
    body = re.sub(r"alignas\((\d+)\)", r"__attribute__((aligned(\1)))", body)
    types = re.search(rf"{generated.name}\((.*?)\) \{{", body, re.S)
    assert types, generated.name
    kinds = [declared.rpartition(" ")[0] for declared in types[1].split(", ")]
    values = [
        f"*({kind}*)a[{i}]" if parameter.type != POINTER else f"*({kind.replace('__restrict__', '')}*)a[{i}]"
        for i, (kind, parameter) in enumerate(zip(kinds, generated.parameters, strict=True))
    ]
    return f"""#include "emulator.h"
{body}
extern "C" __attribute__((no_sanitize("kernel-address")))
void emulated_kernel(void **a) {{ {generated.name}({", ".join(values)}); }}
extern "C" char *emulated_shared_start() {{ return __start_emulated_shared; }}
extern "C" char *emulated_shared_stop() {{ return __stop_emulated_shared; }}
"""


def digest_of(*parts: str) -> str:
    return hashlib.sha256("\0".join([*parts, (HERE / "emulator.h").read_text(), *FLAGS]).encode()).hexdigest()[:24]


@cache
def header(*flags: str) -> Path:
    """The folder of emulator.h and what g++ keeps of it for these flags; to read it takes a quarter of a kernel's time."""
    folder = BUILD / f"header-{digest_of(*flags)}"
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=BUILD) as made:
            whole = Path(made, folder.name)
            whole.mkdir()
            shutil.copy(HERE / "emulator.h", whole)
            made_of, read = str(whole / "emulator.h"), str(whole / "emulator.h.gch")
            subprocess.run(["g++", *FLAGS, *flags, "-x", "c++-header", made_of, "-o", read], check=True)
            with suppress(OSError):  # another worker has made it at the same moment
                whole.rename(folder)
    return folder


def compiled(code: str, name: str, *flags: str, many: bool = False) -> Path:
    """The shared library of C++ text, kept in build/ under a digest of the text, the emulator and the flags.

    many   others are compiled with these flags, so that it pays to keep what g++ read of emulator.h
    """
    library = BUILD / f"{name}-{digest_of(code, *flags)}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Workers that run tests side by side may compile the same text: each in a folder of its own, and the last one stays.
        with TemporaryDirectory(dir=BUILD) as folder:
            source, made = Path(folder, library.stem + ".cpp"), Path(folder, library.name)
            source.write_text(code)
            include = header(*flags) if many else HERE
            subprocess.run(["g++", *FLAGS, *flags, f"-I{include}", "-o", str(made), str(source)], check=True)
            made.replace(library)
    return library


def compiled_kernel(generated: Generated, *flags: str, level: str = "-O1") -> Path:
    # What it calls is in the process already; to look for it in libraries takes as long as a fifth of a small kernel.
    return compiled(translated(generated), generated.variant.symbol, level, "-nostdlib", *flags, many=True)


class _Block:
    """Bytes in host memory, with a guard after them; all are NaN until something is written, and again once they are freed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.freed = nbytes, False
        self._bytes = np.full(nbytes + GUARD + ALIGNMENT, UNWRITTEN, np.uint8)
        self._start = -self._bytes.ctypes.data % ALIGNMENT
        self.address = self._bytes.ctypes.data + self._start

    def free(self) -> None:
        self.freed = True
        self._bytes[self._start : self._start + self.nbytes] = UNWRITTEN

    def overrun(self) -> bool:
        guard = self._bytes[self._start + self.nbytes : self._start + self.nbytes + GUARD]
        return bool((guard != UNWRITTEN).any())


class EmulatedMemory:
    def __init__(self, block: _Block) -> None:
        self.address, self.nbytes, self._block = block.address, block.nbytes, block

    def __del__(self) -> None:
        self._block.free()


class EmulatedPinned:
    """Host memory that recordings may use, and others not."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.address = self.array.ctypes.data


class EmulatedMark(Mark):
    """time   by the clock of the host, which a device that is no other thread can be measured with; None: nothing was there"""

    time: float | None = None


@dataclass(frozen=True, eq=False)
class EmulatedRecording:
    """Its steps are done when something waits for them, as late as on a GPU that has much to do."""

    device: EmulatedDevice
    steps: tuple[Call | Copy | Mark, ...]

    def start(self) -> None:
        self.device.replays += not any(isinstance(step, Mark) for step in self.steps)
        self.device.started.append(self)

    def wait(self) -> None:
        self.device.finish(self)

    def run(self) -> None:
        for step in self.steps:
            if isinstance(step, Copy):
                ctypes.memmove(step.target, step.source, step.nbytes)
            elif isinstance(step, Mark):
                self.device.stamp(step)
            else:
                self.device.launch(*step)
        self.device.synchronize()


@dataclass(frozen=True)
class EmulatedKernel:
    """It is compiled when it is first launched: of what a program loads, a tenth is not.

    flags   of g++
    """

    generated: Generated
    flags: tuple[str, ...]
    level: str

    @cached_property
    def library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(compiled_kernel(self.generated, *self.flags, level=self.level)))

    def shared(self) -> tuple[int | None, int | None]:
        ends = []
        for name in ("emulated_shared_start", "emulated_shared_stop"):
            function = getattr(self.library, name)
            function.restype = ctypes.c_void_p
            ends.append(function())
        return ends[0], ends[1]


class EmulatedDevice:
    """launches   how many kernels ran, by symbol;  replays: how many recordings that have no marks
    level      how much g++ optimizes its kernels, which gives the same bits
    held       blocks of threads of any kernel that a multiprocessor is to hold
    started    recordings whose steps were not done yet
    on_load    of all of them: is told which kernels are loaded;  on_launch: which kernel is launched
    clock      what marks note: 1/16 s more each time that it is asked, whatever else the machine does
    """

    name, sm, multiprocessors, integrated = "emulated", 87, 8, False
    held = 4
    on_load: ClassVar[Callable[[list[Variant]], None]] = staticmethod(lambda variants: None)
    on_launch: ClassVar[Callable[[Variant], None]] = staticmethod(lambda variant: None)

    def __init__(self, order: int = FORWARD, level: str = "-O1") -> None:
        self.order, self.level = order, level
        self.launches: dict[str, int] = {}
        self.replays = 0
        self.started: deque[EmulatedRecording] = deque()
        self._runs = False
        self.clock = count(step=1 / 16)
        self._pinned: list[EmulatedPinned] = []
        # Those that were freed too: a kernel that still reads them finds NaN, not what the system put there.
        self._blocks: list[_Block] = []
        core = compiled((HERE / "emulator.cpp").read_text(), "emulator", "-O2")
        self._core = ctypes.CDLL(str(core), mode=ctypes.RTLD_GLOBAL)
        self._core.emulated_launch.restype = ctypes.c_char_p

    def memory(self) -> tuple[int, int]:
        return 1 << 32, (1 << 32) - sum(block.nbytes for block in self._blocks if not block.freed)

    def allocate(self, nbytes: int) -> Memory:
        self._blocks.append(_Block(nbytes))
        return EmulatedMemory(self._blocks[-1])

    def finish(self, last: EmulatedRecording | None = None) -> None:
        """Do what was started, all of it or up to that recording, before anything else comes."""
        while self.started and not self._runs and (last is None or last in self.started):
            self._runs = True
            try:
                self.started.popleft().run()
            finally:
                self._runs = False

    def write(self, address: int, data: NDArray[Any]) -> None:
        assert data.flags.c_contiguous
        self.finish()
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, data: NDArray[Any]) -> None:
        assert data.flags.c_contiguous
        self.finish()
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        self.finish()
        ctypes.memset(address, 0, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """DeviceError: it leaves the memory that it is from or to."""
        self.finish()
        for address in (target, source):
            self._check(address, nbytes, pinned=False)
        ctypes.memmove(target, source, nbytes)

    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        kernels, loaded = list(kernels), dict[Variant, Kernel]()
        self.on_load([each.variant for each in kernels])
        flags = tuple(CHECKS if self.order == CHECKED else ())
        for generated in kernels:
            loaded[generated.variant] = EmulatedKernel(generated, flags, self.level)
        return loaded

    def blocks_held(self, kernel: Kernel) -> int:
        return self.held

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None:
        assert isinstance(kernel, EmulatedKernel)
        self.finish()
        generated = kernel.generated
        self.on_launch(generated.variant)
        if not all(0 < n <= most for n, most in zip(grid, MAX_GRID, strict=True)) or tuple(block[1:]) != (1, 1):
            raise DeviceError(f"{generated.variant.symbol}: a grid of {list(grid)} blocks of {list(block)} threads")
        values = [
            ctypes.c_void_p(int(value)) if parameter.type == POINTER else CTYPES[parameter.type](value)
            for parameter, value in zip(generated.parameters, arguments, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        start, stop = (ctypes.c_void_p(end) for end in kernel.shared())
        sizes = (ctypes.c_uint * 3)(*grid)
        ranges = self._ranges(kernel) if self.order == CHECKED else []
        self._core.emulated_allow((ctypes.c_uint64 * (2 * len(ranges)))(*(n for each in ranges for n in each)), len(ranges))
        order = FORWARD if self.order == CHECKED else self.order
        failed = self._core.emulated_launch(kernel.library.emulated_kernel, addresses, sizes, int(block[0]), order, start, stop)
        self.launches[generated.variant.symbol] = self.launches.get(generated.variant.symbol, 0) + 1
        if failed:
            raise DeviceError(f"{generated.variant.symbol}: {failed.decode()}")

    def mark(self) -> Mark:
        return EmulatedMark()

    def stamp(self, mark: Mark) -> None:
        assert isinstance(mark, EmulatedMark)
        self.finish()
        mark.time = next(self.clock)

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """DeviceError: a mark that nothing has come to."""
        self.finish()
        times = [mark.time for mark in marks if isinstance(mark, EmulatedMark) and mark.time is not None]
        if len(times) < len(marks):
            raise DeviceError("a time was asked for that was not taken")
        return np.diff(times).tolist()

    def _ranges(self, kernel: EmulatedKernel) -> list[tuple[int, int]]:
        """Device memory, and what the libraries of the kernel and of the emulator have beside machine code."""
        found = [(each.address, each.address + each.nbytes) for each in self._blocks if not each.freed]
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith((str(kernel.library._name), str(self._core._name))):
                start, stop = line.split()[0].split("-")
                found.append((int(start, 16), int(stop, 16)))
        return sorted(found)

    def pinned(self, nbytes: int) -> Pinned:
        self._pinned.append(EmulatedPinned(nbytes))
        return self._pinned[-1]

    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        """DeviceError: a copy leaves the memory that it is from or to."""
        for step in steps:
            if isinstance(step, Copy):
                self._check(step.source, step.nbytes, pinned=step.way == "in")
                self._check(step.target, step.nbytes, pinned=step.way == "out")
        return EmulatedRecording(self, tuple(steps))

    def _check(self, address: int, nbytes: int, pinned: bool) -> None:
        live = [(each.address, each.nbytes) for each in self._blocks if not each.freed]
        sizes = [(each.address, each.array.nbytes) for each in self._pinned] if pinned else live
        if not any(start <= address and address + nbytes <= start + size for start, size in sizes):
            raise DeviceError(f"a copy of {nbytes} bytes outside of {'pinned' if pinned else 'device'} memory")

    def synchronize(self) -> None:
        """DeviceError: something was written past the end of an allocation."""
        self.finish()
        if any(block.overrun() for block in self._blocks):
            raise DeviceError("a kernel wrote past the end of an allocation")
