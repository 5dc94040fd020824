"""Each step of sampling, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.errors import FormatError, InputError
from edgeq.runtime import Sampling
from edgeq.runtime.sampling import Rules, Sampler, candidates, distribution, logprobs
from edgeq.targets.capabilities import Draw

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


def softmax(scores: list[float]) -> np.ndarray:
    values = np.exp(np.array(scores))
    return np.asarray(values / values.sum())


def test_presence_and_frequency_count_the_text_and_not_the_prompt() -> None:
    logits, history = np.array([1, 1, 1, 1], np.float32), [0, 0, 1, 1, 1, 2]
    for sampling, wanted in (
        (Sampling(temperature=1.0, presence_penalty=0.5), [1, 0.5, 0.5, 1]),
        (Sampling(temperature=1.0, frequency_penalty=0.5), [1, -0.5, 0.5, 1]),
        (Sampling(temperature=1.0, presence_penalty=-1.0, frequency_penalty=0.25), [1, 1.25, 1.75, 1]),
    ):
        assert np.allclose(distribution(logits, sampling, history, Rules(start=2)), softmax(wanted))
        assert np.allclose(distribution(logits, sampling, history[:2], Rules(start=2)), 0.25)


def test_a_bias_is_added_to_the_logit_and_acts_on_greedy_too() -> None:
    logits = np.array([1, 2, 3], np.float32)
    biased = Sampling(temperature=1.0, logit_bias={0: 1.5, 2: -100})
    assert np.allclose(distribution(logits, biased), softmax([2.5, 2, -97]))
    assert distribution(logits, Sampling(logit_bias={0: 2.5})).tolist() == [1, 0, 0]
    assert distribution(logits, Sampling(presence_penalty=2), [2, 2]).tolist() == [0, 1, 0]


def test_the_order_is_repetition_penalties_bias_processors_temperature() -> None:
    """Penalties after the bias, or the repetition penalty after anything, would give another result."""
    seen: list[np.ndarray] = []

    def halved(tokens: object, logits: np.ndarray) -> np.ndarray:
        seen.append(logits.copy())
        return logits / 2

    sampling = Sampling(temperature=0.5, repeat_penalty=2, presence_penalty=0.5, logit_bias={0: -3})
    got = distribution(np.array([4, 1, -1], np.float32), sampling, [0, 2], Rules(processors=(halved,)))
    assert seen[0].tolist() == [4 / 2 - 0.5 - 3, 1, -1 * 2 - 0.5]
    assert np.allclose(got, softmax([-1.5, 1, -2.5]))


def test_tokens_that_would_end_the_text_do_not_come_too_early() -> None:
    rules = Rules(start=1, min_tokens=2, ends=frozenset([2, 99]))
    logits = np.array([1, 2, 9], np.float32)
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=5.0, top_p=0.999),
        Sampling(temperature=2.0),
    ):
        assert [distribution(logits, sampling, [0] * n, rules)[2] > 0 for n in (1, 2, 3)] == [False, False, True]


def test_processors_run_one_after_another_and_ban_with_minus_infinity() -> None:
    def only(*allowed: int) -> object:
        def processor(tokens: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
            assert tokens == (7, 8) and logits.dtype == np.float32
            return np.where(np.isin(np.arange(len(logits)), allowed), logits, -np.inf)

        return processor

    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=4), Sampling(temperature=1.0, top_p=0.99)):
        p = distribution(LOGITS, sampling, [7, 8], Rules(processors=(only(0, 1, 3), only(0, 3, 4))))  # type: ignore[arg-type]
        assert np.allclose(p, np.array([0.3, 0, 0, 0.04, 0]) / 0.34)
    assert distribution(LOGITS, Sampling(), [7, 8], Rules(processors=(only(1, 3),))).tolist() == [0, 1, 0, 0, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "result",
    [np.full(5, -np.inf), np.full(5, np.nan), np.array([0, 0, np.inf, 0, 0]), np.zeros(4), np.zeros(5, np.int64), None, 3.0],
    ids=["none left", "nan", "inf", "shape", "integers", "None", "scalar"],
)
def test_what_a_processor_may_not_give(result: object) -> None:
    with pytest.raises(InputError, match="a processor"):
        distribution(LOGITS, Sampling(), [], Rules(processors=(lambda tokens, logits: result,)))


def test_logprobs_are_those_of_the_model_before_sampling_changes_anything() -> None:
    found = logprobs(LOGITS, 1, 3)
    assert found.token == 1 and found.logprob == pytest.approx(np.log(0.06), abs=1e-6)
    assert [token for token, _ in found.top] == [2, 0, 4]
    assert [value for _, value in found.top] == pytest.approx(np.log([0.4, 0.3, 0.2]), abs=1e-6)
    assert logprobs(LOGITS, 1, 0).top == () and len(logprobs(LOGITS, 1, 20).top) == 5
    equal = logprobs(np.zeros(300, np.float32), 7, 20)
    assert [token for token, _ in equal.top] == list(range(20)) and equal.logprob == pytest.approx(-np.log(300))


def test_texts_of_one_prompt_have_seeds_of_their_own_that_follow_from_the_seed() -> None:
    def draws(sample: int, seed: int | None = 5) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), sample=sample)
        return [sampler.draw(LOGITS, []) for _ in range(64)]

    assert draws(0) == [
        t for s in [Sampler(Sampling(temperature=1.0, seed=5))] for t in (s.draw(LOGITS, []) for _ in range(64))
    ]
    assert draws(1) == draws(1) and len({tuple(draws(i)) for i in range(5)}) == 5
    assert draws(1, seed=6) != draws(1) and draws(1, seed=None) != draws(1, seed=None)


def test_numbers_that_were_looked_at_are_those_that_are_drawn_by() -> None:
    """A seed's sequence is that of numpy's generator, however often a target was told what comes."""
    sampler, wanted = Sampler(Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, seed=11)), np.random.PCG64(11)
    numbers = np.random.Generator(wanted).random(12).tolist()
    for i in range(10):
        if i % 4:
            assert sampler.coming() == sampler.coming() == (0.7, 9, 0.8, 0.1, (numbers[i], numbers[i + 1]))
        assert sampler.uniform() == numbers[i]
    assert Sampler(Sampling()).coming() == Draw()
