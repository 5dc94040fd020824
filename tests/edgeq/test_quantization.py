"""The rule by which the device rounds is the converters' own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeq.codec import Codec, dequantize, pack_groups, pack_integers, unpack_groups
from edgeq.converters.quantizer import quantize
from edgeq.quantization import LARGEST_SCALE, rounded


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("bits", range(2, 9))
def test_it_rounds_as_the_converters_do(bits: int, group: int, symmetric: bool) -> None:
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


def test_weights_too_large_for_a_scale_are_clipped_and_stay_finite() -> None:
    codec = Codec("int", 2, 32, False)
    w = np.linspace(-1e6, 1e6, 64, dtype=np.float32)[None]
    made = rounded(w, codec)
    assert unpack_groups(made["scale"], 1).max() == LARGEST_SCALE
    assert np.isfinite(dequantize(codec, 1, 64, made["q"], made["scale"], made["zero"])).all()
