"""What every part of lowering knows of the tables: their rows, and how an operation is cut into parts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.kernels import microkernel_int as tile
from edgeq.targets.target import Step

ROW_WORDS = 28
PARTS = ROW_WORDS - 1
"""The last word of a row: into how many parts the operation is cut."""
PARTS_A_THREAD = 4
"""Enough that a thread that is held up leaves little behind, few enough that taking them costs nothing."""
FINER = 4
"""Times as many for attention over many rows: its parts share nothing, and behind a long context one takes milliseconds."""
LEAST_CHANNELS = 2048
"""Of a row that are worth a part of their own."""
FLOAT_KINDS = {"f32": tile.F32_KIND, "f16": tile.F16_KIND, "bf16": tile.BF16_KIND}

Table = NDArray[np.int64]


class Tables(NamedTuple):
    """Of one mode and of weights: for a run of one row and of any number, and what their rows do."""

    one: Table
    many: Table
    steps: list[Step]


Variant = tuple[Callable[..., Kernel], tuple[int, ...]]
"""A factory of kernels and the numbers that become constants of its machine code."""


def kernel(factory: Callable[..., Kernel], *literals: int) -> Variant:
    return factory, literals


def float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def channel_parts(channels: int) -> int:
    """Parts that so many channels of one row are worth."""
    return -(-channels // LEAST_CHANNELS)
