"""What a scheduler is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import EdgeqError
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.call_reader import CallReader
from edgeq.runtime.answers.stopping import Ending, FinishReason, Piece
from edgeq.runtime.batching.prefix_tree import Node
from edgeq.runtime.decode import Stream
from edgeq.runtime.model import Model
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Logprobs, Sampling
from edgeq.runtime.session.runs import Chunks, Logits
from edgeq.runtime.session.session import Session
from edgeq.text.tokenizer import Tokenizer


class Busy(EdgeqError):
    """The queue is full: ask again later."""


@dataclass(frozen=True)
class Job:
    """Texts that go on from one prompt.

    request   what is wanted, checked; its sampling is not used
    n         how many texts, each with a seed of its own that follows from that of `sampling`
    client    whose turn it is: clients get seats one after another
    owner     whose cache pages may be shared: those of others are never looked at
    model     instead of the scheduler's: one that was made of it by Model.with_adapter
    """

    prompt: Prompt
    request: Request
    sampling: Sampling
    n: int = 1
    client: str = ""
    owner: str = ""
    model: Model | None = None

    @property
    def tree(self) -> str:
        """Which prefix tree its pages belong to: keys and values of another model are others."""
        return f"{self.owner}\0{self.model.file.identity}" if self.model else self.owner

    def reader(self, text: Tokenizer, sample: int) -> CallReader | None:
        """For one of its texts; None: it calls no tools."""
        return self.request.reader(text, self.prompt.tokens, self.sampling, sample)


@dataclass
class ReadPrompt:
    """A prompt that has been read, for texts of the same job that have no seat yet; logits float32 [vocab] after it."""

    session: Session
    logits: Logits
    path: list[Node]


@dataclass(eq=False)
class Ticket:
    """A job in the scheduler.

    arrived, begun, first   when it came, had its first seat, gave its first token (perf_counter)
    cached_tokens           of the prompt that were found in the prefix tree
    preemptions             how often one of its texts had to make room
    """

    job: Job
    arrived: float = field(default_factory=perf_counter)
    begun: float | None = None
    first: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    unbegun: int = 0
    parked: ReadPrompt | None = None
    reading: bool = False

    def __post_init__(self) -> None:
        self.unbegun = self.job.n

    def texts(self) -> Iterator[RunningText]:
        return (RunningText(self, sample) for sample in range(self.job.n))


@dataclass(eq=False)
class RunningText:
    """One text of a job.

    number       texts are older the smaller it is
    stream       from its first seat on;  chunks: what is left to read, None while it is decoded
    fetching     pages of its prompt may be on the disk: nothing is read before these have been taken
    path         nodes of the prefix tree that it holds
    error        what ended it instead of a reason
    """

    ticket: Ticket
    sample: int
    number: int = 0
    stream: Stream | None = None
    ending: Ending | None = None
    chunks: Chunks | None = None
    fetching: bool = False
    path: list[Node] = field(default_factory=list)
    preemptions: int = 0
    error: EdgeqError | None = None

    @property
    def running(self) -> Stream:
        assert self.stream is not None
        return self.stream

    @property
    def drawn(self) -> bool:
        """Whether it has tokens of its own."""
        return self.stream is not None and len(self.stream.tokens) > len(self.ticket.job.prompt.tokens)

    @property
    def unread(self) -> Prompt:
        """What a session reads before the text goes on: all but the last token, once there is one that was drawn."""
        prompt = self.ticket.job.prompt
        if not self.drawn:
            return prompt
        tokens = self.running.tokens[:-1]
        return replace(prompt, tokens=tokens, drawn=len(tokens) - len(prompt.tokens))

    @property
    def reason(self) -> FinishReason | None:
        return self.ending.reason if self.ending else None

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None


@dataclass
class Update:
    """What a step gave for one text.

    pieces     its new tokens with the text that they made complete;  logprobs: theirs, where they were asked for
    vector     of a text that is embedded, float32 [hidden], pooled and not normalized
    reason     why it has ended;  error: what ended it instead
    """

    ticket: Ticket
    sample: int
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    vector: NDArray[np.float32] | None = None
    reason: FinishReason | None = None
    error: EdgeqError | None = None
