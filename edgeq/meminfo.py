"""How much memory this machine has: Linux says it in /proc/meminfo, elsewhere the C library knows the total."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def total_and_available() -> tuple[int, int]:
    """Bytes of physical memory, and of what can be taken without swapping; twice the total where nobody estimates that."""
    try:
        lines = (line.split() for line in MEMINFO.read_text(encoding="ascii", errors="replace").splitlines())
        found = {line[0]: int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}
        return found["MemTotal:"], found["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    return total_and_available()[1]
