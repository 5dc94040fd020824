"""Blocks of GGUF's quantized types from the arrays of a codec: the way back of `importers/gguf_types.py`, byte for byte.

A codec without a type of its own is written in a wider one that holds the same numbers: integers in Q4_0, Q5_0 or Q8_0, those
with an offset in Q4_1 or Q5_1.  These have a scale for 32 weights, so one for 64, 128 or a row is repeated.  With zero points
q - zero takes one bit more, and so does 2 q - (2**bits - 1) of a grid without zero, with half the scale.  Entries of a table
are signed bytes, as integers of Q8_0 are.  Integers of 2 bits that are -1, 0 and 1 go into TQ2_0 where their scales do.  No
number is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edgeq.converters.importers.gguf_types import (
    BLOCK_TYPES,
    FLOAT_TYPES,
    IQ4_NL_TABLE,
    MXFP4_BIAS,
    MXFP4_TABLE,
    TERNARY,
)
from edgeq.errors import UnsupportedError
from edgeq.format.codec import AnyArray, ArrayU8, Codec

Arrays = Mapping[str, AnyArray]
NUMBERS = {block.name: number for number, block in BLOCK_TYPES.items()}
FLOAT_NUMBERS = {name.lower(): number for number, name in FLOAT_TYPES.items()}
"""Kind of a codec of floats -> ggml's number of its type."""
BLOCK = 32
TABLES = {20: IQ4_NL_TABLE, 39: MXFP4_TABLE}
"""ggml's number of a type -> entries of its table by index."""
TQ2_0 = NUMBERS["TQ2_0"]
"""TQ1_0 has the same numbers in fewer bytes, and fewer programs run it."""
ONE_LEVEL = ("int", "half", "offset", "table")
"""Kinds of codecs whose scales are f16, as those of GGUF's blocks of 32 are."""


@dataclass(frozen=True)
class HeldAs:
    """How a codec is written.

    type     ggml's number
    codec    the codec of that type's blocks; None: floats
    """

    type: int
    codec: Codec | None

    @property
    def name(self) -> str:
        return BLOCK_TYPES[self.type].name if self.codec else FLOAT_TYPES[self.type]

    @property
    def width(self) -> int:
        """Weights that cannot be divided."""
        return BLOCK_TYPES[self.type].width if self.codec else 1


def fits_ternary(codec: Codec, arrays: Arrays) -> bool:
    """Whether these rows, as `blocks_of` takes them, are -1, 0 and 1 times a scale of 256 weights."""
    if codec != TERNARY or arrays["q"].shape[1] % BLOCK_TYPES[TQ2_0].width:
        return False
    # The first scale of each pair is written: the other one must have the same bits.
    scales = np.ascontiguousarray(arrays["scale"]).view(np.uint16)
    return bool(arrays["q"].all()) and np.array_equal(scales[:, ::2], scales[:, 1::2])


def held_as(codec: Codec, columns: int, table: AnyArray | None = None, ternary: bool = False) -> HeldAs:
    """The type that holds every number of a matrix with so many columns.

    table     of a codec with tables those of the matrix, int8 [tables, entries]
    ternary   all rows pass `fits_ternary`
    UnsupportedError: none does; the message says what would.
    """
    if not codec.integer:
        return HeldAs(FLOAT_NUMBERS[codec.kind], None)
    if ternary:
        return HeldAs(TQ2_0, TERNARY)
    for number, block in BLOCK_TYPES.items():
        same = block.codec == codec != TERNARY and columns % block.width == 0
        if same and (number not in TABLES or (table is not None and (table == TABLES[number]).all())):
            return HeldAs(number, codec)
    if codec.kind == "two-level":
        raise UnsupportedError(
            f"{codec.name} of {columns} columns: GGUF has scales of two levels in whole blocks of 256 weights"
        )
    # A kind that this module does not know would be written as other numbers.
    if codec.kind not in ONE_LEVEL:
        raise UnsupportedError(f"{codec.name}: GGUF has no such weights; convert to integers with f16 scales, such as i4 g32")
    if codec.group_size % BLOCK or columns % BLOCK:
        problem = f"groups of {codec.group_size or 'a row'} for {columns} columns"
        raise UnsupportedError(f"{problem}; GGUF has scales of 32 weights: convert with --group-size 32, 64, 128 or row")
    if codec.kind == "offset":
        if codec.bits > 5:
            raise UnsupportedError(
                f"{codec.name}: GGUF has offsets with 4 and 5 bits alone; convert to fewer bits, or without zero"
            )
        return _wider("Q4_1" if codec.bits <= 4 else "Q5_1")
    if codec.kind == "table":
        return _wider("Q8_0")
    # Of what is multiplied by a scale.
    most = (1 << codec.bits) - 1
    low, high = (-codec.center, codec.center - 1) if codec.zero_kind == "symmetric" else (-most, most)
    for name in ("Q4_0", "Q5_0", "Q8_0"):
        center = BLOCK_TYPES[NUMBERS[name]].codec.center
        if -center <= low and high < center:
            return _wider(name)
    raise UnsupportedError(f"{codec.name}: what its scales multiply has 9 bits, and GGUF has 8; convert with --sym")


def _wider(name: str) -> HeldAs:
    return HeldAs(NUMBERS[name], BLOCK_TYPES[NUMBERS[name]].codec)


def blocks_of(codec: Codec, target: HeldAs, arrays: Arrays) -> ArrayU8:
    """Rows as the file has them, uint8 [rows, bytes]; `arrays` of `codec`, q uint8 [rows, columns], others [rows, groups]."""
    assert target.codec is not None
    return PACKERS[target.type](arrays if codec == target.codec else _widened(codec, target.codec, arrays))


def _widened(codec: Codec, wider: Codec, arrays: Arrays) -> Arrays:
    """The arrays of a codec with groups of 32 that give the same numbers."""
    q, times = arrays["q"], (codec.group_size or arrays["q"].shape[1]) // BLOCK

    def repeated(values: AnyArray) -> AnyArray:
        return np.repeat(values, times, axis=1)[:, : q.shape[1] // BLOCK]

    found = {name: repeated(arrays[name]) for name in ("scale", "offset") if name in arrays}
    if codec.kind == "offset":
        return {**found, "q": q}
    if codec.kind == "table":
        entries = np.take_along_axis(arrays["table"], q, axis=1)
        return {**found, "q": entries.view(np.uint8) ^ 128}
    if codec.kind == "half":
        halved = found["scale"] * np.float16(0.5)
        if not np.array_equal(halved * np.float16(2), found["scale"]):
            raise UnsupportedError(f"{codec.name}: has a scale below 2**-23, whose half is no f16; convert with --sym")
        odd = 2 * q.astype(np.int16) - ((1 << codec.bits) - 1)
        return {"scale": halved, "q": (odd + wider.center).astype(np.uint8)}
    zero = np.repeat(repeated(arrays["zero"]), BLOCK, axis=1).astype(np.int16) if "zero" in arrays else codec.center
    return {**found, "q": (q.astype(np.int16) - zero + wider.center).astype(np.uint8)}


def _join(*parts: AnyArray) -> ArrayU8:
    """Fields of a block one after another: [rows, blocks, ...] each -> uint8 [rows, bytes of a row]."""
    fields = [np.ascontiguousarray(part).view(np.uint8).reshape(*part.shape[:2], -1) for part in parts]
    return np.concatenate(fields, -1).reshape(len(parts[0]), -1)


def _half(values: AnyArray) -> AnyArray:
    """f16 [rows, blocks] as a field."""
    return np.ascontiguousarray(values, "<f2")[..., None]


def _of_blocks(values: AnyArray, *shape: int) -> AnyArray:
    """[rows, values of a row] -> [rows, blocks, *shape]."""
    return values.reshape(len(values), -1, *shape)


def _nibbles(values: AnyArray) -> AnyArray:
    """[..., 2, n] -> [..., n], the first in the low nibbles."""
    low, high = values[..., 0, :], values[..., 1, :]
    packed: AnyArray = low | high << 4
    return packed


def _fields(values: AnyArray, bits: int) -> AnyArray:
    """[..., fields, n] -> [..., n], the first in the lowest bits."""
    shifted = [values[..., i, :] << np.uint8(bits * i) for i in range(values.shape[-2])]
    packed: AnyArray = np.bitwise_or.reduce(shifted)
    return packed


def _fifth_bits(q: AnyArray) -> AnyArray:
    """Bit 4 of 32 values -> 4 bytes."""
    return np.packbits(q >> 4 & 1, axis=-1, bitorder="little")


def _q4(a: Arrays) -> ArrayU8:
    return _join(_half(a["scale"]), *_offset(a), _nibbles(_of_blocks(a["q"], 2, 16)))


def _q5(a: Arrays) -> ArrayU8:
    q = _of_blocks(a["q"], 32)
    return _join(_half(a["scale"]), *_offset(a), _fifth_bits(q), _nibbles(_of_blocks(a["q"] & 15, 2, 16)))


def _offset(a: Arrays) -> list[AnyArray]:
    return [_half(a["offset"])] if "offset" in a else []


def _q8_0(a: Arrays) -> ArrayU8:
    return _join(_half(a["scale"]), _of_blocks(a["q"] ^ 128, 32))


def _iq4_nl(a: Arrays) -> ArrayU8:
    return _join(_half(a["scale"]), _nibbles(_of_blocks(a["q"], 2, 16)))


def _mxfp4(a: Arrays) -> ArrayU8:
    fractions, exponents = np.frexp(a["scale"].astype(np.float32))
    if not ((fractions == 0.5) | (a["scale"] == 0)).all():
        raise UnsupportedError("a scale of MXFP4's table is no power of two, which MXFP4 has alone")
    # frexp's fraction is half of what the power is of.  A block of zeros has the least power.
    powers = np.where(a["scale"] == 0, 0, exponents - 1 + MXFP4_BIAS)
    return _join(powers.astype(np.uint8)[..., None], _nibbles(_of_blocks(a["q"], 2, 16)))


def _tq2_0(a: Arrays) -> ArrayU8:
    return _join(_fields(_of_blocks(a["q"] - np.uint8(1), 2, 4, 32), 2), _half(a["scale"][:, ::2]))


def _factors(a: Arrays) -> list[AnyArray]:
    # A minimum is subtracted there and an offset added here.
    return [_half(a["super_scale"]), *([_half(-a["super_offset"])] if "super_offset" in a else [])]


def _q2_k(a: Arrays) -> ArrayU8:
    scales = _of_blocks(a["scale"].view(np.uint8) | a["offset"] << 4, 16)
    return _join(scales, _fields(_of_blocks(a["q"], 2, 4, 32), 2), *_factors(a))


def _q3_k(a: Arrays) -> ArrayU8:
    q, scales = a["q"], _of_blocks((a["scale"] + 32).view(np.uint8), 16)
    low, high = _nibbles(_of_scales(scales & 15, 2, 8)), _fields(_of_scales(scales >> 4, 4, 4), 2)
    masks = _fields(_of_blocks(q >> 2, 8, 32), 1)
    return _join(masks, _fields(_of_blocks(q & 3, 2, 4, 32), 2), low, high, *_factors(a))


def _of_scales(scales: AnyArray, *shape: int) -> AnyArray:
    return scales.reshape(*scales.shape[:2], *shape)


def _q4_k(a: Arrays) -> ArrayU8:
    return _join(*_factors(a), _six_bits(a), _nibbles(_of_blocks(a["q"], 4, 2, 32)))


def _q5_k(a: Arrays) -> ArrayU8:
    high = _fields(_of_blocks(a["q"] >> 4, 8, 32), 1)
    return _join(*_factors(a), _six_bits(a), high, _nibbles(_of_blocks(a["q"] & 15, 4, 2, 32)))


def _q6_k(a: Arrays) -> ArrayU8:
    low = _nibbles(_of_blocks(a["q"] & 15, 2, 2, 64))
    return _join(low, _fields(_of_blocks(a["q"] >> 4, 2, 4, 32), 2), _of_blocks(a["scale"], 16), *_factors(a))


def _six_bits(a: Arrays) -> AnyArray:
    """Eight scales and eight minima of six bits -> twelve bytes."""
    s, m = _of_blocks(a["scale"].view(np.uint8), 8), _of_blocks(a["offset"], 8)
    first = s[..., :4] | s[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6
    return np.concatenate((*first, s[..., 4:] & 15 | (m[..., 4:] & 15) << 4), -1)


PACKERS: dict[int, Callable[[Arrays], ArrayU8]] = {
    NUMBERS[name]: packer
    for name, packer in {
        **{"Q4_0": _q4, "Q4_1": _q4, "Q5_0": _q5, "Q5_1": _q5, "Q8_0": _q8_0},
        **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
        **{"IQ4_NL": _iq4_nl, "MXFP4": _mxfp4, "TQ2_0": _tq2_0},
    }.items()
}
"""ggml's number of a type -> arrays of its codec to its bytes."""
