"""One conversation: its tokens, their keys and values, and the logits after the last of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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
from edgeq.runtime.cache import KVCache
from edgeq.runtime.pictures import Pictures, Seen
from edgeq.runtime.requantize import Requantizer
from edgeq.runtime.session_file import Origin
from edgeq.targets.requantization import Weights
from edgeq.targets.rows import TEXT, VISION, Rows
from edgeq.targets.target import Program

CHUNK_SECONDS = 1.25
"""Every chunk of a prompt reads all weights once: at 0.4 seconds that took a twentieth of the time here, more on small
machines."""
SUMMED_SECONDS = 0.4
"""The same for a chunk whose inputs are summed for requantization: an interrupt waits for its end."""
FIRST_TILES = 4
"""Tiles of the first chunk, before the rate is known."""

RowOrder = Literal["sequence", "modality"]
"""Order of the rows of a run: as the tokens come, or those of pictures first."""

Logits = NDArray[np.float32]
OnPrompt = Callable[[int, int], None]
"""Progress callback of a prompt: (tokens done, total tokens)."""


class PrefillRate:
    """How fast prompts run, shared by the sessions of a model.  `tile`: rows that the kernels multiply together."""

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._rate: float | None = None

    def rows(self, seconds: float) -> int:
        """Tokens that take so long, in whole tiles; FIRST_TILES tiles while nothing is known."""
        if self._rate is None:
            return FIRST_TILES * self._tile
        return max(self._tile, int(self._rate * seconds) // self._tile * self._tile)

    def record(self, rows: int, seconds: float, whole: bool) -> None:
        """A chunk has run; one that is not `whole` waits for memory more than it computes, so it can only raise the rate."""
        if whole or (self._rate is not None and rows > self._rate * seconds):
            self._rate = rows / seconds


class Session:
    """Tokens run so far.  `tokens[i]` is at slot i of the cache; `logits` float32 [vocab] are those after the last one.

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
        program = self._program
        self._refuse_requantized()
        page_bytes = len(program.save_page(program.new_page()))
        contents = self._cache.contents(program, len(self.tokens))
        session_file.write(Path(path), self._origin, self.tokens, self.places, page_bytes, contents)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote, in place of what is here.  The last token has to run again to give logits.

        Only the model whose session was saved takes it, with the same target, mode, cache codec and rotary frequencies.

        InputError: another model's or other settings', longer than the context, or no such file.  FormatError: damaged.
        """
        program = self._program
        self._refuse_requantized()
        page_bytes = len(program.save_page(program.new_page()))
        found = session_file.read(Path(path), self._origin, self._vocab_size, self.context, page_bytes, program.load_page)
        self.owner = None
        self._cache = KVCache()
        (self.tokens, self.places, self._cache.pages), self.logits = found, None

    def _refuse_requantized(self) -> None:
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
        seen, begun = None, len(self.tokens)
        if isinstance(tokens, Prompt):
            prompt, tokens = tokens, self._check(tokens.tokens, tokens.visual_tokens)
        else:
            tokens = self._check(tokens)
            prompt = Prompt(tokens)
        if prompt.places:
            assert self._pictures is not None
            seen = Seen(self._pictures, prompt, joined(self.places, prompt.places, begun), self._lock)
        summing = self._requantizer is not None
        done, seconds = 0, SUMMED_SECONDS if summing else CHUNK_SECONDS
        if seen and on_progress is not None:
            on_progress(0, len(tokens))
        while done < len(tokens):
            most = min(self._prefill_rate.rows(seconds), self._program.options.max_rows)
            chunk = tokens[done : done + most]
            vectors = seen.between(begun + done, begun + done + len(chunk)) if seen else None
            done += len(chunk)
            before = perf_counter()
            wanted = [len(chunk) - 1] if done == len(tokens) else []
            item = BatchItem(self, chunk, wanted, seen.places if seen else (), vectors)
            logits = run_together([item], summing=summing)[0]
            self._prefill_rate.record(len(chunk), perf_counter() - before, len(chunk) == most)
            if on_progress is not None:
                on_progress(done, len(tokens))
        self.logits, self.vision_s = logits[0], self.vision_s + (seen.seconds if seen else 0.0)
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


def check_length(tokens: int, context: int, held: int = 0, visual: int = 0) -> None:
    """InputError: a prompt of so many tokens, `visual` of them of pictures, after `held` others, is longer than the context."""
    if held + tokens > context:
        after = f", {visual} of them of images" if visual else ""
        after += f" after the {held} already there" if held else ""
        raise InputError(
            f"the prompt has {tokens} tokens{after}, the context {context} positions; "
            "shorten the prompt or pass a larger `context`"
        )


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


def run_together(items: Sequence[BatchItem], mode: Mode | None = None, *, summing: bool = False) -> list[Logits]:
    """One run of the program for the rows of several sessions of one model; the wanted logits of each item, [n, vocab].

    An item gives the same bits as if it ran alone.  Its tokens are the session's once the run is done.  Sessions that have
    requantized weights run one after another.  `summing`: run with the masters and add up what they read, for one item whose
    session has a requantizer.
    """
    if not summing:
        for item in items:
            item.session.requantize()
    if len({id(item.session.weights) for item in items}) > 1:
        return [run_together([item], mode, summing=summing)[0] for item in items]
    session = items[0].session
    with session._lock:
        # Within the lock: another thread may close a session.
        for item in items:
            held = len(item.session.tokens)
            item.session._cache.reserve(item.session._program, held, held + len(item.tokens))
        rows, requantizer = rows_of(items), session._requantizer
        if session.row_order == "modality":
            rows = rows.by_modality()
        run = requantizer.run(rows, mode, summing) if requantizer else session._program.run(rows, mode)
        # The next run, perhaps another session's, overwrites the program's own array.
        logits = run.copy()
        for session, tokens, _, places, _ in items:
            session.tokens += [int(t) for t in tokens]
            if places:
                session.places = cut(places, len(session.tokens))
    return np.split(logits, np.cumsum([len(item.wanted) for item in items])[:-1])


def rows_of(items: Sequence[BatchItem]) -> Rows:
    """The rows of a run: the items one after another, each continuing its session."""
    slots = [np.arange(len(s.tokens), len(s.tokens) + len(tokens), dtype=np.int32) for s, tokens, *_ in items]
    starts = np.cumsum([0, *(len(item.tokens) for item in items[:-1])])
    pictures = items[0].session._pictures
    axes = pictures.axes if pictures else 1
    rows = Rows(
        tokens=np.concatenate([np.asarray(item.tokens, np.int32) for item in items]),
        positions=np.concatenate(
            [
                positions(i.places or i.session.places, len(i.session.tokens), len(i.session.tokens) + len(i.tokens), axes)
                for i in items
            ],
            axis=1,
        ),
        slots=np.concatenate(slots),
        sessions=np.repeat(np.arange(len(items), dtype=np.int32), [len(item.tokens) for item in items]),
        pages=[item.session._cache.pages for item in items],
        wanted=np.concatenate([np.asarray(i.wanted, np.int32) + start for i, start in zip(items, starts, strict=True)]),
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
