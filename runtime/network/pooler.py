"""Vectors of texts: a run reads several of them, and what it gives is pooled.

The arithmetic of a row does not depend on what runs with it, and the states of a text are added in its own order: a text has
the same vector alone, beside others, and in whatever chunks it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import EdgeqError, FormatError, ResourceError
from edgeq.network.config import ModelConfig
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.sampling import NOT_FINITE
from edgeq.runtime.session.prefill_rate import PrefillRate
from edgeq.runtime.session.runs import BatchItem, Chunks, Logits, run_together
from edgeq.runtime.session.session import CHUNK_SECONDS, Session
from edgeq.targets.rows import PAGE
from edgeq.targets.target import Options

MAX_SEATS = 32
"""Texts that are read at a time, each with a cache of its own; more would not fill a run better."""


class EmbeddingRead:
    """A text that is read: what is left of it, and the sum of its states, float64 [hidden], where their mean is wanted."""

    def __init__(self, session: Session, prompt: Prompt, kind: str, width: int) -> None:
        """InputError: a token that is not in the vocabulary.  ResourceError: there is no memory for its cache."""
        self.session, self.kind, self.length = session, kind, len(prompt.tokens)
        self.pages = pages_of(prompt)
        self._chunks, self._states = Chunks(session, prompt), np.zeros(width)
        session.reserve(self.length)

    @property
    def left(self) -> int:
        return self._chunks.left

    def next(self, most: int) -> BatchItem:
        item = self._chunks.next(most)
        if self.kind == "cls":
            return item._replace(wanted=[0])
        return item._replace(wanted=range(len(item.tokens))) if self.kind == "mean" else item

    def add(self, states: Logits) -> None:
        """The wanted states of the chunk that has run."""
        if self.kind == "mean":
            # Row after row, so that chunks of other lengths give the same sum.
            self._states = np.concatenate([self._states[None], states]).sum(0)
        elif len(states):
            self._states = states[-1].astype(np.float64)

    @property
    def vector(self) -> NDArray[np.float32]:
        """float32 [hidden], not normalized.  FormatError: it is not finite, which sound weights do not give."""
        found = (self._states / (self.length if self.kind == "mean" else 1)).astype(np.float32)
        if not np.isfinite(found).all():
            raise FormatError(NOT_FINITE.replace("logits", "states"))
        return found


def pages_of(prompt: Prompt) -> int:
    """Cache pages that a text fills."""
    return -(-len(prompt.tokens) // PAGE)


class Pooler:
    """Reads the texts that have a seat; one caller at a time.

    readings   in the order in which they came
    rows, seconds   of the last run
    """

    def __init__(
        self, session: Callable[[], Session], config: ModelConfig, options: Options, rate: PrefillRate, pages: int | None
    ) -> None:
        """`session` makes an empty one; `pages`: of the cache, at least those of one context; None: any number."""
        self._session, self._options, self._rate, self._pages = session, options, rate, pages
        assert config.pooling is not None
        self._kind, self._width, self._whole = config.pooling.kind, config.hidden_size, config.bidirectional
        self._seats, self._turn = min(MAX_SEATS, options.max_logits, options.max_rows), 0
        self.readings: list[EmbeddingRead] = []
        self.rows, self.seconds = 0, 0.0

    @property
    def pages(self) -> tuple[int, int]:
        """Cache pages that may still be made, -1: any number, and those that are held."""
        held = sum(reading.pages for reading in self.readings)
        return -1 if self._pages is None else self._pages - held, held

    def seat(self, prompt: Prompt) -> EmbeddingRead | None:
        """Begin with a text; None: there is room for it when others have ended.

        InputError, ResourceError: as Reading.
        """
        free, _ = self.pages
        if self.readings and (len(self.readings) >= self._seats or 0 <= free < pages_of(prompt)):
            return None
        session = self._session()
        try:
            found = EmbeddingRead(session, prompt, self._kind, self._width)
        except EdgeqError as error:
            session.close()
            if isinstance(error, ResourceError) and self.readings:
                return None
            raise
        self.readings.append(found)
        return found

    def drop(self, reading: EmbeddingRead) -> None:
        """Give back the seat and the cache of a text."""
        self.readings.remove(reading)
        reading.session.close()

    def step(self) -> list[EmbeddingRead]:
        """Run once; the texts that are read to their end, which have no seat any more.  What the program raises is raised."""
        plan = self._planned()
        items, started = [reading.next(count) for reading, count in plan], perf_counter()
        found = run_together(items) if items else []
        self.rows, self.seconds = sum(count for _, count in plan), perf_counter() - started
        if self.rows:
            self._rate.record(self.rows, self.seconds, self.rows >= self._rate.rows(CHUNK_SECONDS))
        for (reading, _), states in zip(plan, found, strict=True):
            reading.add(states)
        ended = [reading for reading, _ in plan if not reading.left]
        for reading in ended:
            self.drop(reading)
        return ended

    def _planned(self) -> list[tuple[EmbeddingRead, int]]:
        """Which texts run next with how many tokens each."""
        results = self._options.max_logits
        rows = min(self._rate.rows(CHUNK_SECONDS), self._options.max_rows, *([results] if self._kind == "mean" else []))
        self._turn += 1
        # A short text does not wait for a long one, and a long one is not put off for ever.
        readings = sorted(self.readings, key=lambda each: each.left) if self._turn % 2 else self.readings
        plan = list[tuple[EmbeddingRead, int]]()
        for reading in readings[:results]:
            # A text that is one run waits for one with room for it, and begins such a run where it is longer than that.
            count = reading.left if self._whole else min(rows, reading.left)
            if 0 < count <= rows or (rows > 0 and not plan):
                plan.append((reading, count))
                rows -= count
        return plan
