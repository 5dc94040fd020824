"""Bodies of requests: received within limits of size and time, decoded, and read by a thread of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request

from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.interfaces.chat_request import Asker
from edgeq.runtime.server.interfaces.embeddings import Embeddings
from edgeq.runtime.server.interfaces.fields import GenerationFields, decoded, fields, named
from edgeq.runtime.server.interfaces.messages import CountFields
from edgeq.runtime.server.interfaces.rerank import Rerank
from edgeq.runtime.server.interfaces.responses import Responses
from edgeq.runtime.server.metrics import Metrics
from edgeq.runtime.server.settings import Settings

BODY_SECONDS = 30
BODY_RATE = 100_000
"""Bytes per second that a body has to come with beside the 30 seconds."""
MAX_BODIES = 8
"""As many of the largest are held at once, however many clients send one; what is read from them takes up to 30 times as much,
so that only as many are read as the pool has threads."""
SMALL_BODY = 64 << 10
"""Bytes of one that there is always room for."""
T = TypeVar("T")
F = TypeVar("F", bound=CountFields | GenerationFields | Responses | Embeddings | Rerank)


class Bodies:
    """Those of all requests of a server.

    pool          whose threads read them
    retry_after   seconds after which a client that is refused may come again
    nbytes        of all that are not read yet
    """

    def __init__(self, pool: ThreadPoolExecutor, settings: Settings, metrics: Metrics, retry_after: Callable[[], int]) -> None:
        self._pool, self._settings, self._metrics, self._retry_after = pool, settings, metrics, retry_after
        self.nbytes = 0

    async def read(self, request: Request, kind: type[F], make: Callable[[F, Asker], T]) -> T:
        """What `make` makes of the fields of a request and who asks, on a thread of the pool.

        ApiError: not JSON, too large, too slow, or a field that cannot be had.
        """
        body, who = bytearray(), Asker(request.scope["state"]["client"], request.scope["state"]["owner"])

        def made() -> T:
            asked, unknown = fields(kind, decoded(body))
            self._settings.check_model(asked.model)
            self._metrics.ignored.inc(len(unknown))
            if unknown and self._settings.strict:
                raise ApiError(400, "unknown_parameter", f"{unknown[0][:40]!r} is not known", unknown[0][:40])
            request.state.ignored = named(unknown)
            return make(asked, replace(who, model=self._settings.models.get(asked.model or "")))

        try:
            await self._receive(request, body)
            return await asyncio.get_running_loop().run_in_executor(self._pool, made)
        finally:
            self.nbytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        declared, most = request.headers.get("content-length", ""), self._settings.most_body
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "unsupported_media_type", 'the body is JSON: curl -H "content-type: application/json"')
        too_large = ApiError(413, "body_too_large", f"the body has more than {most} bytes")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > most):
            raise too_large

        headers = {"retry-after": str(self._retry_after()), "connection": "close"}
        full = ApiError(503, "server_overloaded", "too many large requests are being received", headers=headers)

        async def read() -> None:
            async for part in request.stream():
                body.extend(part)
                self.nbytes += len(part)
                if len(body) > most:
                    raise too_large
                if len(body) > SMALL_BODY and self.nbytes > MAX_BODIES * most:
                    raise full

        try:
            await asyncio.wait_for(read(), BODY_SECONDS + (int(declared) if declared.isdigit() else most) / BODY_RATE)
        except asyncio.TimeoutError:
            raise ApiError(408, "body_too_slow", "the body did not come in time") from None
