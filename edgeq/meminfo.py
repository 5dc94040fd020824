"""How much memory there is for this process: Linux says it in /proc/meminfo and of a container in its control group, elsewhere
the C library knows the total."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Of the second version of control groups: the process's own where it runs in a container."""


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
