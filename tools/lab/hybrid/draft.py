"""What a draft costs, by the tokens that it can be, and what drafts gain by how many of them hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgeq.runtime import Model
from edgeq.runtime.decode import PlainStepper, Stepper, Stream
from edgeq.runtime.sampling import Candidates, Sampler, Sampling, certain
from edgeq.runtime.session.runs import BatchItem, run_drafting
from edgeq.tools.cli.terminal import Report
from edgeq.tools.lab.hybrid.shapes import random_file, shape

PROMPT = 64
"""Tokens before those that are timed."""


@dataclass(frozen=True)
class DraftCost:
    """drafted   tokens that a draft can be
    step_ms, draft_ms   the least times of a token and of a draft in all turns, as what else runs on a machine only adds to
                        them;  share: their ratio
    """

    drafted: int
    step_ms: float
    draft_ms: float
    share: float


def costs(name: str, layers: int, heads: Sequence[int], threads: int, rounds: int, report: Report) -> list[DraftCost]:
    """A token and a draft of every file in turn; `heads`: tokens that are drafted, from the first id on."""
    configs = [shape(name, layers, (0, head)) for head in heads]
    tokens = np.random.default_rng(0).integers(0, configs[0].vocab_size, PROMPT).tolist()
    with ExitStack() as stack:
        paths = [stack.enter_context(random_file(config)) for config in configs]
        models = [
            stack.enter_context(Model.load(path, mode="a8", threads=threads, context=256, draft_layer=True)) for path in paths
        ]
        sessions = [model.session() for model in models]
        for session in sessions:
            session.prefill(tokens)
        taken: list[list[tuple[float, float]]] = [[] for _ in heads]
        for turn in range(rounds + 1):
            report(turn, rounds + 1, "drafts")
            for session, times in zip(sessions, taken, strict=True):
                began = perf_counter()
                session.decode(tokens[turn % PROMPT])
                stepped = perf_counter()
                run_drafting([BatchItem(session, [tokens[-1]], [0])])
                ended = perf_counter()
                session.rewind(PROMPT)
                # The first run reads pages of the file and touches buffers for the first time.
                if turn:
                    times.append((stepped - began, ended - stepped))
    least = [[1000 * min(each) for each in zip(*times, strict=True)] for times in taken]
    return [DraftCost(head, step, drafted, drafted / step) for head, (step, drafted) in zip(heads, least, strict=True)]


class Planted(Sampler):
    """Draws the tokens of a given text, and of drafts a share of right ones, at the cost of a greedy sampler."""

    def __init__(self, prompt: int, text: Sequence[int], share: float, vocab_size: int) -> None:
        super().__init__(Sampling())
        self._prompt, self._text, self._share, self._vocab_size = prompt, text, share, vocab_size
        self._random, self.stream_tokens = np.random.default_rng(0), list[int]()

    def candidates(self, logits: NDArray[np.float32], history: Sequence[int]) -> Candidates:
        super().candidates(logits, history)
        # A draft goes on from a list of its own.
        right = self._text[len(history) - self._prompt] if len(history) - self._prompt < len(self._text) else 0
        if history is self.stream_tokens or self._random.random() < self._share:
            return certain(right)
        return certain((right + 1) % self._vocab_size)


@dataclass(frozen=True)
class Gain:
    """share   of right drafts; None: no drafts.  accepted: of those that were made
    speedup  median of the ratios to no drafts, turn by turn
    """

    share: float | None
    tokens_per_s: float
    speedup: float
    tokens_per_cycle: float
    accepted: float | None


def gains(
    name: str, layers: int, drafted: int, shares: Sequence[float], *, gamma: int | None, threads: int, tokens: int, rounds: int,
    report: Report,
) -> list[Gain]:  # fmt: skip
    """A text of `tokens` tokens without drafts and with such as hold by so many, in turn."""
    config = shape(name, layers, (0, drafted))
    random = np.random.default_rng(1)
    prompt, text = (random.integers(0, config.vocab_size, n).tolist() for n in (PROMPT, tokens))
    cells: list[float | None] = [None, *shares]
    seconds: list[list[float]] = [[] for _ in cells]
    with random_file(config) as path, Model.load(path, mode="a8", threads=threads, context=1024, draft_layer=True) as model:
        # What a draft costs and how many hold is learned over the first texts.
        speculators = [None if share is None else model.speculator("mtp", gamma) for share in cells]
        for turn in range(rounds + 1):
            for index, share in enumerate(cells):
                report(turn * len(cells) + index, (rounds + 1) * len(cells), "texts")
                sampler = Planted(PROMPT, text, share or 0.0, config.vocab_size)
                stream = Stream(model.session(), sampler, list(prompt))
                sampler.stream_tokens = stream.tokens
                stepper: Stepper = speculators[index] or PlainStepper()
                stream.session.prefill(prompt)
                stream.tokens.append(text[0])
                began = perf_counter()
                while len(stream.tokens) < PROMPT + tokens:
                    stepper.step([stream], [PROMPT + tokens - len(stream.tokens)])
                if turn:
                    seconds[index].append(perf_counter() - began)
                assert stream.tokens[PROMPT:] == text
                stream.session.close()
    plain = seconds[0]
    found = []
    for share, times, speculator in zip(cells, seconds, speculators, strict=True):
        counted = speculator.statistics if speculator else None
        found.append(
            Gain(
                share,
                (tokens - 1) / statistics.median(times),
                statistics.median(a / b for a, b in zip(plain, times, strict=True)),
                counted.tokens_per_cycle if counted else 1.0,
                counted.acceptance if counted else None,
            )
        )
    return found
