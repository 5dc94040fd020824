"""One conversation: its tokens, their keys and values, and the logits behind the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.records import Mode
from edgeq.runtime.cache import KVCache
from edgeq.runtime.requantize import Requantizer
from edgeq.targets import Program
from edgeq.targets.graph import Rows
from edgeq.targets.requantization import InputSums, Weights

CHUNK_SECONDS = 1.25
"""Every chunk reads all weights once: with 0.4 seconds that took a twentieth of the time here, more on small machines."""
COUNTED_SECONDS = 0.4
"""Of a chunk whose inputs are summed for new weights: no interrupt may part it."""
FIRST_CHUNK = 48
LEAST_CHUNK = 12
"""Tokens; the tiles of the cpu target are of 12 and of 4."""

Logits = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Hears (tokens done, tokens in all)."""


class Pace:
    """How fast prompts run, which the sessions of a model learn from one another."""

    def __init__(self) -> None:
        self._rate: float | None = None

    def rows(self, seconds: float) -> int:
        """Tokens that take so long, whole tiles; FIRST_CHUNK while nothing is known."""
        if self._rate is None:
            return FIRST_CHUNK
        return max(LEAST_CHUNK, int(self._rate * seconds) // LEAST_CHUNK * LEAST_CHUNK)

    def note(self, rows: int, seconds: float, whole: bool) -> None:
        """A chunk has run; one that is not `whole` waits for memory more than it computes, so it can only raise the pace."""
        if whole or (self._rate is not None and rows > self._rate * seconds):
            self._rate = rows / seconds


class Session:
    """Tokens run so far.  `tokens[i]` lies at position i of the cache; `logits` float32 [vocab] are those behind the last one.

    Sessions of one model may be used from several threads: `turn` lets one run at a time.  With a `requantizer` prompts run
    with the master weights, and what follows them with the copy that is made of them.
    """

    def __init__(
        self,
        program: Program,
        vocab_size: int,
        context: int,
        turn: Lock,
        pace: Pace,
        requantizer: Requantizer | None = None,
    ) -> None:
        self.context = context
        self.tokens: list[int] = []
        self.logits: Logits | None = None
        # A ticket of who generates in it: another one's text cannot go on behind this one's.
        self.reader: object = None
        self._program = program
        self._vocab_size = vocab_size
        self._cache = KVCache(program)
        self._turn = turn
        self._pace = pace
        self._requantizer = requantizer

    @property
    def left(self) -> int:
        """Positions still free."""
        return self.context - len(self.tokens)

    @property
    def most_logits(self) -> int:
        """Rows whose logits one run can give."""
        options = self._program.options
        return min(options.max_logits, options.max_rows)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits:
        """Run `tokens` behind those already here, in chunks; logits behind the last.

        A chunk has at most `max_rows` tokens and is meant to take CHUNK_SECONDS, or COUNTED_SECONDS; behind each `progress` is
        told, and may raise.
        InputError: no tokens, tokens that are not in the vocabulary, or more than the context has room for.
        """
        self._check(tokens)
        done, seconds = 0, COUNTED_SECONDS if self._requantizer else CHUNK_SECONDS
        while done < len(tokens):
            most = min(self._pace.rows(seconds), self._program.options.max_rows)
            chunk = tokens[done : done + most]
            done += len(chunk)
            before = perf_counter()
            sums = self._requantizer.sums if self._requantizer else None
            logits = run_together([Part(self, chunk, [len(chunk) - 1] if done == len(tokens) else [])], sums=sums)[0]
            self._pace.note(len(chunk), perf_counter() - before, len(chunk) == most)
            if progress is not None:
                progress(done, len(tokens))
        self.logits = logits[0]
        return self.logits

    def decode(self, token: int) -> Logits:
        """Run one token; logits behind it."""
        self._check([token])
        self.logits = self._run([token], [0])[0]
        return self.logits

    def requantize(self) -> float:
        """Make the copy of the weights for what was read since, if it is time; the seconds that it took."""
        return self._requantizer.update() if self._requantizer else 0.0

    @property
    def weights(self) -> Weights | None:
        """The session's own copy of the weights; None: it uses the file's."""
        return self._requantizer.weights if self._requantizer else None

    @property
    def requantized_tokens(self) -> int:
        """Tokens read for that copy, 0 where there is none."""
        return self._requantizer.tokens if self._requantizer and self._requantizer.weights else 0

    def all_logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Run `tokens` and give the logits behind each of them, in parts [n, vocab] of at most `most_logits` rows."""
        self._check(tokens)
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
            self.logits = None
            if self._requantizer and not length:
                self._requantizer.begin()

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Forget what differs from `tokens`; how many of them need not be run.

        That is at most all but the last: its row has to run to give logits.  With a requantizer it is none where less than half
        of what was read is kept: its sums cannot forget a part.
        """
        common = 0
        for ours, theirs in zip(self.tokens, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if self._requantizer and not self._requantizer.keeps(common):
            common = 0
        self.trim(common)
        return common

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputError("there is nothing to run: the prompt is empty")
        check_length(len(tokens), self.context, len(self.tokens))
        wrong = next((t for t in tokens if not 0 <= t < self._vocab_size), None)
        if wrong is not None:
            raise InputError(f"token {wrong} is not in the vocabulary of {self._vocab_size} tokens")

    def _run(self, tokens: Sequence[int], wanted: Sequence[int]) -> Logits:
        return run_together([Part(self, tokens, wanted)])[0]


def check_length(tokens: int, context: int, held: int = 0) -> None:
    """InputError: a prompt of so many tokens, behind `held` others, is longer than the context."""
    if held + tokens > context:
        behind = f" behind the {held} already there" if held else ""
        raise InputError(
            f"the prompt has {tokens} tokens{behind}, the context {context} positions; "
            "shorten the prompt or pass a larger context with -c"
        )


class Part(NamedTuple):
    """Tokens that a session runs in a run shared with others; `wanted`: those of them whose logits are."""

    session: Session
    tokens: Sequence[int]
    wanted: Sequence[int]


def run_together(parts: Sequence[Part], mode: Mode | None = None, sums: InputSums | None = None) -> list[Logits]:
    """One run of the program for the rows of several sessions of one model; the logits wanted of each part, [n, vocab].

    A session's part gives the same bits as if it ran alone.  Tokens are the session's when the run is done.  Sessions that have
    weights of their own run one after another.  `sums`: run with the masters and add up what they read.
    """
    if sums is None:
        for part in parts:
            part.session.requantize()
    if len({id(part.session.weights) for part in parts}) > 1:
        return [run_together([part], mode, sums)[0] for part in parts]
    for part in parts:
        part.session._cache.reserve(len(part.session.tokens) + len(part.tokens))
    slots = [np.arange(len(s.tokens), len(s.tokens) + len(tokens), dtype=np.int32) for s, tokens, _ in parts]
    starts = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    together = np.concatenate(slots)
    rows = Rows(
        tokens=np.concatenate([np.asarray(part.tokens, np.int32) for part in parts]),
        positions=together,
        slots=together,
        sessions=np.repeat(np.arange(len(parts), dtype=np.int32), [len(part.tokens) for part in parts]),
        pages=[part.session._cache.pages for part in parts],
        logits=np.concatenate([np.asarray(p.wanted, np.int32) + start for p, start in zip(parts, starts, strict=True)]),
    )
    runner = parts[0].session
    with runner._turn, sums.or_nothing() if sums else nullcontext():
        # The next run, perhaps another session's, overwrites the program's own array.
        weights = runner.weights if sums is None else None
        logits = runner._program.run(rows, mode, weights=weights, sums=sums).copy()
        for session, tokens, _ in parts:
            session.tokens += [int(t) for t in tokens]
    return np.split(logits, np.cumsum([len(part.wanted) for part in parts])[:-1])
