"""Where drafts come from: the text so far, or the same weights in a cheaper mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeq.records import Mode
from edgeq.runtime.sampling import Candidates, Sampler, certain
from edgeq.runtime.session import Part, Session, run_together

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
        """`count` tokens behind `tokens`, which has only grown since the last call; none if nothing matches."""
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


@dataclass
class Stream:
    """A text being generated.  `tokens` is prompt and text; all but the last one lie in the session's cache."""

    session: Session
    sampler: Sampler
    tokens: list[int]
    lookup: Lookup = field(default_factory=Lookup)


@dataclass
class Draft:
    """Tokens that may come next, each with the distribution it was drawn from."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)


def looked_up(stream: Stream, count: int) -> Draft:
    """A draft from the text itself."""
    tokens = stream.lookup.propose(stream.tokens, count)
    return Draft(tokens, [certain(token) for token in tokens])


def drafted(streams: Sequence[Stream], counts: Sequence[int], mode: Mode) -> list[Draft]:
    """Drafts of `counts` tokens, drawn one after another in `mode`; all streams advance together.

    Their keys and values go where the exact ones will (QSpec, arXiv 2410.11305, section 3); the caches are as before on return.
    """
    drafts = [Draft() for _ in streams]
    lengths = [len(stream.session.tokens) for stream in streams]
    try:
        for step in range(max(counts)):
            active = [i for i, count in enumerate(counts) if step < count]
            parts = [Part(streams[i].session, [(drafts[i].tokens or streams[i].tokens)[-1]], [0]) for i in active]
            for i, logits in zip(active, run_together(parts, mode), strict=True):
                stream, draft = streams[i], drafts[i]
                draft.candidates.append(stream.sampler.candidates(logits[0], stream.tokens + draft.tokens))
                draft.tokens.append(stream.sampler.pick(draft.candidates[-1]))
    finally:
        # An interrupt must not leave keys and values of the cheap mode behind, which a later prompt would find and keep.
        for stream, length in zip(streams, lengths, strict=True):
            stream.session.trim(length)
    return drafts
