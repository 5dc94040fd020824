"""One conversation: its tokens, their keys and values, and the logits after the last of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Literal, NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError, UnsupportedError
from edgeq.prompt import Place, Prompt, common, cut, joined, positions
from edgeq.records import Mode
from edgeq.runtime import session_file
from edgeq.runtime.arguments import token_ids
from edgeq.runtime.cache import KVCache, in_turn
from edgeq.runtime.context_size import check_length
from edgeq.runtime.pictures import Pictures, Seen
from edgeq.runtime.prefill_rate import PrefillRate
from edgeq.runtime.requantize import Requantizer
from edgeq.runtime.session_file import Origin
from edgeq.targets.requantization import Weights
from edgeq.targets.rows import TEXT, VISION, Page, Rows
from edgeq.targets.target import Program

CHUNK_SECONDS = 1.25
"""Every chunk of a prompt reads all weights once: at 0.4 seconds that took a twentieth of the time here, more on small
machines."""
SUMMED_SECONDS = 0.4
"""The same for a chunk whose inputs are summed for requantization: an interrupt waits for its end."""
RowOrder = Literal["sequence", "modality"]
"""Order of the rows of a run: as the tokens come, or those of pictures first."""

Logits = NDArray[np.float32]
OnPrompt = Callable[[int, int], None]
"""Progress callback of a prompt: (tokens done, total tokens)."""


class Session:
    """Tokens run so far.  `tokens[i]` is at slot i of the cache; `logits` float32 [vocab] are those after the last one, or None
    where not all of them were asked for.

    `places` says which tokens are those of pictures, `vision_s` how long the vision tower has run for them.

    Sessions of one model may be used from several threads: they share `lock`, so that one runs at a time.  With a `requantizer`
    prompts run with the master weights, and decoding with the weights that are requantized from them.

    `close`, or the end of a `with` block, drops its cache; so does the end of its last reference.
    """

    def __init__(
        self,
        program: Program,
        vocab_size: int,
        context: int,
        lock: Lock,
        prefill_rate: PrefillRate,
        origin: Origin,
        requantizer: Requantizer | None,
        registry: WeakSet[Session],
        pictures: Pictures | None = None,
    ) -> None:
        """registry   the open sessions of the model, in which forks are entered too
        pictures   how the model sees; None: it reads text alone
        """
        self.context = context
        self.tokens: list[int] = []
        self.places: tuple[Place, ...] = ()
        self.vision_s = 0.0
        self.row_order: RowOrder = "sequence"
        self.logits: Logits | None = None
        # The generation that runs in it: the text of another one cannot continue after this one's.
        self.owner: object = None
        self._running: Program | None = program
        self._vocab_size = vocab_size
        self._cache = KVCache()
        self._lock = lock
        self._prefill_rate = prefill_rate
        self._origin = origin
        self._requantizer = requantizer
        self._registry = registry
        self._pictures = pictures
        registry.add(self)

    def __repr__(self) -> str:
        return f"<Session: {len(self.tokens)} of {self.context} positions{'' if self._running else ', closed'}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the cache; pages that a fork shares stay with it.  The session cannot be used any more."""
        with self._lock:
            self._running, self._requantizer, self.logits = None, None, None
            self._cache = KVCache()
            self.tokens, self.places = [], ()

    @property
    def _program(self) -> Program:
        if self._running is None:
            raise InputError("the session is closed; make another one with Model.session")
        return self._running

    def fork(self) -> Session:
        """A session that goes on from here by itself, with the same tokens.

        The two share the pages of the cache; a page is copied when one of them first writes to it.
        """
        program = self._program
        requantizer = self._requantizer.fork() if self._requantizer else None
        rest = self._lock, self._prefill_rate, self._origin
        forked = Session(program, self._vocab_size, self.context, *rest, requantizer, self._registry, self._pictures)
        forked.tokens, forked.places, forked.row_order = list(self.tokens), self.places, self.row_order
        forked.logits = None if self.logits is None else self.logits.copy()
        forked._cache = self._cache.fork(len(self.tokens))
        return forked

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokens, keys and values to a file for `load`.

        ResourceError: it cannot be written.  UnsupportedError: the session sums what it reads for requantization.
        """
        self._check_saving()
        contents = map(in_turn(self._lock, self._program.save_page), self._cache.held(len(self.tokens)))
        page_bytes = len(self._program.page_memory())
        session_file.write(Path(path), self._origin, self.tokens, self.places, page_bytes, contents)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote, in place of what is here.  The last token has to run again to give logits.

        Only the model whose session was saved takes it, with the same target, mode, cache codec and rotary frequencies.

        InputError: another model's or other settings', longer than the context, or no such file.  FormatError: damaged.
        """
        self._check_saving()
        page_memory, load_page = self._program.page_memory, in_turn(self._lock, self._program.load_page)
        found = session_file.read(Path(path), self._origin, self._vocab_size, self.context, page_memory, load_page)
        self.owner = None
        self._cache = KVCache()
        (self.tokens, self.places, self._cache.pages), self.logits = found, None

    def _check_saving(self) -> None:
        """UnsupportedError: as `save`."""
        if self._requantizer:
            raise UnsupportedError(
                "a session with requantized weights cannot be saved or loaded; load the model with `requantization=never`"
            )

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
            most = min(self._prefill_rate.rows(seconds), self._program.options.max_rows)
            item, before = chunks.next(most), perf_counter()
            logits = run_together([item], summing=summing)[0]
            self._prefill_rate.record(len(item.tokens), perf_counter() - before, len(item.tokens) == most)
            if on_progress is not None:
                on_progress(total - chunks.left, total)
        self.logits = logits[0]
        return self.logits

    def decode(self, token: int) -> Logits:
        """Run one token; the logits after it."""
        self.logits = self._run(self._check([token]), [0])[0]
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
        tokens = self._check(tokens)
        for start in range(0, len(tokens), self.most_logits):
            chunk = tokens[start : start + self.most_logits]
            logits = self._run(chunk, range(len(chunk)))
            self.logits = logits[-1]
            yield logits

    def adopt(self, tokens: Sequence[int], places: tuple[Place, ...], pages: Sequence[Page]) -> None:
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

    def reserve(self, count: int) -> None:
        """Make them.  ResourceError: there is no memory for it; what was made until then stays."""
        self._cache.reserve(self._program, len(self.tokens), len(self.tokens) + count)

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length {length} outside the {len(self.tokens)} tokens of the session")
        if length < len(self.tokens):
            del self.tokens[length:]
            self.places, self.logits = cut(self.places, length), None
            if self._requantizer and not length:
                self._requantizer.reset()

    def keep_prefix(self, tokens: Sequence[int] | Prompt) -> int:
        """Forget what differs from `tokens`, pictures included; how many of them need not be run.

        At most all but the last: its row has to run to give logits.  With a requantizer it is none where less than half of what
        was read is kept: its sums cannot forget a part.
        """
        shared = common(self.tokens, self.places, tokens if isinstance(tokens, Prompt) else Prompt(list(tokens)))
        if self._requantizer and not self._requantizer.keeps(shared):
            shared = 0
        self.trim(shared)
        return shared

    def _check(self, tokens: Sequence[int], visual: int = 0) -> list[int]:
        found = token_ids("tokens", tokens, self._vocab_size)
        if not found:
            raise InputError("there is nothing to run: the prompt is empty")
        check_length(len(found), self.context, len(self.tokens), visual)
        return found

    def _run(self, tokens: Sequence[int], wanted: Sequence[int]) -> Logits:
        return run_together([BatchItem(self, tokens, wanted)])[0]


class BatchItem(NamedTuple):
    """The tokens that one session contributes to a run; `wanted`: indices of those whose logits are asked for.

    places    of all pictures that the session has from then on; empty: of those that it has already
    vectors   float32 [V, width] that tokens of pictures bring, and which each token brings, int32; -1: none
    """

    session: Session
    tokens: Sequence[int]
    wanted: Sequence[int]
    places: tuple[Place, ...] = ()
    vectors: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None


class Chunks:
    """A prompt on its way into a session, in pieces whose lengths the caller chooses.

    left   tokens that have not been run;  sees: pictures are among them
    """

    def __init__(self, session: Session, tokens: Sequence[int] | Prompt) -> None:
        """InputError: no tokens, tokens that are not in the vocabulary, or more than the context has room for."""
        visual = tokens.visual_tokens if isinstance(tokens, Prompt) else 0
        self._tokens = session._check(tokens.tokens if isinstance(tokens, Prompt) else tokens, visual)
        self._session, self._begun, self._seen = session, len(session.tokens), None
        self.left = len(self._tokens)
        if isinstance(tokens, Prompt) and tokens.places:
            assert session._pictures is not None
            places = joined(session.places, tokens.places, self._begun)
            self._seen = Seen(session._pictures, tokens, places, session._lock)

    @property
    def sees(self) -> bool:
        return self._seen is not None

    def next(self, most: int) -> BatchItem:
        """The next tokens, at most `most`, which have to run before more are taken; the logits after the last are wanted."""
        done, seen = len(self._tokens) - self.left, self._seen
        chunk, vectors = self._tokens[done : done + most], None
        if seen:
            before = seen.seconds
            vectors = seen.between(self._begun + done, self._begun + done + len(chunk))
            self._session.vision_s += seen.seconds - before
        self.left -= len(chunk)
        return BatchItem(self._session, chunk, [] if self.left else [len(chunk) - 1], seen.places if seen else (), vectors)


def run_together(items: Sequence[BatchItem], mode: Mode | None = None, *, summing: bool = False) -> list[Logits]:
    """One run of the program for the rows of several sessions of one model; the wanted logits of each item, [n, vocab].

    An item gives the same bits as if it ran alone.  Its tokens are the session's once the run is done.

    Sessions with weights of their own, requantized or of an adapter, run one after another.  `summing`: run with the masters
    and add up what they read, for one item whose session has a requantizer.
    """
    if not summing:
        for item in items:
            item.session.requantize()
    groups = dict[tuple[int, int], list[int]]()
    for index, item in enumerate(items):
        groups.setdefault((id(item.session._running), id(item.session.weights)), []).append(index)
    if len(groups) > 1:
        found = dict[int, Logits]()
        for group in groups.values():
            found |= zip(group, run_together([items[index] for index in group], mode, summing=summing), strict=True)
        return [found[index] for index in range(len(items))]
    with rows_in_turn(items) as rows:
        session = items[0].session
        requantizer = session._requantizer
        run = requantizer.run(rows, mode, summing) if requantizer else session._program.run(rows, mode)
        # The next run, perhaps another session's, overwrites the program's own array.
        logits = run.copy()
    ends = list(accumulate(len(item.wanted) for item in items))
    return [logits[end - len(item.wanted) : end] for item, end in zip(items, ends, strict=True)]


@contextmanager
def rows_in_turn(items: Sequence[BatchItem]) -> Iterator[Rows]:
    """The rows of a run of sessions that share weights, between the runs of other threads; after it their tokens are the
    sessions'."""
    session = items[0].session
    with session._lock:
        # Within the lock: another thread may close a session.
        for item in items:
            held = len(item.session.tokens)
            item.session._cache.reserve(item.session._program, held, held + len(item.tokens))
        rows = rows_of(items)
        yield rows.by_modality() if session.row_order == "modality" else rows
        for session, tokens, _, places, _ in items:
            session.tokens += [int(t) for t in tokens]
            if places:
                session.places = cut(places, len(session.tokens))


def _positions(item: BatchItem, axes: int) -> NDArray[np.int32]:
    held = len(item.session.tokens)
    return positions(item.places or item.session.places, held, held + len(item.tokens), axes)


def rows_of(items: Sequence[BatchItem]) -> Rows:
    """The rows of a run: the items one after another, each continuing its session."""
    # Lists of Python and one array of each: for the few rows of a decode step numpy's own ways take longer than a small model.
    starts = list(accumulate((len(item.tokens) for item in items[:-1]), initial=0))
    held = [len(item.session.tokens) for item in items]
    slots = np.array([at for item, n in zip(items, held, strict=True) for at in range(n, n + len(item.tokens))], np.int32)
    pictures = items[0].session._pictures
    axes = pictures.axes if pictures else 1
    rows = Rows(
        tokens=np.array([token for item in items for token in item.tokens], np.int32),
        positions=slots[None] if axes == 1 else np.concatenate([_positions(item, axes) for item in items], axis=1),
        slots=slots,
        sessions=np.array([i for i, item in enumerate(items) for _ in item.tokens], np.int32),
        pages=[item.session._cache.pages for item in items],
        wanted=np.array([at + start for i, start in zip(items, starts, strict=True) for at in i.wanted], np.int32),
    )
    brought = [(item.vectors, start) for item, start in zip(items, starts, strict=True) if item.vectors is not None]
    if brought:
        rows.vectors = np.concatenate([vectors for (vectors, _), _ in brought])
        rows.vector_of = np.full(len(rows), -1, np.int32)
        first = 0
        for (vectors, which), start in brought:
            rows.vector_of[start : start + len(which)] = np.where(which < 0, -1, which + first)
            first += len(vectors)
        rows.modality = np.where(rows.vector_of < 0, TEXT, VISION).astype(np.uint8)
    return rows
