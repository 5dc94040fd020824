"""The largest numbers of rows on the emulated device against numpy, and tokens drawn from them against the sampler."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.runtime.sampling import Sampler, Sampling
from edgeq.targets.capabilities import Largest
from edgeq.targets.cuda.device.device import upload
from edgeq.targets.cuda.lowering.largest import DRAWS, MAX_COUNT, SLICE, largest, most
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply import build
from tests.cuda.emulated import BACKWARD, FORWARD, SHUFFLED, EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]


def found(x: np.ndarray, count: int, order: int = FORWARD, draws: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Values, ids, whether all are finite and, by numbers of draws, tokens; by the kernels."""
    device, (rows, width) = EmulatedDevice(order), x.shape
    held, storage = upload(device, x), Storage(device, None)  # type: ignore[arg-type]
    chosen = largest(storage, held.address, width, rows, count, draws is not None)
    if draws is not None:
        storage.send(DRAWS, draws)
    kernels = device.load(build.kernels([variant for variant, _ in chosen.launches]))
    for variant, arguments in chosen.launches:
        device.launch(kernels[variant], *kernels[variant].generated.bind({**arguments.by_name, "tokens": rows}))
    device.synchronize()
    results = [np.empty(result.shape, result.type) for result in chosen.results(rows)]
    for array, result in zip(results, chosen.results(rows), strict=True):
        device.read(result.address, array)
    values, ids, finite, *tokens = results
    return values, ids, finite[:, 0] != 0, *(each[:, 0] for each in tokens)


def checked(x: np.ndarray, count: int, order: int = FORWARD) -> None:
    values, ids, finite = found(x, count, order)
    wanted = np.argsort(-x, axis=1, kind="stable")[:, :count]
    assert np.array_equal(ids, wanted) and np.array_equal(values, np.take_along_axis(x, wanted, 1))
    assert np.array_equal(finite, np.isfinite(x).all(axis=1))


def test_ten_thousand_rows_random_and_tied_have_the_order_of_numpy() -> None:
    rng = np.random.default_rng(0)
    checked(rng.standard_normal((5000, 70)).astype(np.float32), 5)
    checked(rng.integers(-2, 3, (5000, 70)).astype(np.float32), 5)


@pytest.mark.parametrize("order", [FORWARD, BACKWARD, SHUFFLED])
def test_rows_of_several_slices(order: int) -> None:
    rng = np.random.default_rng(1)
    for width, count in ((SLICE + 1, 1), (2 * SLICE, 64), (3 * SLICE - 5, 40)):
        x = np.concatenate([rng.standard_normal((2, width)), rng.integers(0, 4, (2, width)), np.zeros((1, width))])
        x[1, rng.integers(0, width, 9)] = -0.0
        checked(x.astype(np.float32), count, order)


def test_what_is_not_finite_is_told_and_zeros_of_both_signs_are_equal() -> None:
    x = np.random.default_rng(2).standard_normal((5, 2 * SLICE + 7)).astype(np.float32)
    for row, (at, value) in enumerate(((3, np.nan), (SLICE + 1, np.inf), (2 * SLICE + 6, -np.inf), (0, 3.4e38))):
        x[row, at] = value
    x[0, :] = np.nan
    _, ids, finite = found(x, 3)
    # The next run looks up what it is told before the host has seen that it means nothing.
    assert finite.tolist() == [False, False, False, True, True] and 0 <= ids.min() <= ids.max() < x.shape[1]
    zeros = np.array([[-0.0, 0.0, -1.0, 0.0, -0.0]], np.float32)
    assert found(zeros, 4)[1].tolist() == [[0, 1, 3, 4]]
    assert [most(width) for width in (3, 4096, 128256, 262144, 300000)] == [3, 64, 64, 64, 55]


def rules(rng: np.random.Generator) -> Sampling:
    """A temperature between one that leaves the largest alone and one that makes all alike; cuts, some of which are none."""
    return Sampling(
        temperature=float(10 ** rng.uniform(-6, 2)) if rng.random() < 0.8 else 1.0,
        top_k=int(rng.integers(1, MAX_COUNT + 1)),
        top_p=float(rng.choice([1.0, 0.5, 1e-9, rng.random()])) or 1.0,
        min_p=float(rng.choice([0.0, 1.0, 0.05, rng.random()])),
    )


def drawn(x: np.ndarray, each: list[Sampling], uniforms: np.ndarray, count: int, order: int) -> tuple[list[int], list[int]]:
    """A token of each row, by the kernels and by the sampler; of a row that is not finite the sampler has -1."""
    numbers = [[s.temperature, s.top_k, s.top_p, s.min_p, u] for s, u in zip(each, uniforms, strict=True)]
    values, ids, finite, tokens = found(x, count, order, np.array(numbers, np.float64))
    host = list[int]()
    for row, sampling in enumerate(each):
        if not finite[row]:
            host.append(-1)
            continue
        sampler = Sampler(sampling)
        sampler.uniform = lambda row=row: uniforms[row]  # type: ignore[method-assign,misc]
        host.append(sampler.draw_among(Largest(ids, values, finite), row))
    return tokens.tolist(), host


@pytest.mark.parametrize("order", [FORWARD, BACKWARD, SHUFFLED])
def test_drawn_tokens_are_those_of_the_sampler(order: int) -> None:
    """Random and tied logits of several slices and the largest floats, with rules of their own for each row."""
    rng, width, count = np.random.default_rng(3), SLICE + 90, MAX_COUNT
    x = [rng.standard_normal((30, width)) * scale for scale in (0.1, 3, 30)]
    x += [rng.integers(-2, 3, (20, width)), np.zeros((10, width)), rng.choice([-3.4e38, 0, 3.4e38], (10, width))]
    logits = np.concatenate(x).astype(np.float32)
    logits[5, 7] = -np.inf
    logits[6, SLICE + 1] = np.nan
    logits[7] = np.inf
    uniforms = rng.random(len(logits))
    uniforms[::7], uniforms[1::7] = 0, np.nextafter(1, 0)
    tokens, host = drawn(logits, [rules(rng) for _ in logits], uniforms, count, order)
    # What means nothing is a token of the vocabulary: the next run may have begun.
    assert host[5:8] == [-1] * 3 and all(0 <= token < width for token in tokens)
    assert tokens[:5] + tokens[8:] == host[:5] + host[8:]
    assert len(set(host)) > 40


def test_sums_have_the_bits_of_the_sampler_where_a_limit_is_met_exactly() -> None:
    """Equal logits, whose probabilities are exact in both: limits and draws at each of the sums of their probabilities."""
    each, uniforms = list[Sampling](), list[float]()
    for k in (1, 2, 3, 5, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 50, 63, MAX_COUNT):
        sums = np.cumsum(np.ones(k) / k)
        for i in range(k):
            each += [Sampling(temperature=0.7, top_k=k), Sampling(temperature=0.7, top_k=k, top_p=min(float(sums[i]), 1.0))]
            uniforms += [min(float(sums[i]), float(np.nextafter(1, 0))), float(np.nextafter(1, 0))]
    tokens, host = drawn(np.zeros((len(each), 70), np.float32), each, np.array(uniforms), MAX_COUNT, FORWARD)
    assert tokens == host
