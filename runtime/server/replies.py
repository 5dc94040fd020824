"""Responses of the application, and work that ends when the client who would get one has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from edgeq.runtime.server.errors import ApiError

T = TypeVar("T")


async def closed_with(events: AsyncIterator[bytes], updates: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    """`events`; whoever stops reading them ends the work."""
    try:
        async for each in events:
            yield each
    finally:
        await updates.aclose()


def ignored(request: Request) -> dict[str, str]:
    """A header with the fields that were ignored."""
    return {"x-edgeq-ignored": request.state.ignored} if request.state.ignored else {}


def json_of(data: Mapping[str, Any], headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, dict(headers or {}), "application/json")


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is nothing at this path; see /v1/models", 405: "this path takes other methods"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    code, message = codes.get(error.status_code, "http_error"), messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, code, message, headers=dict(error.headers or {})).response()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives.  ClientDisconnect: the client has left, and the work was cancelled."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
