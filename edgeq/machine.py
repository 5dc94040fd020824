"""Facts about this machine: processor, memory, what a container leaves of them, and where edgeq keeps files it can make again.

They come from /proc and /sys where those exist.  What a processor can do is measured by the target that runs on it.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Of the second version of control groups: the process's own where it runs in a container."""

# Bits of getauxval(AT_HWCAP) on 64-bit Arm (linux/arch/arm64/include/uapi/asm/hwcap.h): what all cores can do, big and little.
_AT_HWCAP = 16
_HWCAP = {1: "asimd", 8: "lse", 10: "fp16", 12: "rdm", 20: "dotprod"}


@dataclass(frozen=True)
class Cpu:
    """`features` as /proc/cpuinfo spells them on x86 ("avx2", "avx512_vnni"); on Arm asimd, dotprod, fp16, lse, rdm."""

    name: str
    arch: str
    features: frozenset[str]
    cores: int

    @property
    def big_cores(self) -> int:
        """How many of the cores are of the fastest kind; all of them where there is one kind or nothing is known."""
        return min(len(big_cores()) or self.cores, self.cores)


@dataclass(frozen=True)
class Memory:
    """Bytes of physical memory; `available` without swapping, as the kernel estimates it."""

    total: int
    available: int


def _lines(path: str) -> list[tuple[str, str]]:
    """The `key: value` lines of a /proc file; nothing where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    pairs = (line.partition(":") for line in text.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in pairs if colon]


@cache
def cpu() -> Cpu:
    """The processor this process may use; `cores` respects the affinity mask and a container's share of processor time."""
    info = dict(reversed(_lines("/proc/cpuinfo")))
    arm = platform.machine() in ("aarch64", "arm64")
    features = _arm_features() if arm else frozenset(info.get("flags", "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, cores_of_share(_text("/sys/fs/cgroup/cpu.max")))
    # On Arm the board's name; /proc/cpuinfo has numbers only.
    name = _text("/proc/device-tree/model") or info.get("model name") or platform.processor() or platform.machine()
    return Cpu(name, platform.machine(), features, cores)


def cores_of_share(limit: str) -> int:
    """Cores that a control group may keep busy, of its cpu.max "quota period" in microseconds; more threads would be stopped
    in turn, all of them waiting for those."""
    quota, _, period = limit.partition(" ")
    return max(1, math.ceil(int(quota) / int(period))) if quota.isdecimal() and period.isdecimal() else sys.maxsize


def _arm_features() -> frozenset[str]:
    """From the kernel: it knows what every core of a big.LITTLE processor has, and what an emulator leaves out."""
    if platform.system() == "Darwin":
        # Apple M1 and all later ones.
        return frozenset(_HWCAP.values())
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return frozenset({"asimd"})
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    bits = getauxval(_AT_HWCAP)
    return frozenset(name for bit, name in _HWCAP.items() if bits >> bit & 1)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def big_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The processors of the fastest kind among those this process may use; [] where the kernel tells nothing.

    The kernel's relative capacity (1024 for the fastest) or, without it, the highest clock; within 10 % is the same kind, as
    cores of one kind may differ by a boost step.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        found = {core: _text(cpus / f"cpu{core}" / file) for core in allowed}
        speeds = {core: int(text) for core, text in found.items() if text.isdecimal()}
        if speeds:
            return sorted(core for core, speed in speeds.items() if speed >= 0.9 * max(speeds.values()))
    return []


def total_and_available() -> tuple[int, int]:
    """Bytes of physical memory, and of what can be taken without swapping; twice the total where nobody estimates that."""
    try:
        lines = (line.split() for line in MEMINFO.read_text(encoding="ascii", errors="replace").splitlines())
        found = {line[0]: int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}
        total, available = found["MemTotal:"], found["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, left = _of_container()
    return min(total, limit), min(available, left)


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    return total_and_available()[1]


def _of_container() -> tuple[int, int]:
    """Bytes that a control group may have, and what is left of them; what files have in memory can be had back."""
    try:
        limit, current = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit, max(0, limit - current + int(stat["file"]))
    except (OSError, KeyError, ValueError):
        # No control group, or "max": no limit.
        return 1 << 62, 1 << 62


def memory() -> Memory:
    return Memory(*total_and_available())


def process_memory() -> dict[str, int]:
    """Bytes of this process: VmRSS, VmHWM (its peak), RssAnon (without mapped files); empty without /proc."""
    wanted = ("VmRSS", "VmHWM", "RssAnon")
    return {key: int(value.split()[0]) * 1024 for key, value in _lines("/proc/self/status") if key in wanted}


def forget_peak() -> None:
    """Start VmHWM anew from what the process has now (Linux 4.0 on); elsewhere nothing happens."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def cache_folder() -> Path:
    """Where edgeq keeps what it can make again: compiled kernels and measurements.

    A user without a home has none, below a file that is no folder: the folder for temporary files is no place for machine
    code, for others can write there too.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "edgeq"
    except RuntimeError:
        return Path(os.devnull) / "edgeq"
