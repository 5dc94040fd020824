"""The decode loop's one step: run the last token of each text, draw the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeq.runtime.sampling import Logprobs, Sampler, logprobs
from edgeq.runtime.session import BatchItem, Session, run_together
from edgeq.runtime.speculative.lookup import Lookup


@dataclass
class Stream:
    """A text being generated.  `tokens` is prompt and text; all but the last one are in the session's cache.

    top        how many of the most probable tokens `logprobs` has beside each drawn one; None: nothing is recorded
    logprobs   of the tokens of the text
    """

    session: Session
    sampler: Sampler
    tokens: list[int]
    lookup: Lookup = field(default_factory=Lookup)
    top: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)

    def take(self, token: int, logits: NDArray[np.float32]) -> None:
        """Append a token that was drawn from `logits` float32 [vocab]."""
        self.tokens.append(token)
        if self.top is not None:
            self.logprobs.append(logprobs(logits, token, self.top))

    def draw(self, logits: NDArray[np.float32]) -> None:
        """Draw the next token and append it."""
        self.take(self.sampler.draw(logits, self.tokens), logits)


DecodeStep = Callable[[Sequence[Stream], Sequence[int]], list[list[int]]]
"""The next tokens of each stream, at least one and at most what it has room for; they are in `Stream.tokens` on return."""


def decode_step(streams: Sequence[Stream], room: Sequence[int]) -> list[list[int]]:
    """One token for each stream, from one run of the program: a DecodeStep without drafts (`Speculator.step` is one with)."""
    logits = run_together([BatchItem(stream.session, stream.tokens[-1:], [0]) for stream in streams])
    for stream, (after,) in zip(streams, logits, strict=True):
        stream.session.logits = after
        stream.draw(after)
    return [stream.tokens[-1:] for stream in streams]
