"""The one thread that runs the model, and how what it gives reaches the event loop."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from threading import Condition, Thread
from time import perf_counter

from edgeq.runtime.batching.base_scheduler import BaseScheduler
from edgeq.runtime.batching.job import Busy, Job, Ticket, Update
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.metrics import Metrics
from edgeq.runtime.server.settings import Settings

STALLED_SECONDS = 30
HEARTBEAT_SECONDS = 10
REMEMBERED = 64
PUBLISH_SECONDS = 0.01
"""Tokens of runs that take less come together: an event of a stream takes a tenth of a millisecond."""
MAX_PICTURE_BYTES = 256 << 20
"""Bytes of the pictures of all requests that wait or run; one alone may have more."""


class TicketUpdates:
    """The updates of one ticket as they come."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._waiter: asyncio.Future[None] | None = None
        self._updates = deque[Update]()
        self._error: ApiError | None = None

    def put(self, update: Update) -> None:
        self._updates.append(update)
        self._wake()

    def fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, seconds: float) -> list[Update]:
        """What has come; nothing where nothing came for so long.  ApiError: the server gives up on it."""
        if not self._updates and not self._error:
            # asyncio.wait_for would make a task of it, for every token of every text.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        found = list(self._updates)
        self._updates.clear()
        if self._error and not found:
            raise self._error
        return found


NumberedUpdate = tuple[int, Update] | None
"""An update with the number of the first text of its job among those of the request; None where nothing came for 10 s."""


class RequestUpdates:
    """The updates of the jobs of one request, job after job.  Whoever closes them ends what has not ended."""

    def __init__(self, owner: Owner, answering: Sequence[TicketUpdates]) -> None:
        self._owner, self._answering = owner, answering
        self._numbered = self._take()

    @property
    def tickets(self) -> list[Ticket]:
        return [each.ticket for each in self._answering]

    def __aiter__(self) -> AsyncIterator[NumberedUpdate]:
        return self._numbered

    async def aclose(self) -> None:
        await self._numbered.aclose()
        # Those that nobody began to read too.
        for each in self._answering:
            self._owner.cancel(each)

    async def _take(self) -> AsyncGenerator[NumberedUpdate, None]:
        first = 0
        for each in self._answering:
            async with aclosing(self._owner.updates(each)) as updates:
                async for update in updates:
                    if update and update.error:
                        if update.pieces:
                            # Those of earlier steps, which come together with it.
                            yield first, update
                        raise update.error
                    yield (first, update) if update else None
            first += each.ticket.job.n


class Owner:
    """Runs the scheduler while there is work, and sleeps otherwise.

    failed   what the program raised: nothing runs any more
    """

    def __init__(self, scheduler: BaseScheduler, settings: Settings, metrics: Metrics, on_failure: Callable[[], None]) -> None:
        self.scheduler, self.failed = scheduler, False
        self.draining = False
        self._settings, self._metrics, self._on_failure = settings, metrics, on_failure
        self._loop = asyncio.get_running_loop()
        self._wake, self._closing = Condition(), False
        self._answering: dict[Ticket, TicketUpdates] = {}
        self._beat = perf_counter()
        self._gathered: dict[tuple[Ticket, int], Update] = {}  # what the event loop is told next
        self._seconds = deque[float](maxlen=REMEMBERED)
        self._thread = Thread(target=self._run, name="edgeq-owner", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> RequestUpdates:
        """All jobs of a request, or none.  Busy: the queue is full.  InputError: a prompt is too long."""
        found = list[TicketUpdates]()
        try:
            for job in jobs:
                found.append(self._submit(job))
        except Exception:
            for each in found:
                self.cancel(each)
            raise
        return RequestUpdates(self, found)

    def _submit(self, job: Job) -> TicketUpdates:
        if self.draining or self.failed:
            raise ApiError(503, "server_draining", "the server is ending", headers={"retry-after": "5", "connection": "close"})
        held = sum(each.ticket.job.prompt.nbytes for each in self._answering.values()) if job.prompt.pictures else 0
        if held and held + job.prompt.nbytes > MAX_PICTURE_BYTES:
            raise Busy(f"the pictures of other requests take {held >> 20} MiB")
        if not self.scheduler.busy:
            self._beat = perf_counter()
        found = TicketUpdates(self.scheduler.submit(job))
        self._answering[found.ticket] = found
        with self._wake:
            self._wake.notify()
        return found

    async def updates(self, answering: TicketUpdates) -> AsyncGenerator[Update | None, None]:
        """Those of a job until all its texts have ended; None every 10 s in which there are none.

        Whoever stops iterating cancels the rest.  ApiError: it waited or ran for too long, or a text failed.
        """
        ticket, left = answering.ticket, answering.ticket.job.n
        try:
            while left:
                found = await answering.take(HEARTBEAT_SECONDS)
                waited = perf_counter() - ticket.arrived
                if waited > self._settings.request_seconds or (not ticket.begun and waited > self._settings.queue_seconds):
                    raise ApiError(503, "server_overloaded", "the request took too long", headers={"retry-after": "30"})
                if not found:
                    yield None
                for update in found:
                    left -= update.reason is not None
                    yield update
        finally:
            if left:
                self._metrics.cancelled.inc()
                self.cancel(answering)
            self._answering.pop(ticket, None)
            if ticket.begun and ticket.first:
                self._metrics.queued.observe(ticket.begun - ticket.arrived)
                self._metrics.ttft.observe(ticket.first - ticket.arrived)

    def cancel(self, answering: TicketUpdates) -> None:
        """End the texts of a job before the next step; nothing happens where they have ended."""
        if self._answering.pop(answering.ticket, None):
            self.scheduler.cancel(answering.ticket)
            with self._wake:
                self._wake.notify()

    @property
    def retry_after(self) -> int:
        """Seconds until there may be room, 1 to 120, from how long steps take."""
        return max(1, min(120, round(self.scheduler.waiting * 32 * self._median / max(1, self._settings.seats))))

    @property
    def heartbeat_age(self) -> float:
        return perf_counter() - self._beat if self.scheduler.busy else 0.0

    @property
    def state(self) -> str:
        """ok, draining, stalled or failed."""
        if self.failed:
            return "failed"
        if self.heartbeat_age > max(STALLED_SECONDS, 10 * self._median):
            return "stalled"
        return "draining" if self.draining else "ok"

    async def drain(self) -> None:
        """Let running answers end for the time of grace, and no others begin."""
        self.draining = True
        error = ApiError(503, "server_draining", "the server is ending", headers={"retry-after": "5"})
        for each in list(self._answering.values()):
            if each.ticket.begun is None:
                each.fail(error)
        end = perf_counter() + self._settings.grace_seconds
        while self._answering and perf_counter() < end:
            await asyncio.sleep(0.05)
        for each in list(self._answering.values()):
            each.fail(error)
        await asyncio.sleep(0.1)

    def fail(self) -> None:
        """Nothing runs any more: tell all who wait."""
        self.failed = True
        for answering in self._answering.values():
            answering.fail(ApiError(500, "server_error", "the model failed; the server ends"))
        self._loop.call_later(0.2, self._on_failure)

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(5)

    @property
    def _median(self) -> float:
        return statistics.median(self._seconds) if self._seconds else 0.0

    def _gather(self, updates: list[Update]) -> None:
        """Add to what is published next."""
        for update in updates:
            held = self._gathered.setdefault((update.ticket, update.sample), update)
            if held is not update:
                held.pieces += update.pieces
                held.logprobs += update.logprobs
                held.reason, held.error = update.reason, update.error

    def _run(self) -> None:
        published = 0.0
        while True:
            with self._wake:
                while not self.scheduler.busy and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
            started = perf_counter()
            try:
                updates = self.scheduler.step()
            except BaseException:
                self.failed = True
                self._loop.call_soon_threadsafe(self.fail)
                raise
            if self._closing:
                # The event loop may be closed.
                return
            self._beat = perf_counter()
            self._seconds.append(self._beat - started)
            self._gather(updates)
            self._metrics.steps.observe(self._beat - started)
            ends = not self.scheduler.busy or any(update.reason or update.error for update in updates)
            if ends or self._beat - published >= PUBLISH_SECONDS:
                self._loop.call_soon_threadsafe(self._publish, list(self._gathered.values()))
                self._gathered, published = {}, self._beat

    def _publish(self, updates: list[Update]) -> None:
        """In the event loop, at once for all texts of one or more steps."""
        for update in updates:
            answering = self._answering.get(update.ticket)
            if answering:
                answering.put(update)
