"""Words of published layouts, literally, and round trips through packers written apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.importers.quantized.awq import fast_integers, gemm_integers, gemv_zero_words, unscaled_zeros
from edgeq.converters.importers.quantized.bit_stream import pack, unpack
from edgeq.converters.importers.quantized.gptq import ZeroRule, integers
from edgeq.converters.importers.quantized.grouped import Grouped, as_half, codec_group_size, split
from edgeq.errors import CheckpointError
from edgeq.format.codec import Codec
from tests.converters.importers.packers import awq_fast, awq_gemm, gptq_planar, stream


def words(*hexadecimal: str) -> NDArray[np.int32]:
    return np.array([int(each, 16) for each in hexadecimal], np.uint32).view(np.int32)


def drawn(seed: int, bits: int, *shape: int) -> NDArray[np.uint8]:
    """Integers with both ends of the range among them."""
    found = np.random.default_rng(seed).integers(0, 1 << bits, shape, np.uint8)
    found.flat[0], found.flat[-1] = 0, (1 << bits) - 1
    return found


EIGHTHS = [i % 8 for i in range(32)]


@pytest.mark.parametrize(
    ("bits", "values", "expected"),
    [
        (4, [3, 15, 0, 9, 8, 1, 7, 12], ["C71890F3"]),
        (8, [1, 2, 3, 255], ["FF030201"]),
        (2, [0, 1, 2, 3] * 8, ["E4E4E4E4"] * 2),
        (3, EIGHTHS, ["88FAC688", "C688FAC6", "FAC688FA"]),
        (4, [8 + x for x in (-8, -1, 0, 7, 3, -4, 1, -2)], ["694BF870"]),
        (4, [8 + x for x in range(-8, 0)], ["76543210"]),
        (4, [8 + x for x in range(8)], ["FEDCBA98"]),
        # MLX has eight of five bits in five bytes, four of six bits in three.
        (5, [1, 2, 3, 4, 5, 6, 7, 8], ["CC520C41", "00000041"]),
        (6, [1, 2, 3, 4, 63, 0, 63, 0], ["3F103081", "000003F0"]),
    ],
)
def test_words_of_the_bit_stream(bits: int, values: list[int], expected: list[str]) -> None:
    assert np.array_equal(pack(np.array(values, np.uint8), bits), words(*expected))
    assert unpack(words(*expected), bits, len(values)).tolist() == values


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_bit_stream_there_and_back(bits: int) -> None:
    for count in (1, 31, 32, 33, 96, 160):
        values = drawn(bits, bits, 3, count)
        packed = pack(values, bits)
        assert packed.shape == (3, -(-count * bits // 32)) and np.array_equal(packed, stream(values, bits))
        assert np.array_equal(unpack(packed, bits, count), values)


@pytest.mark.parametrize("kind", ("int8", "int16", "int64"))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_words_of_other_widths_are_the_same_stream(kind: str, bits: int) -> None:
    values = drawn(bits, bits, 2, 64)
    assert np.array_equal(unpack(stream(values, bits).view(kind), bits, 64), values)


def test_too_few_words_are_refused() -> None:
    with pytest.raises(ValueError, match="hold fewer than 9 values"):
        unpack(words("C71890F3"), 4, 9)


def test_words_of_awq() -> None:
    # The second is negative as int32.
    for values, word in (([0, 1, 2, 3, 4, 5, 6, 7], "75316420"), ([3, 15, 0, 9, 8, 1, 7, 12], "C19F7803")):
        assert gemm_integers(words(word)[None]).tolist() == [values]
        assert np.array_equal(awq_gemm(np.array([values], np.uint8)), words(word)[None])
    assert words("C19F7803")[0] == -1046513661
    values = drawn(4, 4, 5, 32)
    assert np.array_equal(gemm_integers(awq_gemm(values)), values)


@pytest.mark.parametrize(
    ("columns", "group_size", "expected"), [(4096, 128, 4), (11008, 128, 11), (11008, 64, 22), (1536, 32, 8), (896, 128, 1)]
)
def test_words_of_zero_points_in_the_layout_gemv(columns: int, group_size: int, expected: int) -> None:
    assert gemv_zero_words(columns, group_size) == expected


def test_the_layout_gemv_fast_against_its_packer() -> None:
    values = drawn(9, 4, 8, 192)
    assert np.array_equal(fast_integers(awq_fast(values)), values)


def test_zero_points_of_scaled_ones() -> None:
    scales = np.random.default_rng(0).uniform(0.001, 0.1, (5, 7)).astype(np.float16)
    zeros = drawn(1, 4, 5, 7)
    scaled = (-scales.astype(np.float32) * zeros).astype(np.float16).astype(np.float32)
    assert np.array_equal(unscaled_zeros(scaled, scales.astype(np.float32)), zeros)
    scaled[2, 3] = -scales[2, 3] * 4.4
    assert unscaled_zeros(scaled, scales.astype(np.float32)) is None
    nothing = np.zeros((1, 1), np.float32)
    assert np.array_equal(unscaled_zeros(nothing, nothing), [[0]])


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_gptq_integers_lie_along_the_inputs(bits: int) -> None:
    values = drawn(bits, bits, 6, 64)
    packed = np.ascontiguousarray(stream(values, bits).T)
    assert np.array_equal(integers(packed, bits, 64), values)


@pytest.mark.parametrize("bits", (3, 5, 6, 7))
def test_planar_integers(bits: int) -> None:
    values = drawn(bits, bits, 4, 96)
    assert np.array_equal(integers(gptq_planar(values, bits), bits, 96, planar=True), values)


V1 = {2: ["55555555"], 3: ["DB6DB6DB", "B6DB6DB6", "6DB6DB6D"], 4: ["77777777"], 8: ["7F7F7F7F"]}
V2 = {2: ["AAAAAAAA"], 3: ["24924924", "49249249", "92492492"], 4: ["88888888"], 8: ["80808080"]}


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_symmetric_zero_points_are_seen_whatever_the_label(bits: int) -> None:
    for found, versions in ((V1, (1,)), (V2, (1, 2))):
        zeros = words(*found[bits])[None].repeat(3, 0)
        for version in versions:
            assert (ZeroRule(bits, version).zeros(zeros) == 1 << (bits - 1)).all()
    # Where they need not be symmetric the label says what they are.
    assert (ZeroRule(bits, 1, symmetric=False).zeros(words(*V2[bits])[None]) == (1 << (bits - 1)) + 1).all()
    assert (ZeroRule(bits, 2, symmetric=False).zeros(words(*V1[bits])[None]) == (1 << (bits - 1)) - 1).all()


def test_three_bit_zero_points_of_an_old_gptqmodel() -> None:
    wrong = words("00000000", "B6DB6DB7", "49249249")[None].repeat(2, 0)
    assert (ZeroRule(3, 1).zeros(wrong) == 4).all()
    zeros = drawn(3, 3, 2, 64)
    taken = np.resize(words("24924924", "92492492", "49249249").view(np.uint32), 6)
    stored = (stream(zeros, 3).view(np.uint32) - taken).view(np.int32)
    assert np.array_equal(ZeroRule(3, 1, False, (5, 2)).zeros(stored), zeros)
    # Version 7 has it right.
    right = stream((zeros - 1) & np.uint8(7), 3)
    assert np.array_equal(ZeroRule(3, 1, False, (7, 0)).zeros(right), zeros)


def test_zero_points_of_zero() -> None:
    zeros = [7, 5, 0, 8, 8, 8, 8, 8]
    borrowed, overwritten = words("77776F46")[None], words("FFFFFF46")[None]
    gptqmodel, other = ZeroRule(4, 1, False, (0, 9)), ZeroRule(4, 1, False)
    assert gptqmodel.zeros(borrowed).tolist() == [zeros] and not gptqmodel.lost(borrowed)
    # What lies above the zero is gone; others read it as zero too.
    assert other.zeros(overwritten).tolist() == [[7, 5, 0, 0, 0, 0, 0, 0]]
    assert other.lost(overwritten) == 6 and other.lost(words("77777746")[None]) == 0


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_zero_points_of_both_versions(bits: int) -> None:
    zeros = drawn(bits, bits, 3, 32)
    stored = stream((zeros - 1) & np.uint8((1 << bits) - 1), bits)
    assert np.array_equal(ZeroRule(bits, 1, False).zeros(stored), zeros)
    assert np.array_equal(ZeroRule(bits, 2, False).zeros(stream(zeros, bits)), zeros)


def test_scales_of_bf16_are_kept_where_f16_has_them() -> None:
    never = np.zeros((1, 1), np.bool_)
    for exponent in range(-30, 16):
        value = np.full((1, 1), 1.9921875 * 2.0**exponent, np.float32)
        if exponent >= -17:
            assert as_half(value, never, "w").astype(np.float32) == value
            continue
        with pytest.raises(CheckpointError, match="w: the scale of row 0, group 0"):
            as_half(value, never, "w")
        # All weights of the group are zero, whatever its scale is.
        assert as_half(value, ~never, "w").shape == (1, 1)


@pytest.mark.parametrize("value", (2.0**-17, 65280.0, -65280.0))
def test_offsets_of_bf16_are_kept_where_f16_has_them(value: float) -> None:
    never = np.zeros((1, 1), np.bool_)
    assert as_half(np.full((1, 1), value, np.float32), never, "w", "offset").astype(np.float32) == value
    with pytest.raises(CheckpointError, match="w: the offset of row 0, group 0 .* with f16 offsets"):
        as_half(np.full((1, 1), (1 + 2**-7) * 2.0**-18, np.float32), never, "w", "offset")


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf, 65536.0, 0.1))
def test_scales_that_are_none_of_f16_are_refused(value: float) -> None:
    with pytest.raises(CheckpointError, match="does not hold"):
        as_half(np.full((1, 1), value, np.float32), np.zeros((1, 1), np.bool_), "w")


@pytest.mark.parametrize(
    ("group_size", "columns", "expected"),
    [(128, 512, 128), (256, 512, 128), (96, 192, 32), (48, 96, 16), (512, 512, 0), (1024, 512, 0), (128, 200, 128)],
)
def test_the_groups_of_a_codec_hold_those_of_a_checkpoint(group_size: int, columns: int, expected: int) -> None:
    assert codec_group_size(group_size, columns, "w") == expected
    codec = Codec("int", 4, expected)
    scale = np.arange(-(-columns // group_size), dtype=np.float32)[None]
    record: Any = Grouped(np.zeros((1, columns), np.uint8), 4, group_size, scale)
    finer = split(scale, group_size, columns, codec)
    assert finer.shape == (1, codec.groups(columns))
    wide = np.repeat(finer, expected or columns, axis=1)[:, :columns]
    assert np.array_equal(wide, record.per_channel(scale))


def test_groups_of_an_odd_size_are_refused() -> None:
    with pytest.raises(CheckpointError, match="w: groups of 40 channels; supported: multiples of 16"):
        codec_group_size(40, 80, "w")
