"""Unsigned integers of a few bits in machine words: value i is bits [i * bits, (i + 1) * bits) of the little-endian stream.

GPTQ along the input channels, its zero points along the outputs, compressed-tensors and MLX are all exactly this.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import AnyArray, ArrayU8


def unpack(words: AnyArray, bits: int, count: int) -> ArrayU8:
    """The first `count` values of each line: integers [..., words] of any width -> uint8 [..., count]; `bits`: 1 to 8.

    ValueError: there are too few words.
    """
    width = 8 * words.dtype.itemsize
    if words.shape[-1] * width < count * bits:
        raise ValueError(f"{words.shape[-1]} words of {width} bits hold fewer than {count} values of {bits} bits")
    period = math.lcm(width, bits)
    values, per = period // bits, period // width
    missing = -words.shape[-1] % per
    stream = np.ascontiguousarray(words).view(f"<u{words.dtype.itemsize}")
    if missing:
        stream = np.concatenate([stream, np.zeros((*stream.shape[:-1], missing), stream.dtype)], axis=-1)
    found = np.empty((*stream.shape[:-1], stream.shape[-1] // per * values), np.uint8)
    mask = stream.dtype.type((1 << bits) - 1)
    for i in range(values):
        word, shift = divmod(i * bits, width)
        value = stream[..., word::per] >> stream.dtype.type(shift)
        if shift + bits > width:
            value |= stream[..., word + 1 :: per] << stream.dtype.type(width - shift)
        found[..., i::values] = value & mask
    return np.ascontiguousarray(found[..., :count])


def pack(values: ArrayU8, bits: int) -> NDArray[np.int32]:
    """The inverse in words of 32 bits: uint8 [..., count], below 2**bits -> int32 [..., ceil(count * bits / 32)]."""
    count, width = values.shape[-1], 32
    period = math.lcm(width, bits)
    each, per = period // bits, period // width
    padded = np.zeros((*values.shape[:-1], -(-count // each) * each), np.uint32)
    padded[..., :count] = values
    words = np.zeros((*values.shape[:-1], padded.shape[-1] // each * per), np.uint32)
    for i in range(each):
        word, shift = divmod(i * bits, width)
        value = padded[..., i::each]
        words[..., word::per] |= value << np.uint32(shift)
        if shift + bits > width:
            words[..., word + 1 :: per] |= value >> np.uint32(width - shift)
    return np.ascontiguousarray(words[..., : -(-count * bits // width)]).view(np.int32)
