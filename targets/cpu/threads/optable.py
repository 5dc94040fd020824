"""The op table: how it is made of op records, and how an operation is cut into work items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.format.records import Mode
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.times import Step

PARTS_A_THREAD = 4
"""Enough that a thread that is held up leaves little over, few enough that taking them costs nothing."""
MIN_CHANNELS = 2048
"""Channels of a row that are worth a work item of their own."""

Table = NDArray[np.int64]
"""Op records, int64 [operations, RECORD_SLOTS]."""
Variant = tuple[Callable[..., Kernel], tuple[int, ...]]
"""A factory of kernels and the numbers that become constants of its machine code."""


class Tables(NamedTuple):
    """The tables of one mode and one kind of weights: for a run of one row and of any number, and what their records do.

    mode   of the activations
    work   multiplications and additions of each record [operations, 2]: for a row, and for a row and a slot that it sees
    """

    decode: Table
    prefill: Table
    steps: list[Step]
    mode: Mode
    work: NDArray[np.float64]


@dataclass(frozen=True)
class ExpertStage:
    """The op records of all experts for one stage of their layer, int64 [experts, RECORD_SLOTS], and the kernel of each."""

    table: Table
    functions: list[Variant]


def kernel(factory: Callable[..., Kernel], *literals: int) -> Variant:
    return factory, literals


def channel_parts(channels: int) -> int:
    """Work items that so many channels of one row are worth."""
    return -(-channels // MIN_CHANNELS)
