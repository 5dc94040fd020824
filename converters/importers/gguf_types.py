"""The types of tensors in GGUF files: what a block of a type holds, and how edgeq stores the same weights.

Types with blocks of 32 weights have a scale for each; K-quants have 256 weights with scales of 16 or 32 of them, which are
integers times one or two f16 of the whole block: scales of two levels.  IQ4_NL and MXFP4 have indices of a table, TQ1_0 and
TQ2_0 the weights -1, 0 and 1 times an f16 of 256.  Every function takes blocks, uint8 [rows, blocks of a row, bytes of a
block], and gives the arrays of the type's codec, none of them rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.source import StoredArrays
from edgeq.format.codec import AnyArray, ArrayU8, Codec

ArrayF16 = NDArray[np.float16]


@dataclass(frozen=True)
class BlockType:
    """name     as llama.cpp has it
    width    weights of a block;  nbytes  of a block
    codec    in which its integers are stored
    unpack   blocks -> the arrays of `codec`
    """

    name: str
    width: int
    nbytes: int
    codec: Codec
    unpack: Callable[[ArrayU8], StoredArrays]


def halves(raw: ArrayU8, at: int) -> ArrayF16:
    """The f16 at byte `at` of every block, [rows, blocks]."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0]


def nibbles(packed: ArrayU8) -> ArrayU8:
    """Low nibbles of the last dimension, then the high ones: [..., n] -> [..., 2, n]."""
    return np.stack((packed & 15, packed >> 4), -2)


def crumbs(packed: ArrayU8) -> ArrayU8:
    """The 2-bit fields of the last dimension, the lowest first: [..., n] -> [..., 4, n]."""
    return np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], -2)


def bits(packed: ArrayU8) -> ArrayU8:
    """The bits of the last dimension, the lowest first: [..., n] -> [..., 8, n]."""
    return np.stack([packed >> shift & 1 for shift in range(8)], -2)


def of_rows(values: AnyArray) -> ArrayU8:
    """Values below 256, [rows, ...] -> uint8 [rows, columns]."""
    return values.reshape(len(values), -1).astype(np.uint8, copy=False)


def one_level(q: AnyArray, scale: ArrayF16, offset: ArrayF16 | None = None) -> StoredArrays:
    """q [rows, ...], scale and offset [rows, blocks]."""
    arrays: dict[str, AnyArray] = {"q": of_rows(q), "scale": scale}
    return arrays if offset is None else {**arrays, "offset": offset}


def two_levels(
    q: AnyArray, d: ArrayF16, scales: AnyArray, dmin: ArrayF16 | None = None, mins: AnyArray | None = None
) -> StoredArrays:
    """q [rows, ...], factors d and dmin [rows, blocks], integers [rows, blocks, groups of a block].

    A minimum is subtracted in a K-quant and an offset added here, so the sign goes to the factor.
    """
    rows = len(q)
    arrays: dict[str, AnyArray] = {"q": of_rows(q), "scale": scales.reshape(rows, -1).astype(np.int8), "super_scale": d}
    if dmin is None or mins is None:
        return arrays
    return {**arrays, "offset": of_rows(mins), "super_offset": -dmin}


def fifth_bits(raw: ArrayU8, at: int) -> ArrayU8:
    """Bit k of the 32 bits at byte `at`, uint8 [rows, blocks, 32]."""
    return np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little")


def q4_0(raw: ArrayU8) -> StoredArrays:
    return one_level(nibbles(raw[..., 2:]), halves(raw, 0))


def q4_1(raw: ArrayU8) -> StoredArrays:
    return one_level(nibbles(raw[..., 4:]), halves(raw, 0), halves(raw, 2))


def q5_0(raw: ArrayU8) -> StoredArrays:
    low = nibbles(raw[..., 6:]).reshape(*raw.shape[:2], 32)
    return one_level(low | fifth_bits(raw, 2) << 4, halves(raw, 0))


def q5_1(raw: ArrayU8) -> StoredArrays:
    low = nibbles(raw[..., 8:]).reshape(*raw.shape[:2], 32)
    return one_level(low | fifth_bits(raw, 4) << 4, halves(raw, 0), halves(raw, 2))


def q8_0(raw: ArrayU8) -> StoredArrays:
    # Signed bytes, stored plus 128.
    return one_level(raw[..., 2:] ^ 128, halves(raw, 0))


def q2_k(raw: ArrayU8) -> StoredArrays:
    scales = raw[..., :16]
    q = crumbs(raw[..., 16:80].reshape(*raw.shape[:2], 2, 32))
    return two_levels(q, halves(raw, 80), scales & 15, halves(raw, 82), scales >> 4)


def q3_k(raw: ArrayU8) -> StoredArrays:
    low = crumbs(raw[..., 32:96].reshape(*raw.shape[:2], 2, 32))
    high = bits(raw[..., :32]).reshape(*raw.shape[:2], 2, 4, 32)
    packed = raw[..., 96:108]
    scales = nibbles(packed[..., :8]).reshape(*raw.shape[:2], 16) | crumbs(packed[..., 8:]).reshape(*raw.shape[:2], 16) << 4
    return two_levels(low | high << 2, halves(raw, 108), scales.astype(np.int8) - 32)


def q4_k(raw: ArrayU8) -> StoredArrays:
    scales, mins = six_bits(raw[..., 4:16])
    q = nibbles(raw[..., 16:].reshape(*raw.shape[:2], 4, 32))
    return two_levels(q, halves(raw, 0), scales, halves(raw, 2), mins)


def q5_k(raw: ArrayU8) -> StoredArrays:
    scales, mins = six_bits(raw[..., 4:16])
    low = nibbles(raw[..., 48:].reshape(*raw.shape[:2], 4, 32)).reshape(*raw.shape[:2], 8, 32)
    return two_levels(low | bits(raw[..., 16:48]) << 4, halves(raw, 0), scales, halves(raw, 2), mins)


def q6_k(raw: ArrayU8) -> StoredArrays:
    # Of each half: 64 bytes with the low nibbles of its first 64 weights, then with those of the others.
    low = nibbles(raw[..., :128].reshape(*raw.shape[:2], 2, 64)).reshape(*raw.shape[:2], 2, 4, 32)
    high = crumbs(raw[..., 128:192].reshape(*raw.shape[:2], 2, 32))
    return two_levels(low | high << 4, halves(raw, 208), raw[..., 192:208].view(np.int8))


IQ4_NL_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
MXFP4_TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the floats of four bits, E2M1, of OCP Microscaling Formats 1.0; a block's scale is half its power of two."""
MXFP4_BIAS = 128


def with_table(q: AnyArray, scale: ArrayF16, table: NDArray[np.int8]) -> StoredArrays:
    """q [rows, ...], scale [rows, blocks], and entries by index, the same for all rows."""
    return {"q": of_rows(q), "scale": scale, "table": np.broadcast_to(table, (len(q), len(table)))}


def iq4_nl(raw: ArrayU8) -> StoredArrays:
    return with_table(nibbles(raw[..., 2:]), halves(raw, 0), IQ4_NL_TABLE)


def mxfp4(raw: ArrayU8) -> StoredArrays:
    """A power of two that no f16 holds becomes NaN, which is refused; of a block of zeros it becomes 0."""
    q = nibbles(raw[..., 1:])
    return with_table(q, powers(q, raw[..., 0].astype(np.int32) - MXFP4_BIAS), MXFP4_TABLE)


def powers(q: AnyArray, exponents: NDArray[np.int32]) -> ArrayF16:
    """Scales of blocks of MXFP4 [..., blocks], whose indices are q [..., blocks, and those of a block]."""
    with np.errstate(over="ignore"):
        scale = np.ldexp(np.float32(1), exponents).astype(np.float16)
    scale = np.where((scale > 0) & np.isfinite(scale), scale, np.float16(np.nan))
    used = (q & 7).reshape(*exponents.shape, -1).any(-1)
    return np.where(used, scale, np.float16(0))


TERNARY = Codec("int", 2, 128)
"""Its integer 2 is zero, so 1 to 3 are the weights of ternary types; 0 is in none."""
POWERS_OF_THREE = np.array([1, 3, 9, 27, 81], np.uint8)


def ternary(digits: AnyArray, scale: ArrayF16) -> StoredArrays:
    """digits [rows, ...] from 0 to 2, of which 1 is zero; scale [rows, blocks] of 256 weights, two groups of the codec."""
    return one_level(digits + np.uint8(1), np.repeat(scale, 2, axis=1))


def trits(packed: ArrayU8, count: int) -> ArrayU8:
    """The first digits of bytes that are fractions to the base 3 of 256, rounded up: [..., n] -> [..., count, n]."""
    # Bytes wrap around: what is left of the one is the fraction behind its digits so far.
    shifted = packed[..., None, :] * POWERS_OF_THREE[:count, None]
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def tq1_0(raw: ArrayU8) -> StoredArrays:
    # Five digits of 32 bytes, of 16 bytes, and four of four bytes.
    parts = [trits(raw[..., first:end], count) for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return ternary(np.concatenate([part.reshape(*raw.shape[:2], -1) for part in parts], -1), halves(raw, 52))


def tq2_0(raw: ArrayU8) -> StoredArrays:
    """A fourth value, which no program writes, makes a scale NaN, which is refused."""
    digits, scale = crumbs(raw[..., :64].reshape(*raw.shape[:2], 2, 32)), halves(raw, 64)
    fourth = (digits == 3).reshape(*raw.shape[:2], -1).any(-1)
    return ternary(np.minimum(digits, 2), np.where(fourth, np.float16(np.nan), scale))


def six_bits(packed: ArrayU8) -> tuple[ArrayU8, ArrayU8]:
    """Twelve bytes -> eight scales and eight minima of six bits, [rows, blocks, 8] each."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((a & 63, c & 15 | a >> 6 << 4), -1)
    return scales, np.concatenate((b & 63, c >> 4 | b >> 6 << 4), -1)


BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18, Codec("int", 4, 32), q4_0),
    3: BlockType("Q4_1", 32, 20, Codec("offset", 4, 32), q4_1),
    6: BlockType("Q5_0", 32, 22, Codec("int", 5, 32), q5_0),
    7: BlockType("Q5_1", 32, 24, Codec("offset", 5, 32), q5_1),
    8: BlockType("Q8_0", 32, 34, Codec("int", 8, 32), q8_0),
    10: BlockType("Q2_K", 256, 84, Codec("two-level", 2, 16, symmetric=False), q2_k),
    11: BlockType("Q3_K", 256, 110, Codec("two-level", 3, 16), q3_k),
    12: BlockType("Q4_K", 256, 144, Codec("two-level", 4, 32, symmetric=False), q4_k),
    13: BlockType("Q5_K", 256, 176, Codec("two-level", 5, 32, symmetric=False), q5_k),
    14: BlockType("Q6_K", 256, 210, Codec("two-level", 6, 16), q6_k),
    20: BlockType("IQ4_NL", 32, 18, Codec("table", 4, 32, wide=True), iq4_nl),
    34: BlockType("TQ1_0", 256, 54, TERNARY, tq1_0),
    35: BlockType("TQ2_0", 256, 66, TERNARY, tq2_0),
    39: BlockType("MXFP4", 32, 17, Codec("table", 4, 32), mxfp4),
}
"""ggml's number of a quantized type -> what its blocks are."""
FLOAT_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
"""ggml's number -> the type as safetensors spells it."""
REFUSED = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{40: "NVFP4", 41: "Q1_0", 4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
}
"""Names of types that have no codec here, for messages."""


def type_name(number: int) -> str:
    """The name of a type, of one that nobody knows its number."""
    if number in BLOCK_TYPES:
        return BLOCK_TYPES[number].name
    return FLOAT_TYPES.get(number) or REFUSED.get(number) or f"type {number}"


def stored_bytes(number: int, rows: int, columns: int) -> int | None:
    """Bytes that rows of a supported type take in a GGUF file; None: columns that its blocks do not divide."""
    if number in FLOAT_TYPES:
        return rows * columns * (4 if number == 0 else 2)
    block = BLOCK_TYPES[number]
    return None if columns % block.width else rows * (columns // block.width) * block.nbytes
