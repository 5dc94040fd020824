"""Texts of many callers from one program: each run has a row of every text that is being decoded, and rows of prompts.

Texts come and go between runs (continuous batching: Yu et al., Orca, OSDI 2022).  A run that decodes has as many rows of
prompts beside as take `step_seconds`: a time and not a number of tokens, so that the texts that are decoded wait equally
long on every machine.  When cache pages run out, what nobody holds is dropped, then the youngest texts are: they keep their
tokens and run them again later.  The arithmetic of a row does not depend on what runs with it, so that a text has the same
tokens alone, beside others, after it had to make room, and with pages that another text left.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from edgeq.errors import DeviceError, EdgeqError, ResourceError
from edgeq.pictures.prompt import cut
from edgeq.runtime.arguments import integer
from edgeq.runtime.batching.base_scheduler import BaseScheduler
from edgeq.runtime.batching.job import Busy, Job, ReadPrompt, RunningText, Ticket, Update
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.batching.shared_pages import SharedPages
from edgeq.runtime.decode import Stream, run_streams
from edgeq.runtime.model import Model
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.session.runs import BatchItem, Chunks, Logits, run_together
from edgeq.runtime.session.session import CHUNK_SECONDS, Session
from edgeq.runtime.speculative.speculator import Speculator
from edgeq.runtime.stats import MAX_DRAFT, StepRecord
from edgeq.targets.capabilities import Largest
from edgeq.targets.rows import PAGE

SPARE_PAGES = 4
"""Pages that must be free beside those of its prompt before a text begins: else it would soon have to make room again."""

HEADROOM = 1.5
"""Times of a run that decodes that one with prompts may take.  A run reads all weights once, and as long as that bounds it more
rows cost next to nothing: the rate that was measured with few of them has to be able to grow."""
MIN_TILES = 2
"""Tiles of a chunk: from one a rate could not grow by whole tiles."""
FORGETTING = 0.2
"""Weight of the last run in the time that one without prompts takes."""


class Scheduler(BaseScheduler):
    """Schedules text generation."""

    def __init__(
        self,
        model: Model,
        seats: int,
        *,
        queue: int | None = None,
        step_seconds: float = CHUNK_SECONDS,
        pages: int | None = None,
        shares_prefixes: bool = False,
        speculator: Speculator | None = None,
        store: PromptStore | None = None,
    ) -> None:
        """seats            texts at once, at most the model's `max_logits` and `max_rows`
        queue            texts that may wait; None: any number
        step_seconds     of a run with rows of prompts while other texts wait for it, where one without them takes less
        pages            of the cache, of all texts and the prefix tree, at least those of one context; None: any number
        shares_prefixes  keep the pages of texts that have ended for others that begin alike
        store            keep them on disk too

        InputError: more seats than the model was loaded for, or fewer pages than its context has.
        """
        super().__init__(model, pages)
        options = model.program.options
        self._model, self._seats = model, integer("seats", seats, 1, min(options.max_logits, options.max_rows))
        self._step_seconds, self._speculator = step_seconds, speculator
        # Sums of what a session reads belong to it, and cannot be taken over with pages; tokens of a prompt that sees both ways
        # depend on those after them.
        apart = model.requantization or model.config.bidirectional_prompt
        self._shared = SharedPages(model, pages, shares_prefixes and not apart, store)
        self._most_waiting = queue
        self._texts: list[RunningText] = []  # those that have a seat, in the order in which they came
        self._turn, self._budget, self._decode_seconds = 0, 0, 0.0
        self._updates: list[Update] = []

    def submit(self, job: Job) -> Ticket:
        """Enter a job, which begins when there is a seat.

        Busy: the queue is full.  InputError: more tokens than the context or the cache holds.
        """
        check_length(len(job.prompt.tokens), self._model.context, visual=job.prompt.visual_tokens)
        ticket = Ticket(job)
        with self._lock:
            if self._most_waiting is not None and self._admitted + job.n > self._seats + self._most_waiting:
                raise Busy(f"{self._admitted} texts run or wait; at most {self._seats + self._most_waiting} may")
            self._admitted += job.n
            self._arrived.append(ticket)
        return ticket

    @property
    def running(self) -> int:
        return len(self._texts)

    @property
    def pages(self) -> tuple[int, int, int]:
        """Cache pages that may still be made (-1: any number), that are held, and that only the prefix tree holds."""
        return self._shared.counts

    def step(self) -> list[Update]:
        """Apply cancels, seat who waits, run once, draw; what came of it.

        An EdgeqError of one text is in its update and ends it alone; what the program raises ends all and is raised here.
        """
        self._updates, self.last = [], StepRecord()
        self._apply_cancels()
        self._seat()
        self._fetch()
        decoding = [text for text in self._texts if text.chunks is None and not text.fetching and not text.ended]
        plan, decoding = self._planned([text for text in self._texts if text.chunks and not text.ended], decoding)
        speculator = self._speculator if not plan else None
        if speculator and not speculator.may_draft([text.running for text in decoding]):
            speculator = None
        ahead = 1 + MAX_DRAFT if speculator else 1
        kept = self._secured(plan + [(text, min(ahead, text.running.session.left)) for text in decoding])
        reading = [(text, count) for text, count in kept if text.chunks]
        decoding = [text for text, _ in kept if not text.chunks]
        if kept:
            self._run(reading, decoding, speculator)
        for text in [text for text in self._texts if text.ended]:
            self._release(text)
        return self._updates

    def _apply_cancels(self) -> None:
        self._welcome()
        while self._cancelled:
            ticket = self._cancelled.popleft()
            # It may have come since, from another thread.
            self._welcome()
            dropped = self._waiting.drop(ticket)
            with self._lock:
                self._admitted -= dropped
            for text in [text for text in self._texts if text.ticket is ticket]:
                self._release(text)
            self._shared.unpark(ticket)

    def _seat(self) -> None:
        while len(self._texts) < self._seats and (text := self._waiting.first()):
            parked = text.ticket.parked if not text.stream else None
            path = self._shared.again(parked.path) if parked else self._shared.find(text.ticket.job.tree, text.unread)
            needed = 1 if parked else -(-len(text.unread.tokens) // PAGE) - len(path)
            # Into an empty cache everything fits that `submit` let in.
            if self._texts and not self._shared.make_room(SPARE_PAGES, needed, texts=1, snapshots=self._snapshots(needed)):
                self._shared.let_go(path)
                return
            self._waiting.pop(text)
            self._texts = sorted([*self._texts, text], key=lambda text: text.number)
            text.path = path
            try:
                self._begin(text, parked)
            except EdgeqError as error:
                self._fail(text, error)

    def _snapshots(self, pages: int) -> int:
        """Snapshots that a session keeps of so many pages of a prompt, at most."""
        apart = self._model.program.snapshot_pages
        return 0 if not apart else pages if apart == 1 else pages // apart + 2

    def _begin(self, text: RunningText, parked: ReadPrompt | None) -> None:
        """Give a text its session: one that has read its prompt already, or one that begins with the pages of its path."""
        ticket, job = text.ticket, text.ticket.job
        ticket.begun = ticket.begun or perf_counter()
        if not text.stream:
            ticket.unbegun -= 1
        if parked:
            session = parked.session.fork() if ticket.unbegun else parked.session
        else:
            session, text.fetching = (job.model or self._model).session(), True
            ticket.reading = ticket.reading or not text.preemptions
        self._shared.count_session(session)
        if text.stream:
            text.stream.session = session
        else:
            length, context = len(job.prompt.tokens), self._model.context
            sampler = job.request.sampler(job.sampling, self._model.text, length, context, text.sample)
            text.stream = Stream(session, sampler, list(job.prompt.tokens), top=job.request.logprobs)
            text.ending = job.request.ending(self._model.text)
        if parked:
            if not ticket.unbegun:
                self._shared.unpark(ticket)
            self._draw(text, parked.logits)

    def _fetch(self) -> None:
        """Take what is on disk of the prompts of new texts, for as long as a run may take, then let them read the rest."""
        waits = any(text.chunks is None and not text.fetching and not text.ended for text in self._texts)
        end = perf_counter() + (self._step_seconds if waits else CHUNK_SECONDS)
        for text in [text for text in self._texts if text.fetching and not text.ended]:
            if not self._shared.fetch(text, end):
                return
            self._begin_reading(text)

    def _begin_reading(self, text: RunningText) -> None:
        """Begin a session with the pages of its path; what comes after them is read."""
        self._shared.complete(text)
        session, unread, count = text.running.session, text.unread, PAGE * len(text.path)
        text.fetching = False
        pages = [node.page for node in text.path if node.page]
        session.adopt(unread.tokens[:count], cut(unread.places, count), pages)
        try:
            text.chunks = Chunks(session, unread.after(count))
        except EdgeqError as error:
            return self._fail(text, error)
        self.totals.cached_tokens += count
        if text.preemptions:
            self.totals.recomputed_tokens += text.chunks.left
        else:
            text.ticket.cached_tokens = max(count, text.ticket.cached_tokens)

    def _planned(
        self, readers: list[RunningText], decoding: list[RunningText]
    ) -> tuple[list[tuple[RunningText, int]], list[RunningText]]:
        """Which prompts run next with how many tokens each, and which texts are decoded beside them."""
        if not readers:
            return [], decoding
        options, tile = self._model.program.options, self._model.program.tile
        self._turn += 1
        # A short prompt does not wait for a long one, and a long one is not put off for ever.
        oldest = readers.pop(0) if self._turn % 2 else None
        readers.sort(key=lambda text: text.chunks.left if text.chunks else 0)
        readers = [oldest, *readers] if oldest else readers
        if self._model.requantization:
            # Its inputs are summed, which a run does for one session.
            readers, decoding = readers[:1], []
        if options.max_rows - len(decoding) < tile:
            decoding = []
        alone = not decoding and len(readers) == 1 and not self._model.requantization
        seconds = max(CHUNK_SECONDS if alone else self._step_seconds, HEADROOM * self._decode_seconds)
        rows = self._model.prefill_rate.rows(seconds) - len(decoding)
        left = self._budget = min(max(MIN_TILES * tile, rows // tile * tile), options.max_rows - len(decoding))
        plan = list[tuple[RunningText, int]]()
        for text in readers:
            if left < tile and plan:
                break
            assert text.chunks is not None
            count = text.chunks.count(left)
            if count > left and plan:
                continue
            if count > options.max_rows - len(decoding):
                decoding = []
            plan.append((text, count))
            left -= count
        return [(text, count) for text, count in plan if count], decoding

    def _run(self, reading: list[tuple[RunningText, int]], decoding: list[RunningText], speculator: Speculator | None) -> None:
        """`speculator`: of the texts that are decoded, which have room for drafts; None: for one token each."""
        items, read = list[BatchItem](), list[RunningText]()
        for text, count in reading:
            assert text.chunks is not None
            try:
                items.append(text.chunks.next(count))
                read.append(text)
            except DeviceError:
                raise
            except EdgeqError as error:
                self._fail(text, error)
        streams, room = [text.running for text in decoding], [text.ending.room if text.ending else 1 for text in decoding]
        started = perf_counter()
        after: Sequence[Logits | Largest] = []
        found, emitted = list[Logits](), list[list[int]]()
        if self._model.requantization and items:
            found = run_together(items, summing=True)
        elif speculator and streams:
            emitted = speculator.step(streams, room)
        elif items or streams:
            after, found = run_streams(streams, items, ahead=min(room, default=0) > 1)
        seconds = perf_counter() - started
        rows = self.last.prompt_tokens = sum(len(item.tokens) for item in items)
        self.totals.prompt_tokens += rows
        if rows:
            whole = not streams and len(items) == 1 and rows == self._budget
            self._model.prefill_rate.record(rows + len(streams), seconds, whole)
        else:
            self._decode_seconds += (seconds - self._decode_seconds) * (FORGETTING if self._decode_seconds else 1)
        before = self.totals.generated_tokens
        for text, logits in zip(decoding, after, strict=False):
            self._draw(text, logits)
        for text, tokens in zip(decoding, emitted, strict=False):
            if tokens:
                self._take(text, tokens)
            if text.running.error and not text.ended:
                self._fail(text, text.running.error)
        self.last.decode_tokens = self.totals.generated_tokens - before
        for text, wanted in zip(read, found, strict=True):
            self._shared.enter(text)
            if text.chunks and not text.chunks.left:
                self._finish_reading(text, wanted[0])
        self.last.seconds = perf_counter() - started

    def _finish_reading(self, text: RunningText, logits: Logits) -> None:
        ticket = text.ticket
        text.chunks = None
        self._shared.end_prompt(text)
        if text.drawn:
            return
        ticket.reading = False
        if ticket.unbegun and not ticket.parked:
            parked = ReadPrompt(text.running.session.fork(), logits, self._shared.again(text.path))
            self._shared.count_session(parked.session)
            self._shared.park(ticket, parked)
        self._draw(text, logits)

    def _draw(self, text: RunningText, logits: Logits | Largest) -> None:
        try:
            text.running.draw(logits)
        except EdgeqError as error:
            return self._fail(text, error)
        self._take(text, text.running.tokens[-1:])

    def _take(self, text: RunningText, tokens: Sequence[int]) -> None:
        """Tokens that were drawn become text, until one ends it."""
        stream, ending = text.running, text.ending
        assert ending is not None
        update = Update(text.ticket, text.sample)
        drawn = stream.logprobs[-len(tokens) :]
        for i, token in enumerate(tokens):
            full = i + 1 == len(tokens) and not stream.session.left
            try:
                update.pieces.append(ending.push(token, full))
            except EdgeqError as error:
                return self._fail(text, error)
            update.logprobs += drawn[i : i + 1]
            if ending.reason:
                break
        update.reason = ending.reason
        text.ticket.first = text.ticket.first or perf_counter()
        self.totals.generated_tokens += len(update.pieces)
        self._updates.append(update)
        self._shared.enter(text)

    def _fail(self, text: RunningText, error: EdgeqError) -> None:
        text.error = error
        self._updates.append(Update(text.ticket, text.sample, error=error))

    def _release(self, text: RunningText) -> None:
        """A text has ended: its seat is free, and its pages are where nobody else holds them."""
        self._texts.remove(text)
        self._shared.keep(text)
        self._vacate(text)
        with self._lock:
            self._admitted -= 1

    def _vacate(self, text: RunningText) -> None:
        if (text.chunks or text.fetching) and not text.drawn:
            text.ticket.reading = False
        text.chunks, text.fetching = None, False
        if text.stream:
            text.stream.close()
        self._shared.let_go(text.path)
        text.path = []

    def _secured(self, plan: list[tuple[RunningText, int]]) -> list[tuple[RunningText, int]]:
        """Make the pages that a run writes to.  Texts that have to make room for them fall out of it."""
        while plan:
            missing, snapshots = self._missing(plan)
            failure: EdgeqError | None = None
            if self._shared.make_room(sum(session.missing_pages(count) for session, count in missing), snapshots=snapshots):
                try:
                    for session, count in missing:
                        session.reserve(count)
                        self._shared.count(session.pages)
                    return plan
                except ResourceError as error:
                    failure = error
                    self._shared.is_full()
            young = [text for text in self._texts[1:] if not text.ended]
            if young:
                self._preempt(min(young, key=lambda text: (text.preemptions, -text.number)))
            else:
                self._fail(plan[0][0], failure or ResourceError("the cache is too small for this text; give it more memory"))
            plan = [(text, count) for text, count in plan if text in self._texts and not text.ended]
        return plan

    def _missing(self, plan: list[tuple[RunningText, int]]) -> tuple[list[tuple[Session, int]], int]:
        """The sessions of a plan that have to make pages or snapshots, for how many tokens; how many snapshots."""
        missing = [(text.running.session, count) for text, count in plan if text.running.session.missing_pages(count)]
        if not self._model.program.snapshot_pages:
            return missing, 0
        found = [(text.running.session, count) for text, count in plan if text.running.session.missing_snapshots(count)]
        snapshots = sum(session.missing_snapshots(count) for session, count in found)
        return [*missing, *(each for each in found if each not in missing)], snapshots

    def _preempt(self, text: RunningText) -> None:
        """Take the seat and the pages of a text, which keeps its tokens; it begins again before others."""
        self._texts.remove(text)
        self._vacate(text)
        text.preemptions += 1
        text.ticket.preemptions += 1
        self.totals.preemptions += 1
        self._waiting.put_back(text)
