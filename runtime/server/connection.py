"""Deadlines of a connection, which uvicorn has none of: a header that never ends, and a reader that does not read."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeq.runtime.server.errors import ApiError

HEADER_SECONDS = 10
WRITE_SECONDS = 30
MAX_CONNECTIONS = 256
MAX_CHUNK = 1 << 32
"""Bytes of a chunk, far above those of any body."""
CHUNK_HEAD = re.compile(rb"(?:[0-9A-Fa-f]{1,20}[ \t]*(?:;[^\x00\r\n]*)?\r?)?")
"""What is there of one before its line has ended."""


class Connection(H11Protocol):
    """One connection.  It ends if a request is not there after 10 s, or an answer is not taken for 30 s; beyond 256 connections
    the one that has been without a whole request for longest does.
    """

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._arm()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [other for other in self.connections if isinstance(other, Connection) and not other._has_request]
            if idle:
                min(idle, key=lambda other: other._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._answering
        if not before:
            self._arm()
        super().data_received(data)
        if self._is_broken:
            self.send_400_response("the size of a chunk is not one")
        if self._answering and not before:
            self._disarm()
            self._since = self.loop.time()

    def pause_writing(self) -> None:
        self._unread = self._unread or self.loop.call_later(WRITE_SECONDS, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None
        if self.flow is not None:
            super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_request(self) -> bool:
        """Whether it waits for an answer, and not we for its body."""
        return self._answering and not self.cycle.more_body

    @property
    def _is_broken(self) -> bool:
        """Whether what came of a chunk's head can be the beginning of none: h11 waits for the end of that line."""
        if self.conn.their_state is not h11.SEND_BODY or self.transport.is_closing():
            return False
        reader = self.conn._reader
        if getattr(reader, "_bytes_in_chunk", 0) > MAX_CHUNK:
            return True
        # Only of chunks something is left; what follows the last one are headers.
        return not getattr(reader, "_reading_trailer", False) and not CHUNK_HEAD.fullmatch(self.conn.trailing_data[0])

    def _arm(self) -> None:
        self._deadline = self._deadline or self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error in JSON too."""
        if self.cycle is not None:
            # Its handler would answer too, after the error.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.transport.close()
        body = msgspec.json.encode(ApiError(400, "invalid_http", "this is not an HTTP request that can be read").body)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
