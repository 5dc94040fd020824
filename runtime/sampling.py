"""From logits to the next token: repetition penalty, temperature, top-k, top-p, min-p, draw; in this order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import FormatError, InputError

ArrayF64 = NDArray[np.float64]
RUN = 64
"""Scores of which only the largest is looked at first."""
Candidates = tuple[NDArray[np.int64], ArrayF64]
"""Tokens and their probabilities, which sum to 1."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.  InputError if a value is out of range.

    temperature      0: always the most probable token (greedy)
    top_k            keep the k most probable tokens; 0: all
    top_p            keep the smallest set of most probable tokens with this mass (Holtzman et al. 2019, arXiv 1904.09751)
    min_p            keep tokens at least this share as probable as the most probable one (Nguyen et al. 2024, arXiv 2407.01082)
    repeat_penalty   of tokens in the history (CTRL, Keskar et al. 2019, arXiv 1909.05858); 1: none
    seed             same seed, same tokens; None: a new one each time
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        t = self.temperature
        checks = (
            ("temperature", t, t == 0 or 1e-6 <= t <= 100, "0 (greedy) or 1e-6 to 100"),
            ("top_k", self.top_k, isinstance(self.top_k, int) and self.top_k >= 0, "0 (all) or a positive integer"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("repeat_penalty", self.repeat_penalty, 0.1 <= self.repeat_penalty <= 10, "0.1 to 10 (1: none)"),
            ("seed", self.seed, self.seed is None or 0 <= self.seed < 1 << 64, "0 to 2**64 - 1"),
        )
        for name, value, good, expected in checks:
            if not good:
                raise InputError(f"{name} is {value}; expected {expected}")


def candidates(logits: NDArray[np.float32], sampling: Sampling, history: Sequence[int]) -> Candidates:
    """Tokens that may be drawn.

    After top_k or top_p the most probable comes first, equals in order of their ids; else all are in order of their ids.

    FormatError: logits that are not finite, which sound weights do not give.
    """
    # Not a number passes through both.
    if not (math.isfinite(logits.max()) and math.isfinite(logits.min())):
        raise FormatError("the model gives logits that are not finite; check its file with: edgeq inspect --verify")
    if sampling.temperature == 0 and sampling.repeat_penalty == 1.0:
        return np.array([np.argmax(logits)], np.int64), np.ones(1)
    scores = logits.astype(np.float64)
    if sampling.repeat_penalty != 1.0 and len(history):
        seen, penalty = np.unique(np.asarray(history, np.int64)), sampling.repeat_penalty
        # Dividing a negative score would make its token more probable.
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if sampling.temperature == 0:
        return np.array([np.argmax(scores)], np.int64), np.ones(1)
    # The maximum is taken away first, so that a tiny temperature does not overflow.  In place, here and below: with 128,000
    # tokens the system takes longer to give a new array than the sums take.
    scores -= scores.max()
    scores /= sampling.temperature
    if 0 < sampling.top_k < len(scores):
        tokens = np.flatnonzero(scores >= _largest(scores, sampling.top_k))
        scores = scores[tokens]
    else:
        tokens = np.arange(len(scores))
    probabilities = _softmax(scores)
    if sampling.top_p < 1:
        # Tokens below (1 - top_p) / n weigh less than 1 - top_p together, so the set lies among the others: sort only those.
        # Half of it keeps the argument true when sums are rounded.
        likely = np.flatnonzero(probabilities >= (1 - sampling.top_p) / (2 * len(probabilities)))
        tokens, probabilities = tokens[likely], probabilities[likely]
    if sampling.top_k or sampling.top_p < 1:
        order = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
        tokens, probabilities = tokens[order], probabilities[order]
    if sampling.top_k:
        probabilities = probabilities / probabilities.sum()
    if sampling.top_p < 1:
        count = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p)) + 1
        tokens, probabilities = tokens[:count], probabilities[:count]
    if sampling.min_p > 0:
        likely = probabilities >= sampling.min_p * probabilities.max()
        tokens, probabilities = tokens[likely], probabilities[likely]
    probabilities /= probabilities.sum()
    return tokens, probabilities


def distribution(logits: NDArray[np.float32], sampling: Sampling, history: Sequence[int] = ()) -> ArrayF64:
    """Probability of each next token, float64 [vocab]; greedy gives all to one.  `history`: prompt and generated tokens."""
    tokens, probabilities = candidates(logits, sampling, history)
    result = np.zeros(len(logits))
    result[tokens] = probabilities
    return result


def certain(token: int) -> Candidates:
    """One token with probability 1."""
    return np.array([token], np.int64), np.ones(1)


class Sampler:
    """Draws one token after another from one seeded generator (PCG64)."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def candidates(self, logits: NDArray[np.float32], history: Sequence[int]) -> Candidates:
        return candidates(logits, self.sampling, history)

    def uniform(self) -> float:
        """From 0 to, and without, 1."""
        return float(self._random.random())

    def pick(self, among: Candidates) -> int:
        """One of the candidates, by their probabilities."""
        tokens, probabilities = among
        at = int(np.searchsorted(np.cumsum(probabilities), self.uniform(), side="right"))
        return int(tokens[min(at, len(tokens) - 1)])

    def draw(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """The next token, from logits float32 [vocab] and all tokens before it."""
        return self.pick(self.candidates(logits, history))


def _largest(scores: ArrayF64, k: int) -> float:
    """The k-th largest."""
    runs = len(scores) // RUN
    if runs > k:
        # At least k scores reach the k-th largest of the runs' maxima, so the k largest are among those that do.
        maxima = scores[: runs * RUN].reshape(RUN, runs).max(axis=0)
        scores = scores[scores >= np.partition(maxima, -k)[-k]]
    return float(np.partition(scores, -k)[-k])


def _softmax(scores: ArrayF64) -> ArrayF64:
    """Probabilities, in place of `scores`."""
    scores -= scores.max()
    np.exp(scores, out=scores)
    total = float(scores.sum())
    assert math.isfinite(total)
    scores /= total
    return scores
