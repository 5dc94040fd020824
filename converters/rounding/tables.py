"""Tables of signed bytes whose entries are nearest to weights of a Gaussian (Lloyd-Max), for codecs with tables.

S. Lloyd, Least Squares Quantization in PCM, IEEE Transactions on Information Theory 28, 1982; J. Max, Quantizing for Minimum
Distortion, 1960.  Their levels times a factor, rounded: of the factors that keep entries within 31 that with the least error.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GAUSSIAN_TABLES: dict[int, list[int]] = {
    1: [-26, 26],
    2: [-20, -6, 6, 20],
    3: [-26, -16, -9, -3, 3, 9, 16, 26],
    4: [-20, -15, -12, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 12, 15, 20],
}
"""By bits.  Mean square error on a unit Gaussian 0.363, 0.1175, 0.0346 and 0.00967; equally spaced levels have 0.363, 0.1188,
0.0374 and 0.01154, unrounded ones 0.363, 0.1175, 0.0345 and 0.00950."""
GAUSSIAN_SCALES = np.array([0, 1 / 32.586, 1 / 13.242, 1 / 12.038, 1 / 7.333], np.float32)
"""What entries of these tables are multiplied by for a unit Gaussian, by bits."""
TRELLIS_TABLES: dict[int, list[int]] = {
    1: [-17, -5, 5, 17],
    2: [-21, -12, -7, -2, 2, 7, 12, 21],
    3: [-29, -21, -16, -12, -9, -6, -4, -1, 1, 4, 6, 9, 12, 16, 21, 29],
}
"""Levels in order of trellises, by bits: found by steps of Lloyd's through the search of ring.py.  Mean square error on a unit
Gaussian 0.319, 0.0890 and 0.0245: what tables of 0.09, 0.20 and 0.25 bits more would have."""
TRELLIS_SCALES = np.array([0, 1 / 14.213, 1 / 11.302, 1 / 11.548], np.float32)
"""What they are multiplied by for a unit Gaussian, by bits."""


def gaussian_levels(bits: int) -> NDArray[np.float32]:
    """Entries float32 [2**bits], the least first."""
    return np.array(GAUSSIAN_TABLES[bits], np.float32)


def trellis_levels(bits: int) -> NDArray[np.float32]:
    """Levels of a trellis, float32 [2**(bits + 1)], the least first."""
    return np.array(TRELLIS_TABLES[bits], np.float32)


def trellis_proxy(bits: int) -> NDArray[np.float32]:
    """Levels among which scales of a trellis are searched, float32 [2**bits]: those of a table of as many bits, where a row
    decides alone, in the unit of the trellis' own."""
    unit = np.float32(GAUSSIAN_SCALES[bits] / TRELLIS_SCALES[bits])
    return gaussian_levels(bits) * unit
