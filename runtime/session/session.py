"""One conversation: its tokens, their keys and values, and the logits after the last of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import cast
from weakref import WeakSet

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.records import Mode
from edgeq.pictures.prompt import PicturePlace, Prompt, common, cut, joined
from edgeq.pictures.whole_pictures import before_picture
from edgeq.runtime.arguments import token_ids
from edgeq.runtime.network.pictures import PictureFeatures, Pictures
from edgeq.runtime.session import session_file
from edgeq.runtime.session.cache import KVCache, in_turn
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.session.prefill_rate import PrefillRate
from edgeq.runtime.session.requantize import SessionRequantizer
from edgeq.runtime.session.runs import BatchItem, Chunks, Logits, RowOrder, run_together
from edgeq.runtime.session.session_file import Origin
from edgeq.runtime.session.whole_text import WholeTexts
from edgeq.targets.capabilities import Draw, FindsLargest, HoldsStates, Largest
from edgeq.targets.requantization import Weights
from edgeq.targets.rows import Page, Rows
from edgeq.targets.states import SessionState
from edgeq.targets.target import Program

CHUNK_SECONDS = 1.25
"""Every chunk of a prompt reads all weights once: at 0.4 seconds that took a twentieth of the time here, more on small
machines."""
SUMMED_SECONDS = 0.4
"""The same for a chunk whose inputs are summed for requantization: an interrupt waits for its end."""

OnPrompt = Callable[[int, int], None]
"""Progress callback of a prompt: (tokens done, total tokens)."""


class Session:
    """Tokens run so far.  `tokens[i]` is at slot i of the cache; `logits` float32 [vocab] are those after the last one, or None
    where not all of them were asked for.

    `places` says which tokens are those of pictures, `vision_s` how long the vision tower has run for them.

    Sessions of one model may be used from several threads: they share `lock`, so that one runs at a time.  With a `requantizer`
    prompts run with the master weights, and decoding with the weights that are requantized from them.

    What runs several sessions together (runs.py) knows them as `Runnable`.

    `close`, or the end of a `with` block, drops its cache; so does the end of its last reference.
    """

    def __init__(
        self,
        program: Program,
        vocab_size: int,
        context: int,
        lock: Lock,
        *,
        prefill_rate: PrefillRate,
        origin: Origin,
        requantizer: SessionRequantizer | None,
        registry: WeakSet[Session],
        pictures: Pictures | None = None,
        whole: WholeTexts | None = None,
        drafting: Callable[[Rows], Logits] | None = None,
    ) -> None:
        """registry   the open sessions of the model, in which forks are entered too
        pictures   how the model sees; None: it reads text alone
        whole      how it reads texts whose tokens see both ways: a session holds one, which is one run, or begins with a prompt
                   that is one; None: they do not
        drafting   logits of rows by the layer that drafts, over the same pages and states; None: it does not run
        """
        self.context = context
        self.tokens: list[int] = []
        self.places: tuple[PicturePlace, ...] = ()
        self.vision_s = 0.0
        self.row_order: RowOrder = "sequence"
        self.logits: Logits | None = None
        # The generation that runs in it: the text of another one cannot continue after this one's.
        self.owner: object = None
        self._running: Program | None = program
        # The same, asked for the largest logits only if it finds some.
        self._finds: FindsLargest | None = cast(FindsLargest, program)
        self._vocab_size = vocab_size
        self._cache = KVCache(program.window, program.snapshot_pages)
        self.has_states = program.snapshot_pages > 0
        self.lock = lock
        self._prefill_rate = prefill_rate
        self._origin = origin
        self._requantizer = requantizer
        self._registry = registry
        self._pictures, self.whole, self._drafting = pictures, whole, drafting
        # Rotary positions of a token; sliding windows of layers, where tokens of a picture see all of it, else empty.
        self.axes, self.ranges = (pictures.axes, pictures.ranges) if pictures else (1, ())
        # Tokens at its beginning that see each other both ways: none of them can be forgotten alone.
        self._whole_tokens = 0
        registry.add(self)

    def __repr__(self) -> str:
        return f"<Session: {len(self.tokens)} of {self.context} positions{'' if self._running else ', closed'}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the cache; pages that a fork shares stay with it.  The session cannot be used any more."""
        with self.lock:
            self._running, self._finds, self._drafting, self._requantizer, self.logits = None, None, None, None, None
            self._cache = KVCache(0)
            self.tokens, self.places = [], ()

    @property
    def _program(self) -> Program:
        if self._running is None:
            raise InputError("the session is closed; make another one with Model.session")
        return self._running

    def fork(self) -> Session:
        """A session that goes on from here by itself, with the same tokens.

        The two share the pages of the cache; a page is copied when one of them first writes to it.  States are copied.
        """
        program = self._program
        requantizer = self._requantizer.fork() if self._requantizer else None
        forked = Session(
            program, self._vocab_size, self.context, self.lock, prefill_rate=self._prefill_rate, origin=self._origin,
            requantizer=requantizer, registry=self._registry, pictures=self._pictures, whole=self.whole,
            drafting=self._drafting,
        )  # fmt: skip
        forked.tokens, forked.places, forked.row_order = list(self.tokens), self.places, self.row_order
        forked.logits = None if self.logits is None else self.logits.copy()
        forked._whole_tokens = self._whole_tokens
        forked._cache = self._cache.fork(len(self.tokens))
        if self._cache.state is not None:
            forked._cache.state = in_turn(self.lock, cast(HoldsStates, program).fork_state)(self._cache.state)
        return forked

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokens, keys and values to a file for `load`.

        ResourceError: it cannot be written.  UnsupportedError: the session sums what it reads for requantization.
        """
        self._check_saving()
        kept, program = self._cache.pages_of(len(self.tokens)), self._program
        saved = session_file.Saved(self.tokens, self.places, kept, self._cache.state)
        session_file.write(Path(path), self._origin, saved, program, self.lock)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote, in place of what is here.  The last token has to run again to give logits.

        Only the model whose session was saved takes it, with the same target, mode, cache codec and rotary frequencies.

        InputError: another model's or other settings', longer than the context, or no such file.  FormatError: damaged.
        """
        self._check_saving()
        found = session_file.read(Path(path), self._origin, self._program, self.lock, self._vocab_size, self.context)
        self.owner = None
        self._cache = KVCache(self._program.window, self._program.snapshot_pages)
        self.tokens, self.places, self.logits = list(found.tokens), tuple(found.places), None
        self._cache.pages, self._cache.state = list(found.pages), found.state
        # The file does not say how many they are.
        self._whole_tokens = len(self.tokens) if self.whole else 0

    def _check_saving(self) -> None:
        """UnsupportedError: as `save`."""
        if self._requantizer:
            raise UnsupportedError(
                "a session with requantized weights cannot be saved or loaded; load the model with `requantization=never`"
            )

    @property
    def is_open(self) -> bool:
        """Whether it can be used and holds memory."""
        return self._running is not None

    @property
    def left(self) -> int:
        """Positions still free."""
        return self.context - len(self.tokens)

    @property
    def most_logits(self) -> int:
        """Rows whose logits one run can give."""
        options = self._program.options
        return min(options.max_logits, options.max_rows)

    def prefill(self, tokens: Sequence[int] | Prompt, on_progress: OnPrompt | None = None) -> Logits:
        """Run `tokens` after those already here, in chunks; the logits after the last.

        A chunk has at most `max_rows` tokens and is meant to take CHUNK_SECONDS, or SUMMED_SECONDS.  `on_progress` is called
        after each and may raise.
        InputError: no tokens, tokens that are not in the vocabulary, or more than the context has room for.
        """
        chunks, summing = Chunks(self, tokens), self._requantizer is not None
        total, seconds = chunks.left, SUMMED_SECONDS if summing else CHUNK_SECONDS
        if chunks.sees and on_progress is not None:
            on_progress(0, total)
        while chunks.left:
            most = min(total if self.whole else self._prefill_rate.rows(seconds), self._program.options.max_rows)
            item, before = chunks.next(most), perf_counter()
            logits = run_together([item], summing=summing)[0]
            self._prefill_rate.record(len(item.tokens), perf_counter() - before, len(item.tokens) == most)
            if on_progress is not None:
                on_progress(total - chunks.left, total)
        self._cache.mark(len(self.tokens))
        self.logits = logits[0]
        return self.logits

    def decode(self, token: int) -> Logits:
        """Run one token; the logits after it."""
        self.logits = self._run(self.check([token]), [0])[0]
        return self.logits

    def requantize(self) -> float:
        """Requantize the weights for what was read since, if it is time; the seconds that it took."""
        return self._requantizer.update() if self._requantizer else 0.0

    @property
    def weights(self) -> Weights | None:
        """The requantized weights of this session; None: it uses the file's."""
        return self._requantizer.weights if self._requantizer else None

    @property
    def requantized_tokens(self) -> int:
        """Tokens that these weights were requantized for, 0 where there are none."""
        return self._requantizer.tokens if self._requantizer and self._requantizer.weights else 0

    def all_logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Run `tokens` and give the logits after each of them, in pieces [n, vocab] of at most `most_logits` rows."""
        tokens = self.check(tokens)
        for start in range(0, len(tokens), self.most_logits):
            chunk = tokens[start : start + self.most_logits]
            logits = self._run(chunk, range(len(chunk)))
            self.logits = logits[-1]
            yield logits

    def adopt(self, tokens: Sequence[int], places: tuple[PicturePlace, ...], pages: Sequence[Page]) -> None:
        """Begin an empty session with `tokens`, whose keys and values fill `pages`, which others may hold too."""
        self.tokens, self.places = list(tokens), places
        self._cache.share(pages)

    def share(self, pages: Sequence[Page]) -> None:
        """Hold `pages`, whose contents are equal, in place of its own first ones; others may hold them too."""
        self._cache.share(pages)

    @property
    def pages(self) -> Sequence[Page]:
        """Its cache pages, as they are now."""
        return self._cache.pages

    def missing_pages(self, count: int) -> int:
        """Pages that have to be made before `count` more tokens can run."""
        return self._cache.missing(len(self.tokens), len(self.tokens) + count)

    def holds(self, count: int) -> bool:
        """Whether `count` more tokens can run without another page, or a copy of one."""
        end = len(self.tokens) + count
        return end <= self.context and not self._cache.missing(len(self.tokens), end)

    def reserve(self, count: int) -> None:
        """Make them.  ResourceError: there is no memory for it; what was made until then stays."""
        self._cache.reserve(self._program, len(self.tokens), len(self.tokens) + count)

    def missing_snapshots(self, count: int) -> int:
        """Snapshots that have to be made before `count` more tokens can run, at most."""
        return self._cache.missing_snapshots(len(self.tokens), len(self.tokens) + count)

    def state_of_run(self, count: int) -> SessionState:
        """The state that takes the next `count` rows."""
        return self._cache.state_of_run(self._program, len(self.tokens), count)

    def rewind(self, length: int) -> int:
        """Forget all but the first `length` tokens, or more where they cannot be kept; how many are left.

        Tokens that are forgotten in vain have to run again.  What the last run added, up to 16 tokens, is forgotten alone.
        """
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length {length} outside the {len(self.tokens)} tokens of the session")
        if length < len(self.tokens):
            length = self._cache.rewind(0 if length < self._whole_tokens else self._whole(length))
            while (whole := self._whole(length)) < length:
                length = self._cache.rewind(whole)
            self._whole_tokens = min(self._whole_tokens, length)
            del self.tokens[length:]
            self.places, self.logits = cut(self.places, length), None
            if self._requantizer and not length:
                self._requantizer.reset()
        return length

    def _whole(self, length: int) -> int:
        """`length`, but of a picture whose tokens see all of it no part is kept."""
        return before_picture(self.places, length) if self.ranges else length

    def keep_prefix(self, tokens: Sequence[int] | Prompt) -> int:
        """Forget what differs from `tokens`, pictures included; how many of them need not be run.

        At most all but the last: its row has to run to give logits.  With a requantizer it is none where less than half of what
        was read is kept: its sums cannot forget a part.  None too where the tokens of a prompt see those after them.
        """
        shared = common(self.tokens, self.places, tokens if isinstance(tokens, Prompt) else Prompt(list(tokens)))
        if (self.whole and self.whole.goes_on) or (self._requantizer and not self._requantizer.keeps(shared)):
            shared = 0
        return self.rewind(shared)

    def check(self, tokens: Sequence[int], visual: int = 0) -> list[int]:
        """Tokens that are to run next, `visual` of them of pictures.

        InputError: none, some that are not in the vocabulary, or more than the context has room for.
        """
        found = token_ids("tokens", tokens, self._vocab_size)
        if not found:
            raise InputError("there is nothing to run: the prompt is empty")
        check_length(len(found), self.context, len(self.tokens), visual)
        return found

    def features(self, prompt: Prompt) -> PictureFeatures | None:
        """The features of the pictures of a prompt that runs next; None: it has none."""
        if not prompt.places:
            return None
        assert self._pictures is not None
        return PictureFeatures(self._pictures, prompt, joined(self.places, prompt.places, len(self.tokens)), self.lock)

    @property
    def runs_with(self) -> tuple[int, int]:
        """Names the program and the weights: sessions for which it is equal can share a run."""
        return id(self._running), id(self.weights)

    def run_rows(self, rows: Rows, mode: Mode | None, summing: bool) -> Logits:
        """Run rows of this session, and of others that share its run, as `Program.run`."""
        if self._requantizer:
            return self._requantizer.run(rows, mode, summing)
        return self._program.run(rows, mode)

    def draft_rows(self, rows: Rows) -> Logits:
        """Run rows of this session, and of others that share its run, by the layer that drafts."""
        assert self._drafting is not None
        return self._drafting(rows)

    def most_largest(self, rows: int) -> int:
        """Logits that `largest_of` can find in a run with so many results; 0: it cannot."""
        found = self._finds
        if found is None or not (most := found.most_largest):
            return 0
        return most if rows <= found.largest_rows else 0

    def largest_of(self, rows: Rows, count: int, ahead: Sequence[Draw]) -> Largest:
        """Run as `run_rows`; the `count` largest logits of each result, as `FindsLargest.run_largest`."""
        assert self._finds is not None
        return self._finds.run_largest(rows, count, weights=self.weights, ahead=ahead)

    def append(self, tokens: Sequence[int], places: tuple[PicturePlace, ...], whole: bool) -> None:
        """Tokens whose keys and values a run has written; `places`, `whole`: as of BatchItem."""
        self.tokens += map(int, tokens)
        if whole and self.whole is not None and self.whole.goes_on:
            self._whole_tokens = len(self.tokens)
        if self.has_states:
            self._cache.end_run()
        if places:
            self.places = cut(places, len(self.tokens))

    def _run(self, tokens: Sequence[int], wanted: Sequence[int]) -> Logits:
        return run_together([BatchItem(self, tokens, wanted)])[0]
