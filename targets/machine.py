"""This machine: processor, memory, and the read bandwidth that bounds decode.  Read from /proc where there is one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Names of processor features in /proc/cpuinfo that differ from ours.
_ALIASES = {"avx512_vnni": "avx512_vnni", "asimddp": "dotprod", "asimdhp": "fp16", "atomics": "lse"}


@dataclass(frozen=True)
class Cpu:
    """`features` as /proc/cpuinfo spells them on x86 ("avx2", "avx512_vnni"), on Arm "dotprod", "fp16", "lse"."""

    name: str
    arch: str
    features: frozenset[str]
    cores: int


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
    """The processor this process may use; `cores` respects the affinity mask."""
    info = dict(reversed(_lines("/proc/cpuinfo")))
    words = (info.get("flags") or info.get("Features") or "").split()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = info.get("model name") or info.get("Hardware") or platform.processor() or platform.machine()
    return Cpu(name, platform.machine(), frozenset(_ALIASES.get(word, word) for word in words), cores)


def memory() -> Memory:
    info = {key: int(value.split()[0]) * 1024 for key, value in _lines("/proc/meminfo") if value.endswith("kB")}
    if "MemTotal" in info:
        return Memory(info["MemTotal"], info.get("MemAvailable", info["MemTotal"]))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(total, total)


def process_memory() -> dict[str, int]:
    """Bytes of this process: VmRSS, VmHWM (its peak), RssAnon (without mapped files); empty without /proc."""
    wanted = ("VmRSS", "VmHWM", "RssAnon")
    return {key: int(value.split()[0]) * 1024 for key, value in _lines("/proc/self/status") if key in wanted}


def cache_folder() -> Path:
    """Where edgeq keeps what it can make again: compiled kernels and measurements."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgeq"


def read_bandwidth(threads: int, refresh: bool = False) -> float:
    """Bytes per second that `threads` threads read from memory, measured once in about a second and kept per machine."""

    def measure() -> float:
        from edgeq.targets.cpu import measure

        return measure.read_bandwidth(threads)

    return _measured(_key("read_bandwidth", threads), measure, refresh)


def known_bandwidth(threads: int) -> float | None:
    """What `read_bandwidth` measured on this machine before, if it did."""
    return _measurements().get(_key("read_bandwidth", threads))


def integer_peak(threads: int, refresh: bool = False) -> float:
    """8-bit operations per second of `threads` threads from registers, measured once in half a second and kept per machine."""

    def measure() -> float:
        from edgeq.targets.cpu import measure

        return measure.integer_peak(threads)

    return _measured(_key("integer_peak", threads), measure, refresh)


def decode_threads(refresh: bool = False) -> int:
    """How many threads decode fastest, probed once in about half a second and kept per machine."""
    most = cpu().cores

    def measure() -> float:
        from edgeq.targets.cpu import measure

        return measure.best_decode_threads(most)

    return int(_measured(_key("decode_threads", most), measure, refresh)) if most > 1 else 1


def _key(what: str, threads: int) -> str:
    """Of a measurement: other hardware, another number of cores to run on, or another kernel is another key."""
    return f"{what}, {threads} of {cpu().cores} cores, {cpu().name}, {cpu().arch}"


def _measured(key: str, measure: Callable[[], float], refresh: bool) -> float:
    known = _measurements()
    if refresh or key not in known:
        known[key] = measure()
        _keep(known)
    return known[key]


def _measurements() -> dict[str, float]:
    try:
        data = json.loads((cache_folder() / "machine.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = data.items() if isinstance(data, dict) else ()
    return {key: float(value) for key, value in entries if type(value) in (int, float) and value > 0}


def _keep(measurements: dict[str, float]) -> None:
    """Best effort: a machine whose cache folder cannot be written measures again."""
    path = cache_folder() / "machine.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(measurements, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        pass
