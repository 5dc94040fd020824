"""How texts come to a scheduler, and leave it: from any thread; one owner does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from threading import Lock

from edgeq.errors import InputError
from edgeq.runtime.batching.job import Job, Ticket, Update
from edgeq.runtime.batching.text_queue import TextQueue
from edgeq.runtime.model import Model
from edgeq.runtime.session.context_size import context_pages
from edgeq.runtime.stats import StepRecord, Totals
from edgeq.targets.rows import PAGE


class BaseScheduler(ABC):
    """The part of a scheduler that does not depend on what becomes of texts.

    `submit` and `cancel` may be called from any thread, all else by one owner.

    last     what the last step did;  totals: what all did
    """

    def __init__(self, model: Model, pages: int | None) -> None:
        """`pages`: of the cache; None: any number.  InputError: fewer than the context of the model has."""
        if pages is not None and pages < context_pages(model.graph, model.program.options, model.context):
            raise InputError(f"a cache of {pages * PAGE} positions; the context has {model.context}: load a shorter one")
        self._lock = Lock()
        self._arrived, self._cancelled = deque[Ticket](), deque[Ticket]()
        self._admitted = 0  # texts that wait or have a seat
        self._waiting = TextQueue()
        self.last, self.totals = StepRecord(), Totals()

    @abstractmethod
    def submit(self, job: Job) -> Ticket:
        """Enter a job, which begins when there is a seat.  Busy: the queue is full.  InputError: it never fits."""

    @abstractmethod
    def step(self) -> list[Update]:
        """Apply cancels, seat who waits, run once; what came of it."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Texts that have a seat."""

    @property
    @abstractmethod
    def pages(self) -> tuple[int, int, int]:
        """Cache pages that may still be made (-1: any number), that are held, and that are held for texts to come alone."""

    def cancel(self, ticket: Ticket) -> None:
        """End the texts of `ticket` before the next step; no more updates come of them."""
        self._cancelled.append(ticket)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._admitted or self._cancelled)

    @property
    def waiting(self) -> int:
        return max(0, self._admitted - self.running)

    def _welcome(self) -> None:
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
