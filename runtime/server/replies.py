"""Responses of the application: jobs are submitted, and their updates become an answer; work ends when its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from edgeq.runtime.batching.job import Job, Ticket, Update
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.owner import NumberedUpdate, Owner, RequestUpdates

T = TypeVar("T")


STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class TakesUpdates(Protocol):
    def take(self, first: int, update: Update) -> Any:
        """An update of a job whose first text has the number `first`."""
        ...


class ServedAnswer(TakesUpdates, Protocol):
    """The answer to a request as it comes, in the shape of an interface."""

    def whole(self) -> Mapping[str, Any]:
        """All of it, once every update was taken."""
        ...

    def events(self, updates: AsyncIterable[NumberedUpdate], shown_error: ShownError) -> AsyncIterator[bytes]:
        """It as a stream, from its updates; the stream ends with an error if they raise one."""
        ...


ShownError = Callable[[Exception], ApiError]
"""What a client is shown of an error."""


async def respond(
    request: Request,
    owner: Owner,
    jobs: Sequence[Job],
    answer_to: Callable[[Sequence[Ticket]], ServedAnswer],
    *,
    stream: bool,
    shown: ShownError,
) -> Response:
    """The response to a request that asks for these jobs.

    Busy: the queue is full.  ClientDisconnect: the client has left, and the work with it.
    """
    updates = owner.submit(jobs)
    answer = answer_to(updates.tickets)
    if stream:
        events = _closed_with(answer.events(updates, shown), updates)
        return StreamingResponse(events, 200, STREAM | ignored(request))
    await collected(request, updates, answer)
    return json_of(answer.whole(), ignored(request))


async def collected(request: Request, updates: RequestUpdates, answer: TakesUpdates) -> None:
    """Give all updates to an answer.  ClientDisconnect: the client has left, and the work with it."""

    async def take() -> None:
        async for numbered in updates:
            if numbered:
                answer.take(*numbered)

    try:
        await while_connected(request, take())
    finally:
        await updates.aclose()


async def _closed_with(events: AsyncIterator[bytes], updates: RequestUpdates) -> AsyncIterator[bytes]:
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
