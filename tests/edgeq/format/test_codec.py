"""The bytes of every codec: against the pictures in edgeq/format/codec.py, worked out by hand or by the naive loop below."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import (
    BITS,
    GROUP_SIZES,
    MAX_ENTRY,
    PLANES,
    SCALE_CODES,
    TABLE_BITS,
    Codec,
    dequantize,
    dequantized,
    from_bf16,
    pack_beside,
    pack_floats,
    pack_groups,
    pack_integers,
    to_bf16,
    unpack_beside,
    unpack_floats,
    unpack_groups,
    unpack_integers,
)
from edgeq.format.codec_rows import dequantize_rows
from edgeq.format.records import ArrayRef, LinearSpec, Weight
from edgeq.format.trellis import TRELLIS_BITS, by_subset
from tests.turns import by_turns

# Rows below, at and above a block of 16; columns below, at and above a chunk of 32; odd group counts of every group size.
SHAPES = [(1, 16), (16, 32), (17, 48), (15, 80), (33, 96), (5, 128), (31, 384), (3, 640)]
# Widths that no group size from 16 on divides, and widths that only the smaller ones do.
ODD_WIDTHS = (72, 84, 100, 200, 400, 3420)
CODECS = [
    Codec(kind, bits, group, symmetric)  # type: ignore[arg-type]
    for bits in BITS
    for group in (0, *GROUP_SIZES)
    for kind, symmetric in (("int", True), ("int", False), ("half", True), ("offset", True))
]
TWO_LEVELS = [
    Codec("two-level", bits, group, symmetric) for bits in BITS for group in GROUP_SIZES for symmetric in (True, False)
]
FOUR_BITS = [Codec("s4", bits, group) for bits in BITS for group in GROUP_SIZES]
TABLES = [
    Codec("table", bits, group, wide=wide) for bits in TABLE_BITS for group in (0, *GROUP_SIZES) for wide in (False, True)
]
TRELLISES = [Codec("trellis", bits, group) for bits in TRELLIS_BITS for group in GROUP_SIZES]
FILLS = ["random", "min", "max", "ends"]


def stored(packed: np.ndarray, bits: int, row: int, column: int) -> int:
    """q[row, column] read bit by bit from the picture: quad j = 4 channels, planes of 4, 2 and 1 bits, low bits first."""
    lines = packed[row // 16, column // 32]
    quad, byte = column % 32 // 4, 4 * (row % 16) + column % 4
    value = low = line = 0
    for plane in PLANES[bits]:
        per_line = 8 // plane
        value |= (int(lines[line + quad // per_line, byte]) >> plane * (quad % per_line) & (1 << plane) - 1) << low
        line, low = line + plane, low + plane
    return value


def fill(kind: str, bits: int, shape: tuple[int, int]) -> np.ndarray:
    top = (1 << bits) - 1
    if kind == "random":
        return np.random.default_rng(bits).integers(0, top + 1, shape).astype(np.uint8)
    if kind == "ends":
        return (np.indices(shape).sum(0) % 2 * top).astype(np.uint8)
    return np.full(shape, 0 if kind == "min" else top, np.uint8)


@pytest.mark.parametrize("bits", PLANES)
def test_unpack_inverts_pack_and_no_bit_is_wasted(bits: int) -> None:
    codec = Codec("int" if bits in BITS else "table", bits, 0)
    for (rows, columns), kind in itertools.product(SHAPES, FILLS):
        q = fill(kind, bits, (rows, columns))
        packed = pack_integers(q, bits)
        assert packed.shape == (-(-rows // 16), -(-columns // 32), bits, 64) and packed.dtype == np.uint8
        assert packed.nbytes == codec.parts(rows, columns)["q"].nbytes
        np.testing.assert_array_equal(unpack_integers(packed, rows, columns), q, f"{kind}, {rows} x {columns}")


@pytest.mark.parametrize("bits", PLANES)
def test_every_value_lies_where_the_picture_says(bits: int) -> None:
    q = fill("random", bits, (19, 72))
    packed = pack_integers(q, bits)
    for row, column in np.ndindex(*q.shape):
        assert stored(packed, bits, row, column) == q[row, column], (row, column)


@pytest.mark.parametrize("bits", PLANES)
def test_padding_rows_and_columns_are_zero(bits: int) -> None:
    packed = pack_integers(fill("max", bits, (3, 16)), bits)
    full = unpack_integers(packed, 16, 32)
    assert (full[:3, :16] == (1 << bits) - 1).all()
    assert not full[3:].any() and not full[:, 16:].any()


def test_four_bits_by_hand() -> None:
    q = np.zeros((16, 32), np.uint8)
    q[0, 0], q[0, 4] = 0x1, 0x2  # quads 0 and 1: line 0, byte 0, low and high nibble
    q[15, 3], q[15, 7] = 0xF, 0xE  # row 15, channel 3 of a quad: byte 63
    q[2, 9], q[2, 13] = 0x3, 0x4  # quads 2 and 3: line 1, byte 4 * 2 + 1
    q[1, 31] = 0x9  # quad 7: line 3, high nibble, byte 4 + 3
    packed = pack_integers(q, 4)[0, 0]
    expected = np.zeros((4, 64), np.uint8)
    expected[0, 0], expected[0, 63], expected[1, 9], expected[3, 7] = 0x21, 0xEF, 0x43, 0x90
    np.testing.assert_array_equal(packed, expected)


def test_three_bits_by_hand() -> None:
    q = np.zeros((16, 32), np.uint8)
    q[0, [0, 4, 8, 12]] = 0b101, 0b110, 0b011, 0b111  # quads 0 to 3 of row 0, channel 0
    q[0, 28] = 0b100  # quad 7
    packed = pack_integers(q, 3)[0, 0]
    expected = np.zeros((3, 64), np.uint8)
    expected[0, 0] = 0b11_11_10_01  # plane of 2 bits, line 0: quads 3 2 1 0
    expected[2, 0] = 0b1000_1011  # plane of 1 bit: quads 7 ... 0
    np.testing.assert_array_equal(packed, expected)


def test_five_bits_by_hand() -> None:
    q = np.zeros((16, 32), np.uint8)
    q[3, 2], q[3, 6] = 0b1_0101, 0b0_1010  # quads 0 and 1, byte 4 * 3 + 2
    q[3, 30] = 0b1_1111  # quad 7: line 3, high nibble
    packed = pack_integers(q, 5)[0, 0]
    expected = np.zeros((5, 64), np.uint8)
    expected[0, 14], expected[3, 14], expected[4, 14] = 0xA5, 0xF0, 0b1000_0001
    np.testing.assert_array_equal(packed, expected)


def test_eight_bits_by_hand() -> None:
    q = np.arange(16 * 32, dtype=np.uint16).reshape(16, 32).astype(np.uint8)
    packed = pack_integers(q, 8)[0, 0]
    assert packed[0, :8].tolist() == [0, 1, 2, 3, 32, 33, 34, 35]  # quad 0: channels 0-3 of row 0, then of row 1
    assert packed[7, :4].tolist() == [28, 29, 30, 31]  # quad 7: channels 28-31 of row 0
    assert packed[7, 60:].tolist() == q[15, 28:].tolist()


def test_a_value_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 3 bits"):
        pack_integers(np.full((1, 16), 8, np.uint8), 3)


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (17, 5), (35, 1)])
def test_groups_are_stored_by_block_group_row(shape: tuple[int, int]) -> None:
    a = np.arange(shape[0] * shape[1], dtype=np.float16).reshape(shape)
    packed = pack_groups(a)
    assert packed.shape == (-(-shape[0] // 16), shape[1], 16)
    assert all(packed[r // 16, g, r % 16] == a[r, g] for r, g in np.ndindex(*shape))
    np.testing.assert_array_equal(unpack_groups(packed, shape[0]), a)


# 4,480 cases of a fraction of a millisecond each: pytest would spend more on a test of its own than the case takes.
@pytest.mark.parametrize("codec", by_turns(CODECS, 0), ids=lambda c: c.name)
def test_dequantize_equals_the_formula(codec: Codec) -> None:
    for shape in SHAPES:
        for kind in FILLS:
            dequantize_equals_the_formula(codec, shape, kind)


def dequantize_equals_the_formula(codec: Codec, shape: tuple[int, int], kind: str) -> None:
    rows, columns = shape
    groups, rng = codec.groups(columns), np.random.default_rng(3)
    q = fill(kind, codec.bits, shape)
    scale = rng.uniform(-2, 2, (rows, groups)).astype(np.float16)
    scale.flat[0], scale.flat[-1] = 6.0e-8, 65504  # the smallest and the largest f16
    zero = rng.choice(np.array([0, 1, (1 << codec.bits) - 1], np.uint8), (rows, groups))
    arrays = {"q": pack_integers(q, codec.bits), "scale": pack_groups(scale)}
    if codec.zero_kind == "integer":
        arrays["zero"] = pack_groups(zero)
    offset = rng.uniform(-9, 9, (rows, groups)).astype(np.float16)
    offset.flat[0], offset.flat[-1] = -6.0e-8, -65504
    if codec.zero_kind == "offset":
        arrays["offset"] = pack_groups(offset)
    parts = codec.parts(rows, columns)
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == {n: (p.dtype, p.shape) for n, p in parts.items()}
    assert codec.nbytes(rows, columns) == sum(a.nbytes for a in arrays.values())
    group = np.arange(columns) // (codec.group_size or columns)
    middle = ((1 << codec.bits) - 1) / 2 if codec.kind == "half" else float(1 << (codec.bits - 1))
    zeros = np.float64(middle) if codec.symmetric else zero.astype(np.float64)[:, group]
    expected = scale.astype(np.float64)[:, group] * (q - zeros)
    if codec.zero_kind == "offset":
        # Exact in float64, then rounded once.
        exact = scale.astype(np.float64)[:, group] * q + offset.astype(np.float64)[:, group]
        expected = exact.astype(np.float32)
    result = dequantize(codec, rows, columns, arrays)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, expected)
    indices = np.array([rows - 1, 0, rows // 2, 0])
    looked_up = dequantize_rows(codec, columns, indices, arrays)
    np.testing.assert_array_equal(looked_up, expected[indices])


@pytest.mark.parametrize("codec", by_turns(CODECS, 1), ids=lambda c: c.name)
def test_the_last_group_has_what_is_left_of_the_row(codec: Codec) -> None:
    for columns in ODD_WIDTHS:
        the_last_group_has_what_is_left_of_the_row(codec, columns)


def the_last_group_has_what_is_left_of_the_row(codec: Codec, columns: int) -> None:
    """Against a loop over the groups: the last one has columns - (groups - 1) * group_size channels."""
    rows, size, rng = 18, codec.group_size or columns, np.random.default_rng(columns)
    starts = list(range(0, columns, size))
    groups = codec.groups(columns)
    assert groups == len(starts) and codec.parts(rows, columns)["scale"].shape == (2, groups, 16)
    q = rng.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8)
    scale = rng.uniform(0.001, 1, (rows, groups)).astype(np.float16)
    zero = rng.integers(0, 1 << codec.bits, (rows, groups)).astype(np.uint8) if codec.zero_kind == "integer" else None
    offset = rng.uniform(-1, 1, (rows, groups)).astype(np.float16) if codec.zero_kind == "offset" else None
    expected = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for g, start in enumerate(starts):
            middle = 2 ** (codec.bits - 1) - (0.5 if codec.kind == "half" else 0)
            center = np.float32(0 if offset is not None else middle if zero is None else zero[row, g])
            part = q[row, start : start + size].astype(np.float32)
            expected[row, start : start + size] = np.float32(scale[row, g]) * (part - center)
            if offset is not None:
                expected[row, start : start + size] += np.float32(offset[row, g])
    arrays = {"q": pack_integers(q, codec.bits), "scale": pack_groups(scale)}
    if zero is not None:
        arrays["zero"] = pack_groups(zero)
    if offset is not None:
        arrays["offset"] = pack_groups(offset)
    np.testing.assert_array_equal(dequantize(codec, rows, columns, arrays), expected)
    indices = np.array([17, 0, 5])
    np.testing.assert_array_equal(dequantize_rows(codec, columns, indices, arrays), expected[indices])


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_float_codecs_keep_what_their_type_can_hold(kind: str) -> None:
    codec = Codec(kind)  # type: ignore[arg-type]
    for shape in (*SHAPES, (2, 1), (17, 33)):
        w = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        w = from_bf16(to_bf16(w)) if kind == "bf16" else w.astype(np.float16).astype(np.float32) if kind == "f16" else w
        packed = pack_floats(w, codec.kind)
        part = codec.parts(*shape)["q"]
        assert (packed.dtype.name, packed.shape) == (part.dtype, part.shape)
        np.testing.assert_array_equal(unpack_floats(packed, codec.kind, *shape), w)
        np.testing.assert_array_equal(dequantize(codec, *shape, {"q": packed}), w)


def test_a_16_bit_line_holds_two_channels_of_sixteen_rows() -> None:
    w = np.arange(32, dtype=np.float32).reshape(16, 2)
    assert pack_floats(w, "f16").view(np.float16).reshape(-1).tolist() == list(range(32))
    assert pack_floats(w, "f32").reshape(-1).tolist() == [*range(0, 32, 2), *range(1, 32, 2)]


def test_bf16_rounds_half_to_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000, 0x80000000], np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x8000]
    # A NaN whose payload lies in the bits that are cut off would turn into infinity.
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(from_bf16(to_bf16(nans))).all()


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Codec("int", 4, 128), 4 + 16 / 128),
        (Codec("int", 4, 128, False), 4 + 24 / 128),
        (Codec("int", 3, 32, False), 3 + 24 / 32),
        (Codec("int", 5, 16), 6),
        (Codec("half", 2, 32), 2.5),
        (Codec("s4", 2, 32), 2 + 4 / 32 + 16 / 256),
        (Codec("offset", 4, 32), 5),
        (Codec("table", 4, 32), 4.5 + 16 * 8 / (16 * 256)),
        (Codec("table", 1, 0, wide=True), 1 + (16 + 1) / 256),
        (Codec("trellis", 2, 32), 2 + 4 / 32 + 16 / 256 + 8 * 8 / (16 * 256)),
        (Codec("two-level", 4, 32, False), 4.625),
        (Codec("two-level", 6, 16), 6.5625),
        (Codec("two-level", 3, 16), 3.5625),
        (Codec("int", 8, 0), 8 + 16 / 256),
        (Codec("bf16"), 16),
        (Codec("f32"), 32),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_effective_bits_count_scales_and_zero_points(codec: Codec, bits: float) -> None:
    dtypes = {"float32": "f32", "float16": "f16", "uint16": codec.kind, "uint8": "u8", "int8": "i8"}
    arrays = {name: ArrayRef(dtypes[p.dtype], p.shape, 0) for name, p in codec.parts(32, 256).items()}
    assert LinearSpec("x", (Weight(codec, 32, 256, arrays),)).bits_per_weight == bits


def test_padding_of_an_odd_row_counts_too() -> None:
    codec = Codec("int", 4, 0)
    arrays = {n: ArrayRef({"uint8": "u8", "float16": "f16"}[p.dtype], p.shape, 0) for n, p in codec.parts(1, 32).items()}
    assert LinearSpec("x", (Weight(codec, 1, 32, arrays),)).bits_per_weight == 8 * (4 * 64 + 16 * 2) / 32


@pytest.mark.parametrize("bits", [0, 1, 9, 16])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{bits} bits are not supported; choose 2"):
        Codec("int", bits, 32)


@pytest.mark.parametrize("group_size", [1, 8, 48, 256])
def test_unknown_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"group size {group_size} is not supported; choose 16"):
        Codec("int", 4, group_size)


@pytest.mark.parametrize("codec", TWO_LEVELS, ids=lambda c: c.name)
def test_two_levels_equal_the_formula(codec: Codec) -> None:
    for columns in (16, 256, 300, 784):
        two_levels_equal_the_formula(codec, columns)


def two_levels_equal_the_formula(codec: Codec, columns: int) -> None:
    """Channel by channel in float64; up to 6 bits no product is rounded."""
    rows, rng, groups, above = 19, np.random.default_rng(columns), codec.groups(columns), -(-columns // 256)
    q = rng.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8)
    scale, offset = (
        rng.integers(-128, 128, (rows, groups)).astype(np.int8),
        rng.integers(0, 256, (rows, groups)).astype(np.uint8),
    )
    super_scale, super_offset = (rng.uniform(-2, 2, (rows, above)).astype(np.float16) for _ in range(2))
    super_scale[0, 0], super_scale[1, -1] = 6.0e-8, 65504
    found = {"scale": scale, "offset": offset, "super_scale": super_scale, "super_offset": super_offset}
    parts = codec.parts(rows, columns)
    arrays = {"q": pack_integers(q, codec.bits), **{name: pack_groups(found[name]) for name in parts if name != "q"}}
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == {n: (p.dtype, p.shape) for n, p in parts.items()}
    expected = np.empty((rows, columns))
    for c in range(columns):
        g, s = c // codec.group_size, c // 256
        of_group = super_scale[:, s].astype(np.float64) * scale[:, g]
        if codec.symmetric:
            expected[:, c] = of_group * (q[:, c] - float(1 << (codec.bits - 1)))
        else:
            expected[:, c] = (of_group * q[:, c]).astype(np.float32) + super_offset[:, s].astype(np.float32) * offset[:, g]
        if codec.bits <= 6:
            exact = of_group * q[:, c]
            assert np.array_equal(exact, exact.astype(np.float32))
    result = dequantize(codec, rows, columns, arrays)
    np.testing.assert_array_equal(result, expected.astype(np.float32))
    indices = np.array([18, 0, 5])
    np.testing.assert_array_equal(dequantize_rows(codec, columns, indices, arrays), result[indices])


@pytest.mark.parametrize("codec", FOUR_BITS, ids=lambda c: c.name)
def test_scales_of_four_bits_equal_the_formula(codec: Codec) -> None:
    for columns in (16, 72, 256, 300):
        scales_of_four_bits_equal_the_formula(codec, columns)


def scales_of_four_bits_equal_the_formula(codec: Codec, columns: int) -> None:
    """Channel by channel in float64, where nothing is rounded; codes read from the nibbles of the page's picture."""
    rows, rng, groups = 19, np.random.default_rng(columns), codec.groups(columns)
    q = rng.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8)
    parts = codec.parts(rows, columns)
    scale = rng.integers(0, 256, parts["scale"].shape).astype(np.uint8)
    row = rng.uniform(-2, 2, (rows, 1)).astype(np.float16)
    row[0], row[1] = 6.0e-8, 65504
    arrays = {"q": pack_integers(q, codec.bits), "scale": scale, "super_scale": pack_groups(row)}
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == {n: (p.dtype, p.shape) for n, p in parts.items()}
    expected = np.empty((rows, columns))
    for r, c in np.ndindex(rows, columns):
        code = int(scale[r // 16, c // codec.group_size, r % 8]) >> (4 if r % 16 >= 8 else 0) & 15
        factor = (8 - code % 4) / 8 / 2 ** (code // 4)
        expected[r, c] = float(row[r, 0]) * factor * (q[r, c] - ((1 << codec.bits) - 1) / 2)
    result = dequantize(codec, rows, columns, arrays)
    np.testing.assert_array_equal(result, expected)
    indices = np.array([18, 0, 5])
    np.testing.assert_array_equal(dequantize_rows(codec, columns, indices, arrays), expected[indices].astype(np.float32))
    codes = unpack_beside(codec, "scale", scale, rows)
    assert codes.shape == (rows, groups)
    again = pack_beside(codec, "scale", codes)
    assert np.array_equal(unpack_beside(codec, "scale", again, rows), codes)


def test_a_q4_k_tensor_is_held_exactly() -> None:
    """Against the reader of the package gguf, over all scales and minima of 6 bits."""
    gguf = pytest.importorskip("gguf")
    rng, rows, blocks = np.random.default_rng(0), 20, 2
    scale, least = (rng.integers(0, 64, (rows, blocks, 8)).astype(np.uint8) for _ in range(2))
    q = rng.integers(0, 16, (rows, blocks, 8, 32)).astype(np.uint8)
    d, dmin = (rng.uniform(-0.1, 0.1, (rows, blocks, 1)).astype(np.float16) for _ in range(2))
    low = [x[..., :4] | x[..., 4:] >> 4 << 6 for x in (scale, least)]
    packed = np.concatenate([*low, scale[..., 4:] & 15 | least[..., 4:] << 4], axis=-1)
    nibbles = (q[..., ::2, :] | q[..., 1::2, :] << 4).reshape(rows, blocks, 128)
    data = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, nibbles], axis=-1).reshape(rows, -1)
    found = {"scale": scale.astype(np.int8), "offset": least, "super_scale": d, "super_offset": -dmin}
    arrays = {name: pack_groups(array.reshape(rows, -1)) for name, array in found.items()}
    arrays["q"] = pack_integers(q.reshape(rows, -1), 4)
    read = dequantize(Codec("two-level", 4, 32, False), rows, 256 * blocks, arrays)
    assert np.array_equal(read, gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_K))


@pytest.mark.parametrize("codec", TABLES, ids=lambda c: c.name)
def test_tables_equal_the_formula(codec: Codec) -> None:
    for columns in (16, 300):
        tables_equal_the_formula(codec, columns)


def tables_equal_the_formula(codec: Codec, columns: int) -> None:
    """Channel by channel in float64; no product is rounded.  Every block has a table of its own."""
    rows, rng, most = 35, np.random.default_rng(columns), MAX_ENTRY[codec.wide]
    groups, size = codec.groups(columns), codec.group_size or columns
    q = rng.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8)
    scale = rng.uniform(-2, 2, (rows, groups)).astype(np.float16)
    scale[0, 0], scale[1, -1] = 6.0e-8, 65504
    tables = rng.integers(-most, most + 1, (3, 1 << codec.bits)).astype(np.int8)
    tables[0, 0], tables[2, -1] = -most, most
    arrays = {"q": pack_integers(q, codec.bits), "scale": pack_groups(scale), "table": tables}
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == {
        n: (p.dtype, p.shape) for n, p in codec.parts(rows, columns).items()
    }
    expected = np.empty((rows, columns))
    for row, column in np.ndindex(rows, columns):
        expected[row, column] = np.float64(scale[row, column // size]) * int(tables[row // 16, q[row, column]])
    np.testing.assert_array_equal(dequantize(codec, rows, columns, arrays), expected.astype(np.float32))
    assert np.array_equal(expected.astype(np.float32), expected)
    indices = np.array([34, 0, 15, 16])
    np.testing.assert_array_equal(dequantize_rows(codec, columns, indices, arrays), expected[indices].astype(np.float32))
    natural = unpack_beside(codec, "table", tables, rows)
    assert natural.shape == (rows, 1 << codec.bits) and np.array_equal(pack_beside(codec, "table", natural), tables)
    natural[34] += 1
    with pytest.raises(ValueError, match="tables that differ"):
        pack_beside(codec, "table", natural)


def bit_of(packed: np.ndarray, bits: int, row: int, column: int) -> int:
    """The coded bit of a row of a channel, as docs/format.md says where it lies."""
    return stored(packed, bits, row, column) >> (2 if bits == 3 else 0) & 1


@pytest.mark.parametrize("columns", [16, 300])
@pytest.mark.parametrize("codec", TRELLISES, ids=lambda c: c.name)
def test_a_trellis_equals_the_formula(codec: Codec, columns: int) -> None:
    """Channel by channel in float64, with rows that pad the last block part of its ring; no product is rounded."""
    rows, bits, rng = 35, codec.bits, np.random.default_rng(columns)
    q = rng.integers(0, 1 << bits, (48, columns)).astype(np.uint8)
    codes = rng.integers(0, 16, (48, codec.groups(columns))).astype(np.uint8)
    row = rng.uniform(-2, 2, (48, 1)).astype(np.float16)
    tables = rng.integers(-31, 32, (3, 2 << bits)).astype(np.int8)
    arrays = {"q": pack_integers(q, bits), "scale": pack_beside(codec, "scale", codes), "super_scale": pack_groups(row)}
    arrays["table"] = tables
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == {
        n: (p.dtype, p.shape) for n, p in codec.parts(rows, columns).items()
    }
    expected = np.empty((rows, columns))
    for r, column in np.ndindex(rows, columns):
        first = r // 16 * 16
        above, below = (bit_of(arrays["q"], bits, first + (r + step) % 16, column) for step in (1, 15))
        entry = tables[r // 16, int(q[r, column]) + (above ^ below) * 2**bits]
        expected[r, column] = np.float64(row[r, 0]) * float(SCALE_CODES[codes[r, column // codec.group_size]]) * int(entry)
    np.testing.assert_array_equal(dequantize(codec, rows, columns, arrays), expected.astype(np.float32))
    assert np.array_equal(expected.astype(np.float32), expected)
    indices = np.array([34, 0, 15, 16])
    np.testing.assert_array_equal(dequantize_rows(codec, columns, indices, arrays), expected[indices].astype(np.float32))


@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_a_last_block_lacks_rows_of_zeros(bits: int) -> None:
    """Rows that are not packed are as those that are packed and read."""
    rng, codec = np.random.default_rng(bits), Codec("trellis", bits, 16)
    q = rng.integers(0, 1 << bits, (19, 20)).astype(np.uint8)
    beside = {"scale": np.zeros((19, 2), np.uint8), "super_scale": np.ones((19, 1), np.float16)}
    beside["table"] = np.repeat(rng.integers(-31, 32, (2, 2 << bits)).astype(np.int8), 16, axis=0)[:19]
    packed = {name: pack_beside(codec, name, a) for name, a in beside.items()} | {"q": pack_integers(q, bits)}
    read = dequantize(codec, 19, 20, packed)
    np.testing.assert_array_equal(dequantized(codec, 20, {**beside, "q": q}), read)
    assert set(np.unique(read)) <= set(np.unique(beside["table"]).astype(np.float32))


@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_neighbours_leave_a_row_every_level_of_two_subsets(bits: int) -> None:
    """Levels in order have the subsets 0, 1, 2, 3, 0, ... = 2 c1 + c0."""
    index = by_subset(bits)
    assert sorted(index) == list(range(2 << bits))
    coded = index & (1 << bits) - 1 if bits < 3 else index >> 2
    assert (np.arange(2 << bits) % 4 == 2 * (index >> bits) + (coded & 1)).all()


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_bits_of_a_trellis_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{bits} bits are not supported; choose 1, 2 or 3"):
        Codec("trellis", bits, 32)


@pytest.mark.parametrize("bits", [0, 5, 8])
def test_bits_of_an_index_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{bits} bits are not supported; choose 1, 2, 3 or 4"):
        Codec("table", bits, 32)


@pytest.mark.parametrize(("kind", "scales"), [("two-level", "two levels"), ("s4", "four bits"), ("trellis", "four bits")])
def test_scales_of_scales_need_groups(kind: str, scales: str) -> None:
    with pytest.raises(UnsupportedError, match=f"scales of {scales} need groups"):
        Codec(kind, 3, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["offset", "half", "s4", "table", "trellis"])
def test_a_codec_that_says_otherwise_where_zero_lies_has_no_zero_points(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{kind}' has no zero points"):
        Codec(kind, 4, 32, symmetric=False)  # type: ignore[arg-type]


def test_a_half_grid_by_hand() -> None:
    """The levels of 2 bits and scale 0.5: as far below zero as above it."""
    arrays = {"q": pack_integers(np.array([[0, 1, 2, 3]], np.uint8), 2), "scale": pack_groups(np.float16([[0.5]]))}
    assert dequantize(Codec("half", 2, 16), 1, 4, arrays).tolist() == [[-0.75, -0.25, 0.25, 0.75]]


def test_a_name_names_its_codec() -> None:
    for codec in (*CODECS, *TWO_LEVELS, *FOUR_BITS, *TABLES, *TRELLISES, Codec("f32"), Codec("f16"), Codec("bf16")):
        assert Codec.named(codec.name) == codec


def test_a_block_of_a_gguf_q4_1_tensor_is_held_exactly() -> None:
    """d 0.5, m -1.25, and integers 0 ... 15 twice: the values that llama.cpp reads back."""
    q = np.tile(np.arange(16, dtype=np.uint8), 2)[None]
    arrays = {"q": pack_integers(q, 4)}
    arrays |= {"scale": pack_groups(np.float16([[0.5]])), "offset": pack_groups(np.float16([[-1.25]]))}
    read = dequantize(Codec("offset", 4, 32), 1, 32, arrays)
    assert read.tolist() == [[0.5 * i - 1.25 for i in range(16)] * 2]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown codec 'q4_k'"):
        Codec("q4_k")  # type: ignore[arg-type]
