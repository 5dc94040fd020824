"""What an operation of a run has to do at least: bytes from memory, and multiplications with their additions (MACs).

Bytes are weights, read once per run, and the cache, read once per run and session.  What lies between operations stays in the
caches of the processor and is not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.format.records import KvCodec
from edgeq.targets.graph import Attention, CacheWrite, Experts, Linear
from edgeq.targets.layers import linears
from edgeq.targets.times import Step

INPUT_STEP = "quantize"
"""Name of the steps of a product that do not read its weights: they quantize or transform its input."""


@dataclass(frozen=True)
class Work:
    """bytes from memory;  macs: of integers, each a multiplication with an addition;  float_macs: of floats."""

    bytes: float = 0
    macs: float = 0
    float_macs: float = 0


@dataclass(frozen=True)
class Shape:
    """What of the rows of a run decides how much there is to do: arrays of `Rows`, as they are.

    slots, sessions   int32 [rows]
    spans             int32 [kinds, 2, rows], or None
    """

    slots: NDArray[np.int32]
    sessions: NDArray[np.int32]
    spans: NDArray[np.int32] | None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def ends(self) -> NDArray[np.int64]:
        """int64 [rows]: the cache positions that a causal row sees, its own included."""
        return self.slots.astype(np.int64) + 1

    def seen(self, kind: int) -> NDArray[np.int64] | None:
        """int64 [rows]: how many patches each row sees in the ranges of a kind; None: the run has no ranges."""
        return None if self.spans is None else (self.spans[kind, 1] - self.spans[kind, 0]).astype(np.int64)

    def of_rows(self, which: NDArray[np.int32]) -> Shape:
        return Shape(self.slots[which], self.sessions[which], None if self.spans is None else self.spans[:, :, which])


def work(step: Step, shape: Shape, kv: KvCodec) -> Work:
    """What a step has to do for the rows that reach it."""
    operation, rows = step.operation, len(shape)
    if isinstance(operation, Linear) and step.reads_weights:
        layer = operation.linear
        return Work(layer.nbytes, rows * layer.rows * layer.columns)
    if isinstance(operation, Experts):
        every = list(linears(operation))
        share = operation.chosen / len(operation.downs)
        macs = rows * share * sum(layer.rows * layer.columns for layer in every)
        return Work(min(1.0, rows * share) * sum(layer.nbytes for layer in every), macs)
    if isinstance(operation, Attention):
        position = 2 * operation.kv_heads * kv.head_bytes(operation.head_dim)
        seen, read = shape.seen(operation.span) if operation.span >= 0 else None, rows
        if seen is None:
            seen = np.minimum(shape.ends, operation.window) if operation.window else shape.ends
            # A window moves with the rows: together they see from the first one's beginning to the last one's end.
            read = sum(_positions_read(shape, operation.window, s) for s in np.unique(shape.sessions))
        return Work(read * position, float_macs=float(2 * seen.sum() * operation.heads * operation.head_dim))
    if isinstance(operation, CacheWrite):
        return Work(rows * 2 * operation.kv_heads * kv.head_bytes(operation.head_dim))
    return Work()


def _positions_read(shape: Shape, window: int, session: int) -> int:
    ends = shape.ends[shape.sessions == session]
    first = max(0, int(ends.min()) - window) if window else 0
    return int(ends.max()) - first


def name_of(step: Step) -> str:
    """The part of a layer for products ("gate_up"), the operation for the rest ("rms_norm"): the same on every target."""
    operation = step.operation
    if isinstance(operation, Linear):
        if not step.reads_weights:
            return INPUT_STEP
        owner, _, part = operation.linear.name.rpartition(".")
        return f"{owner.rpartition('.')[2]}.{part}" if part.isdecimal() else part
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(operation).__name__).lower()
