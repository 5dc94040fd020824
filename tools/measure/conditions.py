"""What a measurement was made under: clocks, governor, load.  What the system does not tell is absent, never guessed."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from edgeq.system import machine
from edgeq.system.machine import text_of
from edgeq.tools.measure import gpu

CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
PLATFORM_PROFILE = Path("/sys/firmware/acpi/platform_profile")
THREADS = Path("/proc/self/task")


def clocks(cpus: Path = CPUS, cpuinfo: Path = CPUINFO) -> list[float]:
    """MHz of the cores that this process may use, now; [] where neither cpufreq nor /proc/cpuinfo says."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    found = [text_of(cpus / f"cpu{core}" / "cpufreq" / "scaling_cur_freq") for core in allowed]
    scaled = [int(text) / 1000 for text in found if text.isdecimal()]
    if scaled:
        return scaled
    # The value of /proc/cpuinfo is the clock now on x86; in a virtual machine it can be a constant.
    pairs = (line.partition(":") for line in text_of(cpuinfo).splitlines())
    lines = [value.strip() for key, _, value in pairs if key.strip() == "cpu MHz"]
    return [float(value) for value in lines if value.replace(".", "", 1).isdecimal()]


def median_clock() -> float | None:
    """Median MHz of the cores that this process may use; None: unknown."""
    return statistics.median(found) if (found := clocks()) else None


def power_mode(cpus: Path = CPUS, profile: Path = PLATFORM_PROFILE) -> str | None:
    """The governor of the first core and the platform's profile, as "performance, balanced"; None: neither is told."""
    names = (text_of(cpus / "cpu0" / "cpufreq" / "scaling_governor"), text_of(profile))
    return ", ".join(name for name in names if name.isprintable() and name) or None


def load() -> float | None:
    """Mean number of processes that ran or waited in the last minute, this one included; None: the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def core_wait_s(threads: Path = THREADS) -> float | None:
    """Seconds that the threads of this process have waited, ready to run, for a core that another had; None: not told.

    Of threads that have ended nothing is known any more.  Source: "schedstat" in sched-stats.rst of Linux.
    """
    found = [text_of(thread / "schedstat").split() for thread in (threads.iterdir() if threads.is_dir() else ())]
    # A kernel that does not count says 0 for the time that a thread ran, too.
    waits = [int(numbers[1]) for numbers in found if len(numbers) == 3 and numbers[0] != "0" and numbers[1].isdecimal()]
    return sum(waits) / 1e9 if waits else None


def facts(device: str | None) -> dict[str, Any]:
    """The present conditions, as fields of a record; `device`: the name of the GPU on which the target runs."""
    own = {"mhz": median_clock(), "power_mode": power_mode(), "load": load(), "cores": machine.cpu().cores}
    return {**own, "celsius": machine.temperature(), **gpu.conditions(device)}
