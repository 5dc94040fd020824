"""Prompt lookup: drafts from the text so far."""

from __future__ import annotations

from collections.abc import Sequence

MATCHES = (4, 3, 2)
"""Tokens of the end of the text that are looked for; a longer match says more."""


class Lookup:
    """Prompt lookup (Saxena 2023): what followed the last time that the text ended like this.

    The index holds where each n-gram last ended; every token is added once.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._done = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens to follow `tokens`, which has only grown since the last call; none if nothing matches."""
        # N-grams that end at the last token are what is looked for; they are added when something follows.
        for end in range(self._done + 1, len(tokens)):
            for n in MATCHES:
                if n <= end:
                    self._ends[tuple(tokens[end - n : end])] = end
        self._done = max(self._done, len(tokens) - 1)
        for n in MATCHES:
            start = self._ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                found = list(tokens[start : start + count])
                # Where what followed is the end of the text itself, the text repeats, and is taken to go on doing so.
                period = len(tokens) - start
                return [found[i % period] for i in range(count)]
        return []
