"""Facts about this machine: processor, memory, the limits of a container, and the folder of caches.

They come from /proc and /sys where those exist.  Speeds are measured by the target that runs on the machine.
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

from edgeq.errors import UnsupportedError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Root of control groups, version 2; in a container this is the process's own group."""

# Bits of getauxval(AT_HWCAP) and (AT_HWCAP2) on 64-bit Arm (linux/arch/arm64/include/uapi/asm/hwcap.h): what all cores support,
# big and little.
_HWCAPS = {16: {1: "asimd", 8: "lse", 10: "fp16", 12: "rdm", 20: "dotprod"}, 26: {13: "i8mm"}}
# What Apple's processors from the M1 on have, and what macOS is asked for (sysctl).
_APPLE = frozenset(_HWCAPS[16].values())
_APPLE_ASKED = {"i8mm": b"hw.optional.arm.FEAT_I8MM"}


# Features of Intel's matrix unit, and how Linux is asked for its registers (arch/x86/include/uapi/asm/prctl.h).
_AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


NOT_WINDOWS = "edgeq runs on Linux and macOS, not on Windows; install it in WSL, where Windows runs Linux"


def check_system() -> None:
    """UnsupportedError: this is Windows, where files are neither locked nor mapped as edgeq does it."""
    if sys.platform == "win32":
        raise UnsupportedError(NOT_WINDOWS)


@dataclass(frozen=True)
class Cpu:
    """`features` as /proc/cpuinfo spells them on x86 ("avx2", "avx512_vnni"); on Arm asimd, dotprod, fp16, i8mm, lse, rdm."""

    name: str
    arch: str
    features: frozenset[str]
    cores: int

    @property
    def big_cores(self) -> int:
        """Number of cores of the fastest kind; all cores where there is one kind or the kinds are unknown."""
        return min(len(big_cores()) or self.cores, self.cores)


@dataclass(frozen=True)
class PhysicalMemory:
    """Bytes of physical memory; `available` is the kernel's estimate of what can be taken without swapping."""

    total: int
    available: int


def _lines(path: str) -> list[tuple[str, str]]:
    """The `key: value` lines of a /proc file; empty where there is no such file."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    pairs = (line.partition(":") for line in text.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in pairs if colon]


@cache
def cpu() -> Cpu:
    """The processor; `cores` is limited to the affinity mask and to a container's share of processor time."""
    info = dict(reversed(_lines("/proc/cpuinfo")))
    arm = platform.machine() in ("aarch64", "arm64")
    features = _arm_features() if arm else frozenset(info.get("flags", "").split())
    if _AMX & features and not _allows_tiles():
        features -= _AMX
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, cores_of_share(text_of("/sys/fs/cgroup/cpu.max")))
    # On Arm the name of the board: /proc/cpuinfo has numbers only.
    name = text_of("/proc/device-tree/model") or info.get("model name") or platform.processor() or platform.machine()
    return Cpu(name, platform.machine(), features, cores)


def _allows_tiles() -> bool:
    """Whether Linux gives this process the matrix unit's registers, which take 8 KB of every thread that uses them."""
    try:
        return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
    except (OSError, AttributeError):
        return False


def cores_of_share(limit: str) -> int:
    """Cores that a control group may keep busy, from its cpu.max: "quota period", both in microseconds.

    With more threads the kernel stops some of them in turn, and at each barrier the others wait for those.
    """
    quota, _, period = limit.partition(" ")
    return max(1, math.ceil(int(quota) / int(period))) if quota.isdecimal() and period.isdecimal() else sys.maxsize


def _arm_features() -> frozenset[str]:
    """Features as the kernel reports them: what all cores of a big.LITTLE processor have, without what an emulator lacks."""
    if platform.system() == "Darwin":
        return _APPLE | {name for name, asked in _APPLE_ASKED.items() if _sysctl(asked)}
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return frozenset({"asimd"})
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return frozenset(
        name for kind, names in _HWCAPS.items() for bits in [getauxval(kind)] for bit, name in names.items() if bits >> bit & 1
    )


def _sysctl(name: bytes) -> int:
    """A number that macOS knows by name; 0: it does not know it."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    found = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value if found == 0 else 0


def text_of(path: str | Path) -> str:
    """A text of /proc or /sys, without what is blank at its ends; "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip("\0\t\r\n ")
    except OSError:
        return ""


def big_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Indices of the cores of the fastest kind among those that this process may use; [] where the kernel has no data.

    Kinds are told apart by the kernel's relative capacity (1024 for the fastest) or, without it, by the highest clock.  Within
    10 % is the same kind: cores of one kind may differ by a boost step.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        found = {core: text_of(cpus / f"cpu{core}" / file) for core in allowed}
        speeds = {core: int(text) for core, text in found.items() if text.isdecimal()}
        if speeds:
            return sorted(core for core, speed in speeds.items() if speed >= 0.9 * max(speeds.values()))
    return []


def total_and_available() -> tuple[int, int]:
    """Bytes of physical memory, and bytes that can be taken without swapping; without an estimate of these, the total again."""
    try:
        lines = (line.split() for line in MEMINFO.read_text(encoding="ascii", errors="replace").splitlines())
        found = {line[0]: int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}
        total, available = found["MemTotal:"], found["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, left = _of_container()
    return min(total, limit), min(available, left)


def available_bytes() -> int:
    """Bytes of memory that can be taken without swapping."""
    return total_and_available()[1]


def _of_container() -> tuple[int, int]:
    """Bytes that a control group may use, and how many of them are left; cached pages of files count as free."""
    try:
        limit, current = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit, max(0, limit - current + int(stat["file"]))
    except (OSError, KeyError, ValueError):
        # No control group, or "max": no limit.
        return 1 << 62, 1 << 62


def memory() -> PhysicalMemory:
    return PhysicalMemory(*total_and_available())


def process_memory() -> dict[str, int]:
    """Bytes of memory of this process: VmRSS, VmHWM (the peak), RssAnon (without mapped files); empty without /proc."""
    wanted = ("VmRSS", "VmHWM", "RssAnon")
    return {key: int(value.split()[0]) * 1024 for key, value in _lines("/proc/self/status") if key in wanted}


def release_freed_memory() -> None:
    """Give back to the system what this process has freed: glibc keeps much of it."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Reset VmHWM to the present size of the process (Linux from 4.0 on); elsewhere nothing happens."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def temperature(zones: Path = Path("/sys/class/thermal")) -> float | None:
    """Degrees Celsius of the hottest thermal zone; None where the kernel lists none, as in most virtual machines."""
    found: list[float] = []
    for file in zones.glob("thermal_zone*/temp"):
        # A zone whose sensor is off fails when it is read.
        text = text_of(file)
        if text.lstrip("-").isdecimal():
            found.append(int(text) / 1000)
    return max(found, default=None)


def last_level_cache(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Bytes of the processor's largest cache; None where the kernel does not list it."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes: list[int] = []
    for file in cpu.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text[:-1].isdecimal() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=None)


def cache_folder() -> Path:
    """The folder for what edgeq can produce again: compiled kernels and measurements.

    A user without a home folder gets a path that cannot exist, so nothing is cached.  The folder for temporary files is no
    place for machine code: other users can write there.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "edgeq"
    except RuntimeError:
        return Path(os.devnull) / "edgeq"
