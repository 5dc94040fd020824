"""The decode loop's one step: run the last token of each text, draw the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import EdgeqError
from edgeq.runtime.sampling import Logprobs, Sampler, among, logprobs
from edgeq.runtime.session import BatchItem, Logits, Session, rows_in_turn, run_together
from edgeq.runtime.speculative.lookup import Lookup
from edgeq.targets.target import FindsLargest, Largest


@dataclass
class Stream:
    """A text being generated.  `tokens` is prompt and text; all but the last one are in the session's cache.

    top        how many of the most probable tokens `logprobs` has beside each drawn one; None: nothing is recorded
    logprobs   of the tokens of the text
    error      why a step with drafts gave it fewer tokens than the others: it cannot go on
    """

    session: Session
    sampler: Sampler
    tokens: list[int]
    lookup: Lookup = field(default_factory=Lookup)
    top: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    error: EdgeqError | None = None

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
        return self.sampler.needed if self.top is None else 0

    def draw(self, found: NDArray[np.float32] | Largest) -> None:
        """Draw the next token from logits float32 [vocab], or from the `needed` largest ones, and append it."""
        if isinstance(found, Largest):
            self.tokens.append(self.sampler.pick(among(found, 0, self.sampler.sampling)))
        else:
            self.take(self.sampler.draw(found, self.tokens), found)


DecodeStep = Callable[[Sequence[Stream], Sequence[int]], list[list[int]]]
"""The next tokens of each stream, at least one and at most what it has room for; they are in `Stream.tokens` on return.  Fewer,
perhaps none, where `Stream.error` is set."""


def run_streams(streams: Sequence[Stream], beside: Sequence[BatchItem] = ()) -> tuple[list[Logits], list[Logits]]:
    """Run the last token of each stream, and in the same run what other sessions bring.

    Gives the logits after each stream float32 [vocab], which nothing was drawn from yet, and those that each of `beside` wants
    [n, vocab].
    """
    for stream in streams:
        stream.prepare()
    found = run_together([*(BatchItem(stream.session, stream.tokens[-1:], [0]) for stream in streams), *beside])
    after = [logits[0] for logits in found[: len(streams)]]
    for stream, logits in zip(streams, after, strict=True):
        stream.session.logits = logits
    return after, found[len(streams) :]


def run_largest(items: Sequence[BatchItem], count: int) -> list[Largest] | None:
    """The `count` largest logits after each item, which wants those of its last token, from one run as that of `run_together`.

    None: nothing was run, as the target gives only all logits, or has no room for so many rows.
    """
    sessions = [item.session for item in items]
    # A Protocol would be asked for its members one by one, for every token.
    if not all(0 < count <= getattr(session._program, "most_largest", 0) for session in sessions):
        return None
    program = cast(FindsLargest, sessions[0]._program)
    if len(items) > program.largest_rows:
        return None
    for session in sessions:
        session.requantize()
    groups = dict[tuple[int, int], list[int]]()
    for index, session in enumerate(sessions):
        groups.setdefault((id(session._program), id(session.weights)), []).append(index)
    if len(groups) > 1:
        parts = dict[int, Largest]()
        for group in groups.values():
            parts |= zip(group, run_largest([items[index] for index in group], count) or (), strict=True)
        return [parts[index] for index in range(len(items))]
    with rows_in_turn(items) as rows:
        found = program.run_largest(rows, count, weights=items[0].session.weights)
        every = [Largest(found.ids[i : i + 1].copy(), found.values[i : i + 1].copy(), found.finite[i : i + 1].copy())
                 for i in range(len(items))]  # fmt: skip
    return every


def run_alone(streams: Sequence[Stream]) -> Sequence[Logits | Largest]:
    """Run the last token of each stream; what the next one is drawn from: the largest logits, where none needs more of them."""
    if all(stream.needed for stream in streams):
        items = [BatchItem(stream.session, stream.tokens[-1:], [0]) for stream in streams]
        found = run_largest(items, max(stream.needed for stream in streams))
        if found is not None:
            for stream in streams:
                stream.session.logits = None
            return found
    return run_streams(streams)[0]


def decode_step(streams: Sequence[Stream], room: Sequence[int]) -> list[list[int]]:
    """One token for each stream, from one run of the program: a DecodeStep without drafts (`Speculator.step` is one with)."""
    for stream, found in zip(streams, run_alone(streams), strict=True):
        stream.draw(found)
    return [stream.tokens[-1:] for stream in streams]
