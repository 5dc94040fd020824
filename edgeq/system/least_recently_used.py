"""Files that are kept for later as long as there is room: those that were not used for longest go first."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

AHEAD_SECONDS = 60
"""A file that was used so long after now was used before the clock was set back."""


def remove_least_recently_used(paths: Iterable[Path], most_bytes: int) -> int:
    """Remove files until the others have at most `most_bytes`; returns how many bytes these have.

    The time of modification counts as that of use: who reads a file that is to stay sets it (os.utime).  What another process
    removed meanwhile counts as removed; a file that cannot be removed stays, and others go for it.
    """
    # Files from before the clock was set back go first: else what is written now would go before them.
    latest = (time.time() + AHEAD_SECONDS) * 1e9
    files = []
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            files.append((status.st_mtime_ns <= latest, status.st_mtime_ns, path, status.st_size))
    total = sum(size for *_, size in files)
    for *_, path, size in sorted(files):
        if total <= most_bytes:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
            total -= size
    return total
