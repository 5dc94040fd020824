"""A text that is generated, and one step of all that are: run the last token of each, draw the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import EdgeqError
from edgeq.runtime.sampling import Logprobs, Sampler, logprobs
from edgeq.runtime.session.runs import BatchItem, Logits, run_largest, run_together
from edgeq.runtime.session.session import Session
from edgeq.runtime.speculative.lookup import Lookup
from edgeq.runtime.stats import Speculation
from edgeq.targets.capabilities import Largest


@dataclass
class Stream:
    """A text being generated.  `tokens` is prompt and text; all but the last one are in the session's cache.

    top        how many of the most probable tokens `logprobs` has beside each drawn one; None: nothing is recorded
    logprobs   of the tokens of the text
    error      why a step gave it fewer tokens than the others: it cannot go on
    keeps      the session is its caller's, and stays open when the text ends
    """

    session: Session
    sampler: Sampler
    tokens: list[int]
    lookup: Lookup = field(default_factory=Lookup)
    top: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    error: EdgeqError | None = None
    keeps: bool = False

    def close(self) -> None:
        """The text has ended, or has to make room: so does its session, but for one that is kept."""
        if not self.keeps:
            self.session.close()

    def prepare(self) -> None:
        """The model is about to run its last token: begin with what the grammar says of the next one."""
        if self.sampler.rules.matcher:
            self.sampler.rules.matcher.prepare(self.tokens)

    def take(self, token: int, logits: NDArray[np.float32]) -> None:
        """Append a token that was drawn from `logits` float32 [vocab]."""
        self.tokens.append(token)
        if self.top is not None:
            self.logprobs.append(logprobs(logits, token, self.top))

    @property
    def needed(self) -> int:
        """The largest logits that the next draw needs; 0: all."""
        return self.sampler.needed(self.tokens) if self.top is None else 0

    def draw(self, logits: NDArray[np.float32] | Largest) -> None:
        """Draw the next token from logits float32 [vocab], or from the `needed` largest ones, and append it."""
        if isinstance(logits, Largest):
            self.tokens.append(self.sampler.draw_among(logits, 0))
        else:
            self.take(self.sampler.draw(logits, self.tokens), logits)


class Stepper(Protocol):
    """Decodes streams of one model together.

    statistics   of its drafts
    """

    statistics: Speculation

    def step(self, streams: Sequence[Stream], room: Sequence[int]) -> list[list[int]]:
        """The next tokens of each stream, at least one and at most `room`; they are in `Stream.tokens` on return.

        All but the last of a stream's tokens are in its cache before and after.  A text that cannot go on has its reason in
        `Stream.error` and fewer tokens, perhaps none; the others have theirs.
        """
        ...


class PlainStepper:
    """One token for each stream, from one run of the program: a Stepper without drafts."""

    def __init__(self) -> None:
        self.statistics = Speculation()

    def step(self, streams: Sequence[Stream], room: Sequence[int]) -> list[list[int]]:
        found = list[list[int]]()
        for stream, after in zip(streams, run_streams(streams, ahead=min(room) > 1)[0], strict=True):
            start = len(stream.tokens)
            try:
                stream.draw(after)
            except EdgeqError as error:
                stream.error = error
            found.append(stream.tokens[start:])
        return found


def run_streams(
    streams: Sequence[Stream], beside: Sequence[BatchItem] = (), ahead: bool = False
) -> tuple[Sequence[Logits | Largest], list[Logits]]:
    """Run the last token of each stream, and in the same run what other sessions bring.

    ahead   each stream is likely to take another token after the one that is drawn now

    Gives what the next token of each stream is drawn from, which nothing was yet: logits float32 [vocab], or the largest ones
    where nothing runs beside and no stream needs more of them; and the logits that each of `beside` wants [n, vocab].
    """
    items = [BatchItem(stream.session, stream.tokens[-1:], [0]) for stream in streams]
    counts = [] if beside else [stream.needed for stream in streams]
    if counts and all(counts):
        # Of several texts one that ends would waste the run of all.
        draws = [stream.sampler.coming() for stream in streams] if ahead and len(streams) == 1 else []
        largest = run_largest(items, max(counts), draws)
        if largest is not None:
            for stream in streams:
                stream.session.logits = None
            return largest, []
    for stream in streams:
        stream.prepare()
    found = run_together([*items, *beside])
    after = [logits[0] for logits in found[: len(streams)]]
    for stream, logits in zip(streams, after, strict=True):
        stream.session.logits = logits
    return after, found[len(streams) :]
