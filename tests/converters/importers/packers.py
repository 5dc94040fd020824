"""Packers of published layouts, for a bit, a channel or a row at a time: what the readers are held against.

Nothing here is shared with them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint8]
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word of AWQ holds output channel AWQ_NIBBLES[i] of eight."""


def stream(values: Integers, bits: int) -> NDArray[np.int32]:
    """[lines, count] -> [lines, words]: the bits of all values of a line one after another, low bits first."""
    lines, count = values.shape
    found = np.zeros((lines, -(-count * bits // 32) * 32), np.uint8)
    for bit in range(bits):
        found[:, bit : count * bits : bits] = values >> bit & 1
    return np.packbits(found, axis=1, bitorder="little").view(np.int32)


def old_words(values: Integers, bits: int) -> NDArray[np.int32]:
    """[lines, count] -> [lines, words]: whole values in each word, as compressed-tensors before 0.17."""
    per = 32 // bits
    missing = -values.shape[1] % per
    padded = np.concatenate([values, np.zeros((len(values), missing), np.uint8)], axis=1).astype(np.uint32)
    shifts = (np.arange(per) * bits).astype(np.uint32)
    return np.bitwise_or.reduce(padded.reshape(len(values), -1, per) << shifts, axis=2).view(np.int32)


def awq_gemm(values: Integers) -> NDArray[np.int32]:
    """[n, out] -> [n, out/8]."""
    found = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for c in range(found.shape[1]):
        for i, channel in enumerate(AWQ_NIBBLES):
            found[:, c] |= values[:, 8 * c + channel].astype(np.uint32) << np.uint32(4 * i)
    return found.view(np.int32)


def awq_fast(values: Integers) -> NDArray[np.int16]:
    """[out, in] -> [out/4, in]."""
    rows, columns = values.shape
    found = np.zeros((rows // 4, columns), np.uint16)
    for row in range(4):
        for channel in range(columns):
            alpha, beta, gamma = channel % 32 // 8, channel % 8 // 2, channel % 2
            position = channel // 32 * 32 + 8 * beta + 4 * gamma + alpha
            run, inside = divmod(position, 64)
            word, nibble = 64 * run + 16 * row + inside // 4, inside % 4
            found[:, word] |= values[row::4, channel].astype(np.uint16) << np.uint16(4 * nibble)
    return found.view(np.int16)


def gptq_planar(values: Integers, bits: int) -> NDArray[np.int32]:
    """[lines, count] -> [words, lines]: for every 32 values planes of 4, 2 and 1 bits, low bits first."""
    planes = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]
    lines, count = values.shape
    found = np.zeros((lines, count // 32, bits), np.uint32)
    low = 0
    for width in planes:
        per = 32 // width
        for k in range(count):
            i, j = divmod(k % 32, per)
            value = (values[:, k].astype(np.uint32) >> np.uint32(low)) & np.uint32((1 << width) - 1)
            found[:, k // 32, low + i] |= value << np.uint32(width * j)
        low += width
    return np.ascontiguousarray(found.reshape(lines, -1).T).view(np.int32)
