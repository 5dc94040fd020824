"""Listening sockets that stay quiet where the process has no descriptor left for a connection.

asyncio logs a traceback for every connection of its queue then, 36 MB of them in minutes.  Here a descriptor is kept for that
case: who comes is told 503 and the door is closed, and the log has a line a minute.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from edgeq.runtime.server.errors import ApiError

SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOG_SECONDS = 60.0
MAX_TURNED_AWAY = 64
"""Before those that are connected have a turn again."""
WAIT_SECONDS = 0.01
"""Where even the kept descriptor is gone: a socket that is ready would be asked again at once."""
_BODY = msgspec.json.encode(ApiError(503, "server_overloaded", "the server has no place for another connection").body)
TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_log = logging.getLogger("edgeq.server")


class Listener(socket.socket):
    """A listening socket.  `clock` and `pause` are those of the time module."""

    def __init__(
        self,
        family: int,
        kind: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(family, kind)
        self._clock, self._pause = clock, pause
        self._kept: int | None = _kept()
        self._turned_away, self._logged = 0, -LOG_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.  BlockingIOError: there is none, or the process has no descriptor for it."""
        for _ in range(MAX_TURNED_AWAY):
            try:
                return super().accept()
            except OSError as error:
                if error.errno not in SCARCE:
                    raise
                self._turn_away(error)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def close(self) -> None:
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None
        super().close()

    def _turn_away(self, error: OSError) -> None:
        """Answer the next connection with the descriptor that is kept for it.  BlockingIOError: there is none."""
        self._turned_away += 1
        if self._clock() - self._logged >= LOG_SECONDS:
            _log.error("%s: %d connections turned away; allow more: ulimit -n", error.strerror, self._turned_away)
            self._turned_away, self._logged = 0, self._clock()
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None
        try:
            connection, _ = super().accept()
        except BlockingIOError:
            self._kept = _kept()
            raise
        except OSError:
            self._pause(WAIT_SECONDS)
            self._kept = _kept()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(TURNED_AWAY)
        self._kept = _kept()


def _kept() -> int | None:
    """A descriptor to give up later; None: there is none left."""
    with suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None
