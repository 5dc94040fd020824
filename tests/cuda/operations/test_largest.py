"""The largest numbers of rows on the emulated device, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.targets.cuda.device.device import upload
from edgeq.targets.cuda.lowering.largest import SLICE, largest, most
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply import build
from tests.cuda.emulated import BACKWARD, FORWARD, SHUFFLED, EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]


def found(x: np.ndarray, count: int, order: int = FORWARD) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, ids and whether all are finite, by the kernels."""
    device, (rows, width) = EmulatedDevice(order), x.shape
    held, storage = upload(device, x), Storage(device, None)  # type: ignore[arg-type]
    chosen = largest(storage, held.address, width, rows, count)
    kernels = device.load(build.kernels([variant for variant, _ in chosen.launches]))
    for variant, arguments in chosen.launches:
        device.launch(kernels[variant], *kernels[variant].generated.bind({**arguments.by_name, "tokens": rows}))
    device.synchronize()
    result = np.empty((rows, count), np.float32), np.empty((rows, count), np.int32), np.empty(rows, np.int32)
    for array, address in zip(result, (chosen.values, chosen.ids, chosen.finite), strict=True):
        device.read(address, array)
    return result[0], result[1], result[2] != 0


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
