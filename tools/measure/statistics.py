"""Percentiles, divergences, and confidence intervals of differences: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A value and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def exp(self) -> Interval:
        """The ratio of perplexities that a difference of log-likelihoods means."""
        return Interval(*(float(np.exp(x)) for x in (self.value, self.low, self.high)))


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, interpolated linearly between neighbours."""
    return float(np.percentile(np.asarray(values, np.float64), p))


def log_sum_exp(logits: NDArray[Any]) -> Array:
    """Natural log of the sum of exponentials, float64 [rows] of [rows, entries]."""
    largest = logits.max(1, keepdims=True)
    return np.asarray(np.log(np.exp(logits - largest, dtype=np.float64).sum(1)) + largest[:, 0])


def paired_difference(a: ArrayLike, b: ArrayLike, counts: ArrayLike, seed: int = 0) -> Interval:
    """Mean per token of a minus that of b, with its paired bootstrap interval over windows (Efron and Tibshirani 1993, ch. 13).

    a, b     sums over the tokens of each window, [windows]; of the same windows, so what a hard window adds to both cancels
    counts   tokens of each window
    """
    difference, tokens = np.asarray(a, np.float64) - np.asarray(b, np.float64), np.asarray(counts, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    means = difference[picks].sum(1) / tokens[picks].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(difference.sum() / tokens.sum()), float(low), float(high))
