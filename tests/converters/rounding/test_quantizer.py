"""The quantizer gives exactly what the codec stores and reads back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeq.converters.rounding.linears import Delivery, LinearItem, Recipe, write_linear
from edgeq.converters.rounding.quantizer import fake, quantize
from edgeq.converters.rounding.tables import GAUSSIAN_SCALES, GAUSSIAN_TABLES
from edgeq.errors import CheckpointError
from edgeq.format.codec import BITS, TABLE_BITS, Codec, dequantize, pack_beside, pack_integers
from edgeq.format.trellis import TRELLIS_BITS

CODECS = [Codec("int", bits, group, symmetric) for bits in BITS for group in (0, 16, 64) for symmetric in (True, False)]
HALVES = [Codec("half", bits, group) for bits in BITS for group in (0, 16, 64)]
TABLES = [Codec("table", bits, group) for bits in TABLE_BITS for group in (0, 16, 64)]
TRELLISES = [Codec("trellis", bits, group) for bits in TRELLIS_BITS for group in (16, 64, 128)]
FOUR_BITS = [Codec("s4", bits, group) for bits in BITS for group in (16, 64, 128)]


@pytest.mark.parametrize("codec", [*CODECS, *HALVES, *FOUR_BITS, *TABLES, *TRELLISES], ids=lambda c: c.name)
def test_fake_quantization_is_bit_for_bit_what_the_packed_arrays_dequantize_to(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(codec.bits)
    weight = torch.randn(37, 192, generator=generator) * torch.logspace(-6, 3, 37)[:, None]
    weight[3] = 0
    stored = quantize(weight, codec, "w")
    arrays = {name: pack_beside(codec, name, array) for name, array in stored.arrays.items() if name != "q"}
    arrays["q"] = pack_integers(stored.q.numpy(), codec.bits)
    assert arrays.keys() == codec.parts(37, 192).keys()
    read = dequantize(codec, 37, 192, arrays)
    assert np.array_equal(read.view(np.uint32), fake(weight, codec).numpy().view(np.uint32))


def test_rounding_is_half_to_even() -> None:
    # Range -4 ... 3.5 in 15 steps of 0.5: the weights between the steps lie exactly half way.
    weight = torch.tensor([[-4.0, 3.5, 0.25, 0.75, 1.25, -0.25, -0.75, 0.0, *[0.0] * 8]])
    stored = quantize(weight, Codec("int", 4, 16, symmetric=False), "w")
    assert stored.scale.item() == 0.5
    assert stored.zero is not None and stored.zero.item() == 8
    assert stored.q[0, :8].tolist() == [0, 15, 8, 10, 10, 8, 6, 8]


def test_the_scale_is_rounded_to_f16_before_the_integers_are_computed() -> None:
    weight = torch.linspace(-1, 1, 16)[None] * 0.7
    codec = Codec("int", 8, 16, symmetric=False)
    stored = quantize(weight, codec, "w")
    scale = stored.scale.float()
    assert scale.item() != np.float32(1.4 / 255)
    assert stored.zero is not None
    expected = (torch.round(weight / scale) + stored.zero).clamp(0, 255)
    assert torch.equal(stored.q.float(), expected)


def test_an_all_positive_group_gets_zero_point_0_and_clips_its_top() -> None:
    weight = torch.linspace(5, 8, 16)[None]
    codec = Codec("int", 4, 16, symmetric=False)
    stored = quantize(weight, codec, "w")
    assert stored.zero is not None and stored.zero.item() == 0
    assert stored.q.unique().tolist() == [15]
    assert fake(weight, codec).max() < 3.1


@pytest.mark.parametrize("codec", HALVES, ids=lambda c: c.name)
def test_a_half_grid_takes_the_nearest_of_its_levels(codec: Codec) -> None:
    """Against all levels, in float64: as many below zero as above it, the outermost at the largest weight."""
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(codec.bits))
    stored = quantize(weight, codec, "w")
    assert stored.zero is None
    size = codec.group_size or 128
    scale = stored.scale.double().repeat_interleave(size, 1)
    levels = torch.arange(1 << codec.bits).double() - ((1 << codec.bits) - 1) / 2
    nearest = (weight.double()[..., None] - scale[..., None] * levels).abs().amin(-1)
    found = (weight.double() - fake(weight, codec).double()).abs()
    assert (found <= nearest + 1e-6 * scale).all()
    largest = weight.unflatten(1, (-1, size)).abs().amax(-1)
    assert torch.allclose(stored.scale.float() * ((1 << codec.bits) - 1) / 2, largest, rtol=1e-3)


@pytest.mark.parametrize("codec", TABLES, ids=lambda c: c.name)
def test_a_table_gives_the_nearest_of_its_entries(codec: Codec) -> None:
    """Against all entries, in float64; the outermost is at the largest weight."""
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(codec.bits))
    stored, size = quantize(weight, codec, "w"), codec.group_size or 128
    assert stored.zero is None and stored.table is not None and stored.table.shape == (5, 1 << codec.bits)
    scale = stored.scale.double().repeat_interleave(size, 1)
    nearest = (weight.double()[..., None] - scale[..., None] * stored.table[0].double()).abs().amin(-1)
    assert ((weight.double() - fake(weight, codec).double()).abs() <= nearest + 1e-6 * scale).all()
    largest = weight.unflatten(1, (-1, size)).abs().amax(-1)
    assert torch.allclose(stored.scale.float() * stored.table[0, -1], largest, rtol=1e-3)


@pytest.mark.parametrize("bits", [pytest.param(n, marks=pytest.mark.exhaustive) if n < 4 else n for n in TABLE_BITS])
def test_a_gaussian_table_loses_on_a_gaussian_what_its_page_says(bits: int) -> None:
    """And less than equally spaced levels from 2 bits on; the best scale of both is tried."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(bits)).double()
    table = torch.tensor(GAUSSIAN_TABLES[bits]).double()
    even = torch.arange(1 << bits).double() - ((1 << bits) - 1) / 2

    def loss(levels: torch.Tensor) -> float:
        between = (levels[:-1] + levels[1:]) / 2
        return float((levels[torch.bucketize(x, between)] - x).square().mean())

    found = loss(table * float(GAUSSIAN_SCALES[bits]))
    assert found == pytest.approx({1: 0.3634, 2: 0.1175, 3: 0.0346, 4: 0.00967}[bits], rel=0.02)
    assert all(found < 1.002 * loss(table * float(GAUSSIAN_SCALES[bits]) * share) for share in (0.9, 0.97, 1.03, 1.1))
    if bits > 1:
        assert found < min(loss(even * step) for step in np.linspace(0.25, 1.1, 200))


@pytest.mark.parametrize("codec", FOUR_BITS, ids=lambda c: c.name)
def test_a_scale_of_four_bits_is_the_nearest_share_of_the_largest(codec: Codec) -> None:
    """Also of a row whose groups differ by more than the codes span, and of one of zeros."""
    weight = torch.randn(6, 320, generator=torch.Generator().manual_seed(codec.bits))
    weight[1] *= torch.logspace(0, -3, 320)
    weight[2] = 0
    stored, alone = quantize(weight, codec, "w"), quantize(weight, Codec("half", codec.bits, codec.group_size), "w")
    assert stored.super_scale is not None and torch.equal(stored.super_scale, alone.scale.amax(1, keepdim=True))
    shares = alone.scale.double() / stored.super_scale.double()
    levels = torch.tensor([(8 - k % 4) / 8 / 2 ** (k // 4) for k in range(16)]).double()
    errors = (levels - shares[..., None]).abs()
    assert torch.equal(errors.gather(2, stored.scale.long()[..., None])[..., 0], errors.amin(2))
    assert stored.scale[1].max() == 15 and not stored.scale[2].any()


def test_symmetric_range_uses_the_most_negative_integer_only_when_reached() -> None:
    codec = Codec("int", 4, 16, symmetric=True)
    weight = torch.tensor([[-7.0, 7.0, 3.5, -3.5, *[0.0] * 12]])
    stored = quantize(weight, codec, "w")
    assert stored.scale.item() == 1.0 and stored.zero is None
    assert stored.q[0, :5].tolist() == [1, 15, 12, 4, 8]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_no_scale_is_zero_even_for_zero_weights(codec: Codec) -> None:
    weight = torch.zeros(1, 64)
    assert (quantize(weight, codec, "w").scale > 0).all()
    assert torch.equal(fake(weight, codec), weight)


def test_a_scale_beyond_f16_is_refused_by_tensor_name() -> None:
    weight = torch.full((1, 16), 1e6)
    with pytest.raises(CheckpointError, match="layers.7.mlp"):
        quantize(weight, Codec("int", 2, 16, symmetric=True), "layers.7.mlp")


def test_slabs_of_rows_quantize_like_the_whole_matrix() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    codec = Codec("int", 3, 32, symmetric=False)
    parts = [quantize(part, codec, "w") for part in torch.split(weight, 16)]
    assert torch.equal(torch.cat([p.q for p in parts]), quantize(weight, codec, "w").q)


@pytest.mark.parametrize("group", [0, 16, 64])
def test_integers_with_offsets_of_a_source_are_written_as_they_are(group: int) -> None:
    rows, columns, codec, rng = 50, 152, Codec("offset", 5, group), np.random.default_rng(group)
    shape = rows, codec.groups(columns)
    q = rng.integers(0, 32, (rows, columns)).astype(np.uint8)
    scale, offset = (rng.uniform(-0.5, 0.5, shape).astype(np.float16) for _ in range(2))
    brought = {"q": q, "scale": scale, "offset": offset}

    def integers(name: str, first: int, stop: int) -> dict[str, NDArray[Any]]:
        return {part: array[first:stop] for part, array in brought.items()}

    segments, item = Segments(), LinearItem("layer", (("w", rows),), columns, Recipe(codec))
    delivery = Delivery(unread, integers=integers)
    write_linear(segments, item, delivery, lambda chunks: chunks, lambda *_: None)  # type: ignore[arg-type]
    assert tuple(map(len, segments.found)) == item.nbytes
    parts = codec.parts(rows, columns)
    arrays = {
        name: np.frombuffer(data, part.dtype).reshape(part.shape)
        for (name, part), data in zip(parts.items(), segments.found, strict=True)
    }
    channel = np.arange(columns) // (group or columns)
    expected = q.astype(np.float32) * scale.astype(np.float32)[:, channel] + offset.astype(np.float32)[:, channel]
    assert np.array_equal(dequantize(codec, rows, columns, arrays), expected)


class Segments:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def append(self, chunks: Iterable[NDArray[Any]]) -> None:
        self.found.append(b"".join(chunk.tobytes() for chunk in chunks))


def unread(*_: object) -> NDArray[np.float32]:
    raise AssertionError("the rows of a tensor whose integers were brought")
