"""Grammars are compiled beside the texts that run: one at a time, and the clients take turns.

A schema can need three seconds of processor time before it is refused.  Requests without one do not wait for that, and who
sends many of them waits for his own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.requests import Request

from edgeq.runtime.batching.job import Busy, Job
from edgeq.runtime.model import Model
from edgeq.runtime.server.interfaces.chat_request import compiled
from edgeq.runtime.server.replies import while_connected

T = TypeVar("T")


@dataclass(eq=False)
class _Waiting:
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class Grammars:
    """The worker, and who waits for it.  Used within one event loop.

    most      that may wait
    seconds   that one may wait
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds, self._pool = most, seconds, ThreadPoolExecutor(1, "edgeq-compiler")
        self._clients = dict[str, deque[_Waiting]]()  # in the order of their turns
        self._compiling = False

    @property
    def waiting(self) -> int:
        return sum(map(len, self._clients.values()))

    async def compiled(self, request: Request, model: Model, job: Job) -> Job:
        """The job of a request with its grammar compiled, if it has one.

        Busy, ApiError: there is no time for it, or it cannot be used.  ClientDisconnect: the client has left.
        """
        if not job.request.waits:
            return job
        turn = self.run(job.client, lambda: compiled(model, job, model.constraints.compile))
        try:
            return await asyncio.wait_for(while_connected(request, turn), self._seconds)
        except asyncio.TimeoutError:
            raise Busy("the grammar waited for too long to be compiled") from None

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """What `work` gives, on the worker, when the client's turn has come.  Whoever stops waiting gives up the place.

        Busy: too many wait; of those the last of the client goes that has the most.
        """
        found = _Waiting(work, asyncio.get_running_loop().create_future())
        if self._compiling and self.waiting >= self._most:
            self._make_room(client)
        self._clients.setdefault(client, deque()).append(found)
        self._begin()
        try:
            return cast(T, await found.result)
        finally:
            self._take_out(client, found)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, client: str) -> None:
        """Busy: nobody has more that waits than `client`."""
        busy = Busy(f"{self.waiting} grammars wait to be compiled; at most {self._most} may")
        longest = max(self._clients, key=lambda name: len(self._clients[name]), default=client)
        if len(self._clients.get(longest, ())) <= len(self._clients.get(client, ())) + 1:
            raise busy
        last = self._clients[longest][-1]
        self._take_out(longest, last)
        if not last.result.done():
            last.result.set_exception(busy)

    def _take_out(self, client: str, entry: _Waiting) -> None:
        waiting = self._clients.get(client, deque())
        if entry in waiting:
            waiting.remove(entry)
        if not waiting:
            self._clients.pop(client, None)

    def _begin(self) -> None:
        if self._compiling or not self._clients:
            return
        client, waiting = next(iter(self._clients.items()))
        found = waiting.popleft()
        # Its next turn comes after those of all others.
        del self._clients[client]
        if waiting:
            self._clients[client] = waiting
        self._compiling = True
        done = asyncio.get_running_loop().run_in_executor(self._pool, found.work)
        done.add_done_callback(lambda done: self._end(found, done))

    def _end(self, entry: _Waiting, done: asyncio.Future[Any]) -> None:
        self._compiling = False
        if not entry.result.done():
            if done.cancelled():
                entry.result.cancel()
            elif error := done.exception():
                entry.result.set_exception(error)
            else:
                entry.result.set_result(done.result())
        self._begin()
