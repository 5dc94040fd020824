"""The tests of a profile, run one at a time: a prompt, tokens one by one, a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from edgeq.errors import InputError
from edgeq.runtime import Model, Prompt, Sampling
from edgeq.runtime.sampling import Sampler
from edgeq.runtime.session.context_size import cache_bytes
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.runtime.session.session import Session
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.tools.commands.bench import Test, random_tokens
from edgeq.tools.measure import picture_bench
from edgeq.tools.measure.drafting import PROMPT
from edgeq.tools.profile.findings import CODE
from edgeq.tools.profile.tape import WITH_DRAFTS, ProgramRun, Tapes
from edgeq.tools.quality import corpus

Size = tuple[int, int]
Around = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Setting:
    """What is chosen when a model is loaded; 0 threads: the target chooses; mode None: the file's."""

    threads: int
    mode: str | None
    kv: str


@dataclass(frozen=True)
class PictureTest:
    """A picture of so many pixels, then the first token."""

    size: Size

    kind: Literal["image"] = "image"
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        return f"image {self.size[0]}x{self.size[1]}"


@dataclass(frozen=True)
class Continuation:
    """`count` tokens that follow held-out code, greedily, with drafts or without: random tokens have nothing to draft."""

    count: int
    draft: DraftSource
    gamma: int | None = None
    kind: Literal["tg"] = "tg"
    depth: int = PROMPT
    batch: int = 1

    @property
    def name(self) -> str:
        drafts = "" if self.draft == "off" else f", draft {self.draft}" + (f" {self.gamma}" if self.gamma else "")
        return f"{self.kind}{self.count}{CODE}{drafts} @ d{self.depth}"


AnyTest = Test | PictureTest | Continuation


@dataclass(frozen=True)
class RunSample:
    """One run of a test; times in seconds, `started` by the clock of Python.

    steps    tg: of every token: the run, and drawing the next token greedily
    ttft     of a prompt or a picture: until the first token is drawn
    draws    when a token was begun to be drawn, and how long that took; of a continuation that is not told
    tokens   that were run
    tokens_per_run   of a continuation: what a run of the exact mode gave
    """

    started: float
    seconds: float
    tokens: int
    steps: list[float] = field(default_factory=list)
    ttft: float | None = None
    draws: list[tuple[float, float]] = field(default_factory=list)
    calls: list[ProgramRun] = field(default_factory=list)
    tokens_per_run: float | None = None

    def pieces(self) -> list[RunSample]:
        """The tokens of a tg as samples of their own; anything else is one piece, and so is a continuation, of which several
        tokens can come of one run."""
        if not self.draws or not self.steps:
            return [self]
        found, started, begun = list[RunSample](), self.started, 0
        for seconds, draw in zip(self.steps, self.draws, strict=True):
            ended, first = started + seconds, begun
            while begun < len(self.calls) and self.calls[begun].run.began < ended:
                begun += 1
            own = self.calls[first:begun]
            found.append(RunSample(started, seconds, 1, [seconds], None, [draw], own))
            started = ended
        return found


class Combination:
    """A model loaded in one way, with the sessions that its tests go on from.

    compile_s   seconds of loading in which kernels were compiled;  load_s: the rest of it
    """

    def __init__(self, setting: Setting, model: Model, compile_s: float, load_s: float, images: bool) -> None:
        self.setting, self.model, self.compile_s, self.load_s = setting, model, compile_s, load_s
        self.tapes = Tapes(model, images)
        self._sampler = Sampler(Sampling())
        self._kept: dict[tuple[int, int], list[Session]] = {}
        self._pictures: dict[Size, Prompt] = {}
        self._code: tuple[Session, list[int]] | None = None

    def run(self, test: AnyTest, count: int, record: bool, around: Around = nullcontext) -> RunSample:
        """`count` tokens of a test; `record`: with the time of every operation.

        around   entered right before what is timed and left right after: the tokens of `depth` are not in it

        InputError: a picture that the model does not take.
        """
        phase = "decode" if test.kind == "tg" else "prefill"
        if isinstance(test, PictureTest):
            prompt = self._picture(test.size)
            with self.model.session() as session, self.tapes.recording(phase, record):
                return self._prefill(session, prompt, len(prompt.tokens), around)
        if isinstance(test, Continuation):
            return self._continue(test, record, around)
        tokens = random_tokens(self.model, test.depth + count)[test.depth :]
        sessions = self._sessions(test)
        with self.tapes.recording(phase, record):
            if test.kind == "tg":
                return self._decode(sessions, tokens, around)
            return self._prefill(sessions[0], tokens, count, around)

    def _prefill(self, session: Session, prompt: Prompt | Sequence[int], count: int, around: Around) -> RunSample:
        with around():
            started = perf_counter()
            logits = session.prefill(prompt)
            ended = perf_counter()
            self._sampler.draw(logits, session.tokens)
            drawn = perf_counter()
        calls = self.tapes.calls()
        return RunSample(started, ended - started, count, [], drawn - started, [(ended, drawn - ended)], calls)

    def _decode(self, sessions: list[Session], tokens: Sequence[int], around: Around) -> RunSample:
        steps, draws = list[float](), list[tuple[float, float]]()
        with around():
            started = last = perf_counter()
            for token in tokens:
                logits = run_together([BatchItem(session, [token], [0]) for session in sessions])
                ran = perf_counter()
                for session, scores in zip(sessions, logits, strict=True):
                    self._sampler.draw(scores[0], session.tokens)
                now = perf_counter()
                draws.append((ran, now - ran))
                steps.append(now - last)
                last = now
        return RunSample(started, last - started, len(tokens), steps, None, draws, self.tapes.calls())

    def _continue(self, test: Continuation, record: bool, around: Around) -> RunSample:
        """InputError: the code has too few tokens in this model's tokenizer."""
        if self._code is None:
            self._code = self.model.session(), self.model.text.encode("".join(corpus.evaluation_code()))[: test.depth]
        session, prompt = self._code
        if len(prompt) < test.depth:
            raise InputError(f"the code that is continued has {len(prompt)} tokens of {test.depth}; leave out --draft")
        # The first token comes of the prompt: its run, and what the code before it took, are not measured.
        settings: dict[str, Any] = {"draft": test.draft, "gamma": test.gamma, "sampling": Sampling(), "ignore_eos": True}
        generation = self.model.generate(prompt, session=session, max_tokens=test.count + 1, **settings)
        pieces = generation.pieces()
        next(pieces)
        with self.tapes.recording("decode" if test.draft == "off" else WITH_DRAFTS, record):
            with around():
                started = perf_counter()
                for _ in pieces:
                    pass
                seconds = perf_counter() - started
            calls = self.tapes.calls()
        cost = generation.measurement
        each = None if test.draft == "off" else cost.speculation.tokens_per_cycle
        steps = cost.token_s[: cost.generated_tokens - 1]
        return RunSample(started, seconds, len(steps), steps, calls=calls, tokens_per_run=each)

    def _sessions(self, test: Test) -> list[Session]:
        """One for each text of a test, with its `depth` tokens."""
        key = test.depth, test.batch
        # Weights that were requantized for a text are not given back by trim.
        kept = None if self.model.requantization else self._kept.get(key)
        if kept is None:
            kept = [self.model.session() for _ in range(test.batch)]
            for session in kept if test.depth else ():
                session.prefill(random_tokens(self.model, test.depth))
                session.requantize()
            self._kept[key] = kept
        for session in kept:
            if (left := session.rewind(test.depth)) < test.depth:
                session.prefill(random_tokens(self.model, test.depth)[left:])
        return kept

    def _picture(self, size: Size) -> Prompt:
        if size not in self._pictures:
            self._pictures[size] = picture_bench.prompt_of(self.model, picture_bench.drawn(self.model, size))
        return self._pictures[size]

    def cache_bytes(self) -> int:
        """Bytes of keys and values in the sessions that are kept."""
        lengths = [len(session.tokens) for sessions in self._kept.values() for session in sessions]
        return sum(cache_bytes(self.model.graph, self.model.program.options, length) for length in lengths)
