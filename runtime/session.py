"""One conversation: its tokens, their keys and values, and the logits behind the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.runtime.cache import KVCache
from edgeq.targets import Program
from edgeq.targets.operations import Rows

CHUNK_SECONDS = 0.4
FIRST_CHUNK = 48
LEAST_CHUNK = 12
"""Tokens; the tiles of the cpu target are of 12 and of 4."""

Logits = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Hears (tokens done, tokens in all)."""


class Session:
    """Tokens run so far.  `tokens[i]` lies at position i of the cache; `logits` float32 [vocab] are those behind the last one.

    Sessions of one model may be used from several threads: `turn` lets one run at a time.
    """

    def __init__(self, program: Program, vocab_size: int, context: int, turn: Lock) -> None:
        self.context = context
        self.tokens: list[int] = []
        self.logits: Logits | None = None
        self._program = program
        self._vocab_size = vocab_size
        self._cache = KVCache(program)
        self._turn = turn

    @property
    def left(self) -> int:
        """Positions still free."""
        return self.context - len(self.tokens)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits:
        """Run `tokens` behind those already here, in chunks; logits behind the last.

        A chunk has at most `max_rows` tokens and is meant to take CHUNK_SECONDS: only between chunks can a prompt be given up.
        InputError: no tokens, tokens that are not in the vocabulary, or more than the context has room for.
        """
        self._check(tokens)
        most = self._program.options.max_rows
        done, step = 0, min(FIRST_CHUNK, most)
        while done < len(tokens):
            chunk = tokens[done : done + step]
            done += len(chunk)
            before = perf_counter()
            logits = self._run(chunk, [len(chunk) - 1] if done == len(tokens) else [])
            rate = len(chunk) / (perf_counter() - before)
            step = max(1, min(most, max(LEAST_CHUNK, int(rate * CHUNK_SECONDS) // LEAST_CHUNK * LEAST_CHUNK)))
            if progress is not None:
                progress(done, len(tokens))
        self.logits = logits[0]
        return self.logits

    def decode(self, token: int) -> Logits:
        """Run one token; logits behind it."""
        return self.prefill([token])

    def all_logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Run `tokens` and give the logits behind each of them, in parts [n, vocab] of at most `max_logits` rows."""
        self._check(tokens)
        step = min(self._program.options.max_rows, self._program.options.max_logits)
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            logits = self._run(chunk, range(len(chunk)))
            self.logits = logits[-1]
            yield logits

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length {length} outside the {len(self.tokens)} tokens of the session")
        if length < len(self.tokens):
            self._cache.trim(length)
            del self.tokens[length:]
            self.logits = None

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Forget what differs from `tokens`; how many of them need not be run.

        That is at most all but the last: its row has to run to give logits.
        """
        common = 0
        for ours, theirs in zip(self.tokens, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        self.trim(common)
        return common

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputError("there is nothing to run: the prompt is empty")
        if len(tokens) > self.left:
            behind = f" behind the {len(self.tokens)} already there" if self.tokens else ""
            raise InputError(
                f"the prompt has {len(tokens)} tokens{behind}, the context {self.context} positions; "
                "shorten the prompt or pass a larger context with -c"
            )
        wrong = next((t for t in tokens if not 0 <= t < self._vocab_size), None)
        if wrong is not None:
            raise InputError(f"token {wrong} is not in the vocabulary of {self._vocab_size} tokens")

    def _run(self, tokens: Sequence[int], wanted: Sequence[int]) -> Logits:
        """One run of the program; the cache grows only when it is done."""
        self._cache.reserve(len(tokens))
        slots = np.arange(len(self.tokens), len(self.tokens) + len(tokens), dtype=np.int32)
        rows = Rows(
            tokens=np.asarray(tokens, np.int32),
            positions=slots,
            slots=slots,
            sessions=np.zeros(len(tokens), np.int32),
            pages=[self._cache.pages],
            logits=np.asarray(wanted, np.int32),
        )
        with self._turn:
            # The next run, perhaps another session's, overwrites the program's own array.
            logits = self._program.run(rows).copy()
        self.tokens.extend(int(t) for t in tokens)
        self._cache.trim(len(self.tokens))
        return logits
