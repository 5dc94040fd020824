"""A model file that is written to while it is served ends the server: weights of two models would answer, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from edgeq.format.container import ModelFile

SECONDS = 1.0
"""Between two looks, of a microsecond each.  Where a file was cut, a run that reads what is gone ends the process before."""
_log = logging.getLogger("edgeq.server")


async def watch(file: ModelFile, on_change: Callable[[], None]) -> None:
    """Until the file is not intact any more, which `on_change` is called for."""
    while _is_intact(file):
        await asyncio.sleep(SECONDS)
    _log.error("%s was written to while it was served; give a new file its name instead: mv NEW %s", file.path, file.path)
    on_change()


def _is_intact(file: ModelFile) -> bool:
    try:
        return file.is_intact
    except OSError:
        # A network file system that does not answer says nothing of the file.
        return True
