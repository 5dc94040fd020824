"""Waiting for what another thread or process does, however long the machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 120
"""Two minutes of sleep are taken for never."""


def wait_until(condition: Callable[[], bool], interval: float = 0.01) -> bool:
    """Whether the condition came true; it is asked every `interval` seconds."""
    for _ in range(round(SECONDS / interval)):
        if condition():
            return True
        time.sleep(interval)
    return condition()
