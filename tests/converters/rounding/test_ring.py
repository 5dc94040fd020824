"""The search of a trellis: against all codewords, on a Gaussian, and inside GPTQ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeq.converters.rounding import columns as columns_of_a_matrix
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import LinearItem, Recipe
from edgeq.converters.rounding.presets import MIN_MAX_ZERO_WEIGHED
from edgeq.converters.rounding.quantizer import Quantized, quantize, restored
from edgeq.converters.rounding.ring import choose, nearest_rings
from edgeq.converters.rounding.tables import TRELLIS_SCALES, trellis_levels
from edgeq.errors import CheckpointError
from edgeq.format.codec import Codec
from edgeq.format.trellis import RING, TRELLIS_BITS, by_subset, ring_indices

CODEWORDS = np.arange(1 << RING)[:, None] >> np.arange(RING) & 1
SUBSETS = 2 * (np.roll(CODEWORDS, 1, axis=1) ^ np.roll(CODEWORDS, -1, axis=1)) + CODEWORDS


@pytest.mark.parametrize("count", [16, 11, 1])
@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_no_codeword_is_nearer(bits: int, count: int) -> None:
    """All 2^16 rings of coded bits, each row at the nearest level of its subset; rows that are not there are zeros."""
    levels = trellis_levels(bits)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, scale = rng.standard_normal(count).astype(np.float32), rng.uniform(0.04, 0.1, count).astype(np.float32)
        lost = np.full((RING, 4), np.inf)
        lost[count:, ::2] = 0
        for subset in range(4):
            lost[:count, subset] = np.square(x[:, None] - scale[:, None] * levels[subset::4]).min(1)
        picked = np.empty(RING, np.int64)
        found = choose(x, scale, count, levels, picked)
        assert found == pytest.approx(lost[np.arange(RING), SUBSETS].sum(1).min(), rel=1e-5)
        assert found == pytest.approx(np.square(x - scale * levels[picked[:count]]).sum(), rel=1e-5)


@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_what_is_stored_stands_for_what_was_chosen(bits: int) -> None:
    """Also in a last block of few rows."""
    rng, levels = np.random.default_rng(bits), trellis_levels(bits)
    weight, scale = rng.standard_normal((21, 40)).astype(np.float32), np.full((21, 40), TRELLIS_SCALES[bits], np.float32)
    q, picked = np.empty(weight.shape, np.uint8), np.empty(RING, np.int64)
    nearest_rings(weight, scale, levels, bits, q)
    entries = levels[np.argsort(by_subset(bits))]
    read = entries[ring_indices(q, bits)] * scale
    for first, count in ((0, 16), (16, 5)):
        for column in range(40):
            rows = slice(first, first + count)
            least = choose(weight[rows, column], scale[rows, column], count, levels, picked)
            assert np.square(read[rows, column] - weight[rows, column]).sum() == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize(("bits", "lost"), [(1, 0.319), (2, 0.0890), (3, 0.0245)])
def test_the_tables_lose_on_a_gaussian_what_their_page_says(bits: int, lost: float) -> None:
    weight = np.random.default_rng(bits).standard_normal((16, 8192)).astype(np.float32)

    def loss(share: float) -> float:
        levels, q = trellis_levels(bits), np.empty(weight.shape, np.uint8)
        scale = np.full(weight.shape, TRELLIS_SCALES[bits] * share, np.float32)
        nearest_rings(weight, scale, levels, bits, q)
        read = levels[np.argsort(by_subset(bits))][ring_indices(q, bits)] * scale
        return float(np.square(read - weight).mean())

    found = loss(1)
    assert found == pytest.approx(lost, rel=0.015)
    assert found < 1.01 * min(loss(share) for share in (0.94, 0.97, 1.03, 1.06))


def moments(columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(600, columns, generator=generator) @ (
        torch.eye(columns) + 0.2 * torch.randn(columns, columns, generator=generator)
    )
    return x.T @ x


def rounded(weight: torch.Tensor, codec: Codec, act_order: bool) -> tuple[Quantized, torch.Tensor, float]:
    """What is stored, what it stands for, and the square error of the output."""
    found, recipe = moments(weight.shape[1]), Recipe(codec, MIN_MAX_ZERO_WEIGHED)
    factor = factorize(found.clone(), recipe, act_order)
    (q,), back = quantize_matrix(weight.clone(), factor, recipe, "w")
    change = (back - weight).double()
    return q, back, float(((change @ found.double()) * change).sum())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "size", "share"), [(1, 64, 1.02), (2, 32, 0.95), (3, 128, 0.95)])
def test_gptq_on_a_trellis(bits: int, size: int, share: float, act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is returned is what the file will hold; the sweeps lower the error, which is below that of a table of as many bits
    with f16 scales.  At 1 bit the sweeps of a table, whose rows move alone, make up for its levels."""
    weight = torch.randn(83, 160, generator=torch.Generator().manual_seed(bits))
    codec, table = Codec("trellis", bits, size), Codec("table", bits, size)
    q, back, lost = rounded(weight, codec, act_order)
    assert torch.equal(restored(q, codec), back)
    assert lost < share * rounded(weight, table, act_order)[2]
    monkeypatch.setattr(columns_of_a_matrix, "SWEEPS", 0)
    assert lost < 0.98 * rounded(weight, codec, act_order)[2]


@pytest.mark.parametrize("act_order", [False, True])
def test_slabs_and_threads_share_whole_blocks(act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(83, 64, generator=torch.Generator().manual_seed(5))
    codec = Codec("trellis", 2, 32)
    whole = rounded(weight, codec, act_order)[1]
    monkeypatch.setattr(columns_of_a_matrix, "SLAB_ELEMENTS", 64 * 40)
    assert torch.equal(rounded(weight, codec, act_order)[1], whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(rounded(weight, codec, act_order)[1], whole)
    finally:
        torch.set_num_threads(threads)


def test_weights_that_nothing_reaches_are_rounded_too() -> None:
    """To nearest, without a factor; rows of zeros and a lone large weight stay finite."""
    weight = torch.zeros(20, 32)
    weight[3, 5] = 100
    codec = Codec("trellis", 2, 16)
    (q,), back = quantize_matrix(weight, None, Recipe(codec, MIN_MAX_ZERO_WEIGHED), "w")
    assert torch.isfinite(back).all() and torch.equal(restored(q, codec), back)
    assert abs(float(back[3, 5]) - 100) < 5 and torch.equal(restored(quantize(weight, codec, "w"), codec), back)


def test_fused_tensors_that_share_a_block_are_refused() -> None:
    tensors = (("q", 24), ("k", 16))
    with pytest.raises(CheckpointError, match=r"layers.0.qkv: .* t2 g32 s4 .* multiples of 16, found q with 24: use --table"):
        LinearItem("layers.0.qkv", tensors, 32, Recipe(Codec("trellis", 2, 32)))
    LinearItem("layers.0.qkv", tensors[::-1], 32, Recipe(Codec("trellis", 2, 32)))
    LinearItem("layers.0.qkv", tensors, 32, Recipe(Codec("table", 2, 32)))
