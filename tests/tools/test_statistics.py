"""The numbers behind compare and bench, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgeq.tools.measure.statistics import Interval, log_sum_exp, paired_difference, percentile


def test_log_sum_exp_of_huge_logits() -> None:
    logits = np.array([[1e4, 1e4 - 1, -1e4], [0.0, 0.0, 0.0]], np.float32)
    np.testing.assert_allclose(log_sum_exp(logits), [1e4 + math.log1p(math.exp(-1)), math.log(3)], rtol=1e-12)


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5 and percentile([7.0], 95) == 7


def test_a_constant_difference_has_no_spread() -> None:
    counts = np.array([10, 20, 30])
    b = np.array([11.0, 25.0, 28.0])
    interval = paired_difference(b + 0.5 * counts, b, counts)
    assert interval.value == pytest.approx(0.5) and interval.low == pytest.approx(0.5) and interval.high == pytest.approx(0.5)


def test_the_interval_is_that_of_the_mean_and_the_same_every_time() -> None:
    random = np.random.default_rng(1)
    counts = np.full(400, 50.0)
    noise = random.normal(0.1, 1.0, 400) * 50
    shared = random.normal(0, 1000, 400)  # what makes a window hard cancels in the pair
    interval = paired_difference(shared + noise, shared, counts)
    deviation = float(np.std(noise / 50) / 20)
    assert interval == paired_difference(shared + noise, shared, counts)
    assert interval.value == pytest.approx(float(noise.mean() / 50))
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * deviation, rel=0.1)
    assert interval.low < interval.value < interval.high


def test_a_ratio_of_perplexities_is_the_exponential() -> None:
    assert Interval(0.0, math.log(0.5), math.log(2)).exp() == Interval(1.0, pytest.approx(0.5), pytest.approx(2.0))
