"""The rule by which the device rounds is the converters' own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeq.converters.rounding.quantizer import quantize
from edgeq.format.codec import Codec, dequantize, pack_groups, pack_integers, unpack_groups
from edgeq.format.quantization import MAX_SCALE, rounded


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_it_rounds_as_the_converters_do(bits: int, symmetric: bool) -> None:
    for group in (16, 32, 64, 128, 0):
        it_rounds_as_the_converters_do(bits, group, symmetric)


def it_rounds_as_the_converters_do(bits: int, group: int, symmetric: bool) -> None:
    rng, codec = np.random.default_rng(bits), Codec("int", bits, group, symmetric)
    w = (rng.standard_normal((37, 256)) * np.exp(3 * rng.standard_normal((37, 1)))).astype(np.float32)
    w[0], w[1], w[2], w[3] = 0, np.abs(w[1]), -np.abs(w[2]), 1e-7
    # Halves: multiples of half a step.
    w[4] = (rng.integers(-8, 9, 256) / 2).astype(np.float32)
    ours, theirs = rounded(w, codec), quantize(torch.from_numpy(w), codec, "w")
    assert np.array_equal(ours["q"], pack_integers(theirs.q.numpy(), bits))
    assert np.array_equal(ours["scale"], pack_groups(theirs.scale.numpy()))
    assert ("zero" in ours) == (theirs.zero is not None)
    if theirs.zero is not None:
        assert np.array_equal(ours["zero"], pack_groups(theirs.zero.numpy()))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_last_group_of_fewer_channels_has_a_range_of_its_own(bits: int, symmetric: bool) -> None:
    for group in (16, 32, 64, 128, 0):
        for columns in (72, 100, 3420):
            a_last_group_has_a_range_of_its_own(bits, group, symmetric, columns)


def a_last_group_has_a_range_of_its_own(bits: int, group: int, symmetric: bool, columns: int) -> None:
    """Against the rule of the module's head, group by group."""
    codec, size, rows = Codec("int", bits, group, symmetric), group or columns, 5
    # Offsets keep 0 out of most ranges: a range that padding with zeros would widen.
    w = (
        np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32)
        + np.arange(-2, 3, dtype=np.float32)[:, None]
    )
    top, starts = np.float32(2**bits - 1), range(0, columns, size)
    q, scales, zeros = np.empty_like(w), np.empty((rows, len(starts)), np.float16), np.empty((rows, len(starts)), np.float32)
    for row in range(rows):
        for g, start in enumerate(starts):
            part = w[row, start : start + size]
            span, steps = (np.abs(part).max(), 2 ** (bits - 1) - 1) if symmetric else (part.max() - part.min(), 2**bits - 1)
            scales[row, g] = max(span, np.float32(1e-5)) / np.float32(steps)
            scale = np.float32(scales[row, g])
            zeros[row, g] = 2 ** (bits - 1) if symmetric else np.clip(-np.rint(part.min() / scale), 0, top)
            q[row, start : start + size] = np.clip(np.rint(part / scale) + zeros[row, g], 0, top)
    made = rounded(w, codec)
    assert np.array_equal(made["q"], pack_integers(q.astype(np.uint8), bits))
    assert np.array_equal(made["scale"], pack_groups(scales))
    assert ("zero" in made) != symmetric
    if not symmetric:
        assert np.array_equal(made["zero"], pack_groups(zeros.astype(np.uint8)))


def test_weights_too_large_for_a_scale_are_clipped_and_stay_finite() -> None:
    codec = Codec("int", 2, 32, False)
    w = np.linspace(-1e6, 1e6, 64, dtype=np.float32)[None]
    made = rounded(w, codec)
    assert unpack_groups(made["scale"], 1).max() == MAX_SCALE
    assert np.isfinite(dequantize(codec, 1, 64, made)).all()
