"""Texts of many callers that become vectors: who is next, and what is told to whom."""

from __future__ import annotations

from time import perf_counter

from edgeq.errors import DeviceError, EdgeqError
from edgeq.runtime.batching.base_scheduler import BaseScheduler
from edgeq.runtime.batching.job import Busy, Job, RunningText, Ticket, Update
from edgeq.runtime.model import Model
from edgeq.runtime.network.pooler import EmbeddingRead
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.stats import StepRecord


class EmbeddingScheduler(BaseScheduler):
    """Schedules embedding."""

    def __init__(self, model: Model, *, queue: int | None = None, pages: int | None = None) -> None:
        """queue   tokens of all texts that wait or are read; None: any number
        pages   of the cache, at least those of one context; None: any number

        InputError: the model continues texts, or fewer pages than its context has.
        """
        super().__init__(model, pages)
        self._pooler, self._context = model.embedder.pooler(pages), model.context
        self._most_tokens, self._tokens = queue, 0  # of texts that wait or are read
        self._seated = dict[EmbeddingRead, RunningText]()

    def submit(self, job: Job) -> Ticket:
        """Enter a text; of the job only its prompt, and whose turn it is, are used.

        Busy: too many tokens wait.  InputError: more tokens than the context holds.
        """
        count = len(job.prompt.tokens)
        check_length(count, self._context)
        ticket = Ticket(job)
        with self._lock:
            if self._most_tokens is not None and self._tokens and self._tokens + count > self._most_tokens:
                raise Busy(f"{self._tokens} tokens wait; at most {self._most_tokens} may")
            self._admitted += 1
            self._tokens += count
            self._arrived.append(ticket)
        return ticket

    @property
    def running(self) -> int:
        return len(self._seated)

    @property
    def pages(self) -> tuple[int, int, int]:
        """Cache pages that may still be made (-1: any number), that are held, and 0: none are kept when a text has ended."""
        return (*self._pooler.pages, 0)

    def step(self) -> list[Update]:
        """Apply cancels, seat who waits, run once; the vectors that came of it.

        An EdgeqError of one text is in its update; what the program raises ends all and is raised here.
        """
        self._apply_cancels()
        updates = self._seat()
        ended = self._pooler.step()
        self.last = StepRecord(self._pooler.seconds, self._pooler.rows)
        self.totals.prompt_tokens += self._pooler.rows
        for reading in ended:
            text = self._seated.pop(reading)
            self._leave(text.ticket)
            text.ticket.first = perf_counter()
            try:
                updates.append(Update(text.ticket, text.sample, vector=reading.vector, reason="stop"))
            except EdgeqError as error:
                updates.append(Update(text.ticket, text.sample, error=error))
        return updates

    def _apply_cancels(self) -> None:
        # Those that came before the cancels are in `_arrived` by now.
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        self._welcome()
        for ticket in cancelled:
            seated = [reading for reading, text in self._seated.items() if text.ticket is ticket]
            for reading in seated:
                self._pooler.drop(reading)
                del self._seated[reading]
            if seated or self._waiting.drop(ticket):
                self._leave(ticket)

    def _seat(self) -> list[Update]:
        """Seat who is next while there is room; what failed."""
        failed = list[Update]()
        while text := self._waiting.first():
            try:
                reading = self._pooler.seat(text.ticket.job.prompt)
            except DeviceError:
                raise
            except EdgeqError as error:
                failed.append(Update(text.ticket, text.sample, error=error))
                self._leave(text.ticket)
            else:
                if reading is None:
                    break
                self._seated[reading], text.ticket.begun = text, perf_counter()
            self._waiting.pop(text)
        return failed

    def _leave(self, ticket: Ticket) -> None:
        with self._lock:
            self._admitted -= 1
            self._tokens -= len(ticket.job.prompt.tokens)
