"""A trellis over the 16 rows of a block: indices of a table have one bit more than is stored, which neighbouring rows give.

One bit c0 of each stored integer is *coded*: the lowest of 1 and of 2 bits, the highest of 3, which lies in the plane of 1 bit.
The rows of a block form a ring; in every channel of it

    c1[r] = c0[r + 1 mod 16] xor c0[r - 1 mod 16]            index[r] = q[r] | c1[r] << bits

This is the code of four states of G. Ungerboeck (Channel Coding with Multilevel/Phase Signals, IEEE Transactions on Information
Theory 28, 1982), used to quantize (M. Marcellin and T. Fischer, Trellis Coded Quantization, IEEE Transactions on Communications
38, 1990) and closed to a ring.  Levels in order belong to the subsets 0, 1, 2, 3, 0, ... = 2 c1 + c0: the neighbours of a row
leave it two of them, of which c0 chooses one, the other bits choose a level inside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RING = 16
"""Rows of a ring: those of a block."""
TRELLIS_BITS = range(1, 4)
"""Stored bits of an index: one byte shuffle looks up in 16 entries."""


def coded_bit(bits: int) -> int:
    """Which bit of the stored integers is coded."""
    return 2 if bits == 3 else 0


def ring_indices(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Indices of the table, uint8 [rows, columns], of stored integers [rows, columns], whose first row is that of a block; rows
    that the last block lacks count as zeros."""
    coded: NDArray[Any] = np.pad(q >> coded_bit(bits) & 1, ((0, -len(q) % RING), (0, 0)))
    rings = coded.reshape(-1, RING, q.shape[1])
    beside = np.roll(rings, -1, axis=1) ^ np.roll(rings, 1, axis=1)
    return (q | beside.reshape(coded.shape)[: len(q)] << bits).astype(np.uint8)


def stored_of(level: Any, bits: Any) -> Any:
    """What is stored of a level, its place in order: all of its index but the bit that the neighbours give."""
    free, c0 = level >> 2, level & 1
    return free | c0 << 2 if bits == 3 else c0 | free << 1


def by_subset(bits: int) -> NDArray[np.int64]:
    """The index in a table of every level, int64 [2**(bits + 1)], the least first: (level div 4) is what a row chooses freely,
    level mod 4 its subset."""
    level = np.arange(1 << bits + 1)
    return np.asarray(stored_of(level, bits) | (level >> 1 & 1) << bits)
