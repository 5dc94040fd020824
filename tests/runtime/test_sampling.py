"""Each step of sampling, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.errors import FormatError, InputError
from edgeq.runtime import Sampling
from edgeq.runtime.sampling import Sampler, candidates, distribution

# Probabilities 0.4, 0.3, 0.2, 0.06, 0.04 at ids 2, 0, 4, 1, 3.
PROBABILITIES = np.array([0.3, 0.06, 0.4, 0.04, 0.2])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
ONE = {"temperature": 1.0}


def kept(**settings: float) -> dict[int, float]:
    p = distribution(LOGITS, Sampling(**{**ONE, **settings}))  # type: ignore[arg-type]
    assert p.dtype == np.float64 and p.sum() == pytest.approx(1, abs=1e-12)
    return {int(i): float(p[i]) for i in np.flatnonzero(p)}


def test_temperature_one_is_softmax() -> None:
    assert np.allclose(distribution(LOGITS, Sampling(**ONE)), PROBABILITIES, atol=1e-7)


def test_temperature_divides_logits() -> None:
    wanted = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert np.allclose(distribution(LOGITS, Sampling(temperature=0.5)), wanted, atol=1e-7)


def test_temperature_zero_takes_the_most_probable_and_of_equals_the_first() -> None:
    assert distribution(LOGITS, Sampling()).tolist() == [0, 0, 1, 0, 0]
    assert distribution(np.array([1, 3, 3], np.float32), Sampling()).tolist() == [0, 1, 0]


def test_a_tiny_temperature_does_not_overflow() -> None:
    p = distribution(np.array([1e4, -1e4, 0], np.float32), Sampling(temperature=1e-6))
    assert p.tolist() == [1, 0, 0]


@pytest.mark.parametrize(("k", "ids"), ((1, [2]), (2, [0, 2]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])))
def test_top_k_keeps_the_k_most_probable(k: int, ids: list[int]) -> None:
    p = kept(top_k=k)
    assert sorted(p) == ids
    total = PROBABILITIES[ids].sum()
    assert all(p[i] == pytest.approx(PROBABILITIES[i] / total, abs=1e-7) for i in ids)


def test_top_k_of_equals_keeps_exactly_k_the_first() -> None:
    p = distribution(np.array([0, 1, 1, 1], np.float32), Sampling(temperature=1.0, top_k=2))
    assert p.tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize(("p", "ids"), ((0.01, [2]), (0.39, [2]), (0.41, [0, 2]), (0.71, [0, 2, 4]), (0.999, [0, 1, 2, 3, 4])))
def test_top_p_keeps_the_smallest_set_with_that_mass(p: float, ids: list[int]) -> None:
    assert sorted(kept(top_p=p)) == ids


def test_top_p_is_the_same_as_sorting_everything() -> None:
    rng = np.random.default_rng(0)
    for p in (0.05, 0.5, 0.9, 0.99, 0.9999):
        logits = rng.normal(size=3000).astype(np.float32) * 3
        probabilities = np.exp(logits.astype(np.float64))
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities)
        count = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
        got = distribution(logits, Sampling(temperature=1.0, top_p=p))
        assert set(np.flatnonzero(got)) == set(order[:count])


def test_min_p_keeps_a_share_of_the_most_probable() -> None:
    assert sorted(kept(min_p=0.16)) == [0, 2, 4]  # 0.064 and more
    assert sorted(kept(min_p=0.14)) == [0, 1, 2, 4]  # 0.056 and more
    assert sorted(kept(min_p=1.0)) == [2]


def test_filters_run_in_order_top_k_then_top_p() -> None:
    # Of the two most probable, 4/7 and 3/7, the first alone has a mass of 0.5; of all five it has not.
    assert sorted(kept(top_k=2, top_p=0.5)) == [2]
    assert sorted(kept(top_p=0.5)) == [0, 2]


def test_the_penalty_makes_seen_tokens_less_probable_whatever_their_sign() -> None:
    logits = np.array([2, -2, 2, -2], np.float32)
    p = distribution(logits, Sampling(temperature=1.0, repeat_penalty=2.0), [0, 1, 1, 0, 0])
    wanted = np.exp([1.0, -4.0, 2.0, -2.0])
    assert np.allclose(p, wanted / wanted.sum())
    assert np.array_equal(logits, np.array([2, -2, 2, -2], np.float32))


def test_the_penalty_acts_on_greedy_too() -> None:
    assert distribution(np.array([3, 2.9], np.float32), Sampling(repeat_penalty=1.5), [0]).tolist() == [0, 1]


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.draw(LOGITS, []) for _ in range(64)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(None) != draws(None)


def test_draws_follow_the_inverse_of_the_cumulative_distribution() -> None:
    sampler = Sampler(Sampling(temperature=1.0, top_k=5, seed=11))
    numbers = np.random.Generator(np.random.PCG64(11)).random(200)
    order = [2, 0, 4, 1, 3]
    limits = np.cumsum(PROBABILITIES[order])
    assert [sampler.draw(LOGITS, []) for _ in numbers] == [order[int(np.argmax(limits > u))] for u in numbers]


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(FormatError, match="verify"):
        distribution(np.array([0, bad], np.float32), Sampling())


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("temperature", 1e-310),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", 1e-310),
        ("repeat_penalty", 11.0),
        ("seed", -1),
        ("seed", 1 << 64),
    ),
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InputError, match=name):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_the_k_largest_of_a_large_vocabulary_are_found_with_all_their_equals() -> None:
    random = np.random.default_rng(3)
    for size, k in ((5000, 1), (5000, 77), (5000, 78), (4999, 40), (200, 3), (63, 62)):
        for logits in (random.standard_normal(size), random.integers(0, 9, size), np.sort(random.standard_normal(size))):
            scores = logits.astype(np.float32)
            order = np.argsort(-scores.astype(np.float64), kind="stable")[:k]
            tokens, _ = candidates(scores, Sampling(temperature=1.0, top_k=k), ())
            assert np.array_equal(tokens, order)
